"""`@file` in a question: the text of the file goes with it."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_mlx.client import Album, DFlashError, is_picture, shown

TYPICAL = 4  # bytes of a token of English or of code; what a model really counts is known later
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_ATTACHED = re.compile(r"\n\n(\S[^\n]*):\n(`{3,})\n(.{1000,}?)\n\2(?=\n\n|$)", re.DOTALL)
_LIKE_A_FILE = re.compile(r"^(/|~|\.\.?/)|\.[A-Za-z0-9]{1,5}$")


def mentions(line: str) -> bool:
    """Whether `line` may mention a file; asks no disk."""
    return _MENTION.search(line) is not None


def attached(line: str, room: int, album: Album | None = None) -> str:
    """What goes behind `line`: each file that it mentions, by name and text, "" for none.

    room: tokens that are left for them, counted roughly. album: takes in pictures. Asks the disk,
    which may take a while. Raises DFlashError for a file that is missing, cannot be read, is no
    text or too large. Words that only begin like a mention stay words: handles, and decorators.
    """
    found = (_file(match, line) for match in _MENTION.finditer(line))
    parts = []
    for file in dict.fromkeys(file for file in found if file is not None):
        if album is not None and is_picture(file):
            parts.append(album.line(file))
            continue
        text = _text(file, room)
        room -= len(text) // TYPICAL
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        parts.append(f"\n\n{file}:\n{fence}\n{text.rstrip()}\n{fence}")
    return "".join(parts)


def folded(question: str) -> str:
    """A question as it is shown: files that went with it by name and length, like a paste."""
    return shown(_ATTACHED.sub(lambda f: f"\n[{f[1]}, {len(f[3]):,} characters]", question))


def _file(match: re.Match[str], line: str) -> Path | None:
    """The file that is meant, None where none is; a sentence may go on right behind its name."""
    name = match[1] or match[2]
    for spelled in (name, name.rstrip(".,;:!?)]}'\"")):
        try:
            file = Path(spelled).expanduser()
            if spelled and file.exists():
                return file
        except (OSError, RuntimeError, ValueError):  # too long, no such user's home, a zero byte
            continue
    before = line[: match.start()].rpartition("\n")[2]
    decorator = "\n" in line and not before.strip()
    if decorator or not (match[1] or _LIKE_A_FILE.search(name.rstrip(".,;:!?"))):
        return None
    step = "check the name, or put a space after the @ to send it as it is"
    raise DFlashError(f"there is no file {name[:80]}", step)


def _text(file: Path, room: int) -> str:
    """The text of a file of up to `room` tokens; DFlashError for one that has no such text."""
    try:
        if file.is_dir():
            step = "name a file in it, or put a space after the @"
            raise DFlashError(f"{file} is a folder", step)
        if not file.is_file():  # a FIFO or a device: reading one may never end
            raise DFlashError(f"{file} is not a regular file", "save what it gives to a file")
        most = max(room, 0) * TYPICAL
        size = file.stat().st_size
        with file.open("rb") as opened:
            data = b"" if size > most else opened.read(most + 1)
        size = max(size, len(data))
    except OSError as error:
        what = f"{file} cannot be read ({error.strerror})"
        raise DFlashError(what, "make it readable, or name another file") from None
    if size > most:
        left = f"only about {max(room, 0):,} are left in the context"
        what = f"{file} has {size:,} bytes, about {size // TYPICAL:,} tokens, but {left}"
        raise DFlashError(what, "name a shorter file, or begin a /new conversation")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(file, f"byte {data[error.start]:#04x} at {error.start}") from None
    if "\0" in text:
        raise _not_text(file, f"byte 0x00 at {text.index(chr(0))}")
    return text


def _not_text(file: Path, where: str) -> DFlashError:
    return DFlashError(f"{file} is not text in UTF-8 ({where})", "name a text file, or convert it")
