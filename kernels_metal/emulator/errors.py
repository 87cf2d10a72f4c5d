"""The one exception of the emulator."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A fault of a kernel, found before, while or after it ran.

    `kind` is one of compile, lint, address space, bounds, alignment, read-only, race, divergence,
    uninitialised, unwritten, arithmetic, limit. `line` counts in `file` (0 if it belongs to no
    line), `thread` is the position in the grid, `buffer` an input, output or threadgroup variable,
    or "".
    """

    def __init__(
        self,
        kind: str,
        message: str,
        kernel: str,
        place: tuple[str, int] = ("", 0),
        thread: tuple[int, int, int] | None = None,
        buffer: str = "",
    ) -> None:
        self.kind, self.kernel, self.thread, self.buffer = kind, kernel, thread, buffer
        self.file, self.line = place
        where = f", {self.file}:{self.line}" if self.line else ""
        who = f", thread {thread}" if thread is not None else ""
        subject = f"kernel {kernel}" if kernel else "emulator"
        super().__init__(f"{subject}{where}{who}: {kind}: {message}")
