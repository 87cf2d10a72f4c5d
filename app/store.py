"""Conversations on disk: one JSON-lines file each, replaced as a whole.

The first line holds the title and the model, every other line one turn. A file is written beside
the old one, flushed to the disk and renamed over it, so whatever happens a reader meets the old
file or the new one. A damaged file gives what stands before the damage and is kept as it was.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_chat.conversation import UNTITLED, Conversation, Turn, now
from dflash_mlx.client import DFlashError, replace_text

FORMAT = "dflash-chat conversation"
VERSION = 1
SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Entry:
    """A stored conversation in a list. damaged: its first line cannot be read."""

    file: Path
    title: str
    modified: float
    damaged: bool = False


@dataclass(frozen=True)
class Opened:
    """A conversation, and a sentence about what of its file could not be read, "" for nothing.

    stamp: time and size of the file as it was read.
    """

    conversation: Conversation
    problem: str = ""
    stamp: tuple[int, int] = (0, 0)


class Store:
    """The conversations in one folder, which is made when the first is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}  # files as we last read or wrote them

    def file_of(self, conversation: Conversation) -> Path:
        """Where `conversation` is kept."""
        return self.folder / (conversation.created + SUFFIX)

    def entries(self) -> list[Entry]:
        """All conversations, the newest change first; unreadable ones are marked."""
        try:
            files = [f for f in self.folder.iterdir() if f.match(f"[!.]*{SUFFIX}")]
            found = [entry for file in files if (entry := _entry(file)) is not None]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._problem("read", error) from None
        return sorted(found, key=lambda entry: entry.modified, reverse=True)

    def save(self, conversation: Conversation) -> None:
        """Write the whole conversation; DFlashError when the folder or the disk refuses.

        Where another window changed the file since, this one goes on under a name of its own.
        """
        try:
            if self.changed(self.file_of(conversation)):
                conversation.created = now()
                conversation.title = f"{conversation.shown_title} (copy)"
            file = self.file_of(conversation)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(file, conversation)
            self._seen[file] = _stamp(file)
        except OSError as error:
            raise self._problem("write to", error) from None

    def open(self, file: Path) -> Opened:
        """Read a conversation as far as it is whole; what is damaged is set aside unchanged."""
        opened = self.read(file)
        self._seen[file] = opened.stamp
        return opened

    def read(self, file: Path) -> Opened:
        """`open`, for a look only: what is on screen stays as old as it is."""
        try:
            stamp = _stamp(file)
            data = _contents(file)
        except OSError as error:
            what = f"{file} cannot be read ({error.strerror})"
            raise DFlashError(what, "choose another conversation") from None
        lines = data.decode("utf-8", errors="replace").split("\n")
        head, problem = _head(lines[0])
        turns, bad_turn = _turns(lines[1:])
        if not problem and bad_turn is not None:
            problem = f"line {bad_turn} of {{}} is damaged"
        conversation = replace(head, created=file.stem, turns=turns)
        if not problem:
            return Opened(conversation, stamp=stamp)
        kept = self._set_aside(file, data)
        read = "1 message was read" if len(turns) == 1 else f"{len(turns)} messages were read"
        return Opened(conversation, f"{problem.format(file.name)}; {read}, and {kept}", stamp)

    def rename(self, file: Path, title: str) -> None:
        conversation = replace(self.read(file).conversation, title=title)
        try:
            behind = self.changed(file)
            _write(file, conversation)
            if not behind:
                self._seen[file] = _stamp(file)
        except OSError as error:
            raise self._problem("write to", error) from None

    def delete(self, file: Path) -> None:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise self._problem("delete from", error) from None

    def changed(self, file: Path) -> bool:
        """Whether another window wrote `file` since this one read or wrote it."""
        return file in self._seen and file.exists() and _stamp(file) != self._seen[file]

    def _set_aside(self, file: Path, data: bytes) -> str:
        """Copy a file that was read in part, since the next save replaces it; what to tell."""
        copy = file.with_suffix(".damaged")
        try:
            if not copy.exists():
                copy.touch(0o600)
                copy.write_bytes(data)
            return f"the whole file is kept as {copy.name}"
        except OSError as error:
            return f"it could not be copied ({error.strerror}), so copy {file} before going on"

    def _problem(self, action: str, error: OSError) -> DFlashError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        step = f"{'free some space' if full else 'make it writable'}, or name another folder with "
        what = f"cannot {action} {self.folder} ({error.strerror or error})"
        return DFlashError(what, f"{step}--conversations; /export saves a copy")


def newest(store: Store) -> Opened | None:
    """The conversation that was changed last, None where there is none."""
    entry = next((each for each in store.entries() if not each.damaged), None)
    return None if entry is None else store.open(entry.file)


