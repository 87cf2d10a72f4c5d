"""Text from models, files and hubs, without the characters that a terminal obeys."""

from __future__ import annotations

import io
import re
import sys

# Control characters of C0 and C1 but for tab and line feed, DEL, and what turns the direction in
# which text is read.
_OBEYED = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[{_OBEYED}]")
_UNSAFE_BESIDE_BARS = re.compile(rf"(?!\r|\x1b\[A)[{_OBEYED}]")


def for_terminal(text: str) -> str:
    """`text` without what a terminal would obey; the letters behind an escape stay, as letters.

    Each character is judged alone, so the pieces of a stream are as safe as the whole.
    """
    return _UNSAFE.sub("", text)


class _SafeStream(io.TextIOWrapper):
    """Another way into a terminal's stream, for text without what `unsafe` finds."""

    def __init__(self, stream: io.TextIOWrapper, unsafe: re.Pattern[str]) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        self._unsafe = unsafe

    def write(self, text: str, /) -> int:
        super().write(self._unsafe.sub("", text))
        return len(text)


def guard_terminal() -> None:
    """Let nothing that this program prints make a terminal do more than show it.

    Output that is piped or redirected stays as it is. Progress bars on stderr may go to the
    beginning of their line, and a line up.
    """
    for name, unsafe in (("stdout", _UNSAFE), ("stderr", _UNSAFE_BESIDE_BARS)):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream.isatty():
            setattr(sys, name, _SafeStream(stream, unsafe))