def text_of(entry: Entry) -> str:
    """All that was said in a stored conversation, as far as it can be read."""
    if entry.damaged:
        return ""
    try:
        lines = entry.file.read_bytes().decode("utf-8", errors="replace").split("\n")
    except OSError:  # it has just gone
        return ""
    return "\n".join(turn.content for turn in _turns(lines[1:])[0])


def export(conversation: Conversation, name: str) -> Path:
    """Write the conversation as Markdown to a new file, by default one named after it: that file.

    DFlashError where there is one of this name already, or none can be.
    """
    stem = free_stem(conversation.shown_title, None, ("md",))
    file = named_file(name or f"{stem}.md")
    write_new({file: conversation.as_markdown().encode("utf-8", "replace")})
    return file.resolve()


def write_new(files: Mapping[Path, bytes]) -> None:
    """Write files that do not exist yet, all or none; DFlashError where that cannot be."""
    begun: list[Path] = []
    try:
        for file, content in files.items():
            with file.open("xb") as output:
                begun.append(file)
                output.write(content)
                os.fsync(output.fileno())
    except OSError as error:
        for half in begun:
            half.unlink(missing_ok=True)
        what = f"{file} cannot be written ({error.strerror or error})"
        raise DFlashError(what, "name a file elsewhere") from None


def named_file(name: str) -> Path:
    """A file that does not exist yet; DFlashError for one that does, or can not."""
    try:
        file = Path(name).expanduser()
        exists = file.exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user's home, a zero byte
        raise DFlashError(f"there can be no file {name[:80]!r}", "name another file") from None
    if exists:
        raise DFlashError(f"{file} exists already", "name another file")
    return file


def free_stem(title: str, folder: Path | None, formats: Sequence[str]) -> Path:
    """The title as a file that exists in none of `formats`; by default in the current folder."""
    stem = re.sub(r"\W+", "-", title.lower()).strip("-")[:40] or "conversation"
    stems = [(folder or Path()) / name for name in (stem, *(f"{stem}-{n}" for n in range(2, 1000)))]
    return next(s for s in stems if not any(Path(f"{s}.{ending}").exists() for ending in formats))


def _write(file: Path, conversation: Conversation) -> None:
    """Replace a file that nobody but its owner may read."""
    replace_text(file, _as_lines(conversation))
    file.chmod(0o600)


def _as_lines(conversation: Conversation) -> str:
    head = {"format": FORMAT, "version": VERSION, "title": conversation.title}
    head |= {"preview": conversation.shown_title, "model": conversation.model}
    turns = [
        {name: value for name, value in vars(turn).items() if value or name == "content"}
        for turn in conversation.turns
    ]
    return "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in [head, *turns])


def _head(line: str) -> tuple[Conversation, str]:
    try:
        head = json.loads(line)
        if head["format"] != FORMAT:
            raise ValueError("another format")
        conversation = Conversation("", _text(head, "title"), _text(head, "model"))
        version = head["version"]
        if version == VERSION:
            return conversation, ""
        if type(version) is not int or version < VERSION:
            raise ValueError("no version")
        newer = f"{{}} was written by a newer dflash-chat (version {str(version)[:20]} of the file"
        return conversation, f"{newer}, this one knows {VERSION})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return Conversation(""), "line 1 of {} is damaged"


def _turns(lines: list[str]) -> tuple[list[Turn], int | None]:
    """The turns up to the first damaged line, and that line's number in the file."""
    turns: list[Turn] = []
    for number, line in enumerate(lines, start=2):
        if not line and number == len(lines) + 1:  # what follows the last line break
            break
        try:
            turns.append(_turn(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError):
            return turns, number
    return turns, None


def _turn(raw: dict[str, Any]) -> Turn:
    if raw["role"] not in ("user", "assistant"):
        raise ValueError(f"role {raw['role']!r}")
    figures = raw.get("figures")
    if figures is not None and not isinstance(figures, dict):
        raise ValueError("figures")
    return Turn(raw["role"], _text(raw, "content"), _text(raw, "ending"), figures)


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw[name] if name == "content" else raw.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}")
    return value


def _entry(file: Path) -> Entry | None:
    """One line of the list; only the first line is read.

    None for a file that has just gone, and for what is no file, such as a pipe.
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    modified = status.st_mtime
    try:
        with file.open(encoding="utf-8") as lines:
            head = json.loads(lines.readline(1 << 16))
        title = head["title"] or head["preview"]
        if head["format"] != FORMAT or not isinstance(title, str):
            raise ValueError("another format")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Entry(file, UNTITLED, modified, damaged=True)
    return Entry(file, title, modified)


def _contents(file: Path) -> bytes:
    """Of a regular file; OSError for anything else, without waiting for who would write into it."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file")
    return file.read_bytes()


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
