"""Corpus files: a header line and one answer a line, as JSON; read, checked, never guessed at.

A file grows by whole lines, one process at a time, and survives any kill.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.core.text import parse_json
from dflash_mlx.engine.delta import BEGIN, opens_thought
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.vision.album import has_picture

_FORMAT = {"format": "dflash-corpus", "version": 1}
_BEGIN = json.dumps(_FORMAT)[:-1].encode()  # of a header
CHAT = "dflash-chat conversation"  # format of a conversation's file, see app/store.py
_ANOTHER = "name another file with --out"
_MAKE_ANEW = "make the corpus again with python -m dflash_mlx.corpus"


@dataclass(frozen=True)
class CorpusHeader:
    """What all rows of a file have in common."""

    model: str
    vocab_size: int
    tokenizer: str  # its `tokenizer_fingerprint`
    settings: dict[str, Any] = field(default_factory=dict)  # all that decides the answers

    def as_line(self) -> str:
        return json.dumps({**_FORMAT, **asdict(self)})


@dataclass(frozen=True)
class CorpusRow:
    """One answer of the target."""

    id: str
    category: str
    prompt: tuple[int, ...]  # token ids through the chat template
    answer: tuple[int, ...] = ()  # with the stop token; none while it is awaited
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    finish: str = ""  # "stop", "length" (max_tokens), "loop" or "" (an older file does not say)
    messages: tuple[dict[str, str], ...] = ()  # where the prompt is of the target's own making

    def as_line(self) -> str:
        line = {_KEYS.get(name, name): value for name, value in vars(self).items()}
        if not self.messages:
            del line["messages"]
        return json.dumps(line)


_Line = TypeVar("_Line", CorpusHeader, CorpusRow)
_KEYS = {"prompt": "p", "answer": "o", "temperature": "t"}  # of a line, where it has others


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _are_ids(value: Any) -> bool:
    whole = isinstance(value, list) and value and all(type(token) is int for token in value)
    return bool(whole) and min(value) >= 0


_CHECKS: dict[str, Callable[[Any], bool]] = {  # by the type of a field
    "str": _is(str),
    "int": _is(int),
    "int | None": _is(int, type(None)),
    "float": _is(int, float),
    "dict[str, Any]": _is(dict),
    "tuple[int, ...]": _are_ids,
    "tuple[dict[str, str], ...]": lambda value: (
        isinstance(value, list) and all(type(each) is dict for each in value)
    ),
}
# What older files do not say.
_USUAL = {"settings": {}, "top_p": 1.0, "category": "", "finish": "", "messages": []}


def read_rows(path: Path, vocab_size: int | None = None, tokenizer: Any = None) -> list[CorpusRow]:
    """The rows of a corpus file, plain or gzip; an incomplete last line is ignored.

    vocab_size: token ids must be below it; the header's by default. Raises DFlashError for a file
    that cannot be read, holds no rows, has a damaged line or a header with another tokenizer.
    """
    try:
        contents = path.read_bytes()
        contents = gzip.decompress(contents) if path.suffix == ".gz" else contents
    except (OSError, EOFError, zlib.error) as error:
        what = f"{path} cannot be read ({in_one_line(error)})"
        raise DFlashError(what, "name a corpus file") from None
    header, rows = parse(path, contents, vocab_size)
    if not rows:
        raise DFlashError(f"{path} holds no rows", _MAKE_ANEW)
    if header is not None and tokenizer is not None:
        _check_tokenizer(path, header, vocab_size, tokenizer)
    return rows


def parse(
    path: Path, contents: bytes, vocab_size: int | None = None
) -> tuple[CorpusHeader | None, list[CorpusRow]]:
    """The header, if any, and the rows in what has been read of `path`; raises as `read_rows`."""
    lines, header, rows = contents.split(b"\n"), None, []
    for i, line in enumerate(lines, 1):
        try:
            values = parse_json(line.decode()) if line.strip() else None
        except ValueError as error:
            if i == len(lines):
                break
            raise _damaged(f"line {i} of {path} is not JSON ({error})") from None
        if i == 1 and isinstance(values, dict) and "format" in values:
            header = _header(path, values)
            vocab_size = header.vocab_size if vocab_size is None else vocab_size
        elif values is not None:
            rows.append(_row(path, i, values, vocab_size))
    return header, rows


def _header(path: Path, values: dict[str, Any]) -> CorpusHeader:
    if (given := {key: values.get(key) for key in _FORMAT}) != _FORMAT:
        what = f"{path} has {given}, not {_FORMAT}"
        raise DFlashError(what, "update dflash-chat, or " + _MAKE_ANEW)
    return _checked(CorpusHeader, path, 1, values)


def _row(path: Path, i: int, values: Any, vocab_size: int | None) -> CorpusRow:
    if not isinstance(values, dict):
        raise _damaged(f"line {i} of {path} is not a row")
    row = _checked(CorpusRow, path, i, {"id": f"line-{i}", **values})
    if vocab_size is not None and (largest := max(row.prompt + row.answer)) >= vocab_size:
        what = f"line {i} of {path} holds the token {largest}, but the model has only {vocab_size}"
        raise DFlashError(what, "use the corpus with the model that made it, or " + _MAKE_ANEW)
    return row


def _checked(kind: type[_Line], path: Path, i: int, given: dict[str, Any]) -> _Line:
    result: dict[str, Any] = {}
    for name, field_ in kind.__dataclass_fields__.items():
        value = {**_USUAL, **given}.get(key := _KEYS.get(name, name))
        if not _CHECKS[str(field_.type)](value):
            shown = "missing" if value is None else repr(value)[:60]
            raise _damaged(f"field {key!r} in line {i} of {path} is {shown}")
        result[name] = tuple(value) if isinstance(value, list) else value
    return kind(**result)


def _damaged(what: str) -> DFlashError:
    return DFlashError(what, f"delete that line, or {_MAKE_ANEW}")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary: the same for tokenizers whose ids mean the same."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _check_tokenizer(
    path: Path, header: CorpusHeader, vocab_size: int | None, tokenizer: Any
) -> None:
    if vocab_size not in (None, header.vocab_size):
        difference = f"has {header.vocab_size} tokens, but this model has {vocab_size}"
    elif header.tokenizer != tokenizer_fingerprint(tokenizer):
        difference = "has other tokens than this model's"
    else:
        return
    what = f"{path} was made with {header.model}, whose vocabulary {difference}"
    raise DFlashError(what, f"use it with {header.model}, or {_MAKE_ANEW}")


@contextmanager
def open_corpus(path: Path) -> Iterator[CorpusFile]:
    """A corpus file, made where it is missing, locked until it is closed, removed if empty then.

    Raises DFlashError for a file that is no corpus, cannot be written or belongs to another
    process.
    """
    if path.suffix == ".gz":
        raise DFlashError(f"{path} would be compressed", "write plain JSON and gzip it later")
    try:
        file = path.open("ab+", buffering=0)
    except OSError as error:
        raise DFlashError(f"{path} cannot be written ({error.strerror})", _ANOTHER) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            what = f"another process is writing {path}"
            raise DFlashError(what, f"wait for it, or {_ANOTHER}") from None
        file.seek(0)
        contents = file.read()
        if not _BEGIN.startswith(contents[: len(_BEGIN)]):
            raise DFlashError(f"{path} exists and does not begin as a corpus does", _ANOTHER)
        try:
            yield CorpusFile(path, file, contents)
        finally:
            if os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)


class CorpusFile:
    """A corpus file, open for appending; nothing is written before `begin`."""

    def __init__(self, path: Path, file: io.FileIO, contents: bytes) -> None:
        self.path, self._file = path, file
        self._size = contents.rfind(b"\n") + 1  # without an incomplete last line
        self.header, self.rows = parse(path, contents[: self._size])

    def begin(self, header: CorpusHeader) -> None:
        """Write a new file's header and cut off half a line; DFlashError for another header."""
        if self.header not in (None, header):
            what = f"{self.path} was made with {_difference(self.header, header)}"
            raise DFlashError(what, f"run with the settings it was made with, or {_ANOTHER}")
        self._file.truncate(self._size)
        if self.header is None:
            self._write(header.as_line())

    def append(self, row: CorpusRow) -> None:
        """Write a row at once; where that fails the file is left as it was."""
        self._write(row.as_line())
        self.rows.append(row)

    def _write(self, line: str) -> None:
        data, written = line.encode() + b"\n", 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except BaseException:
            self._file.truncate(self._size)
            raise
        self._size += written


def _difference(old: CorpusHeader, new: CorpusHeader) -> str:
    before, after = ({**vars(header), **header.settings} for header in (old, new))
    names = (before.keys() | after.keys()) - {"settings"}
    name = next(name for name in sorted(names) if before.get(name) != after.get(name))
    return f"{name} {before.get(name)!r}, not {after.get(name)!r}"


def conversation_rows(folder: Path, pair: Pair) -> Iterator[CorpusRow]:
    """The target's answers in a folder of the chat's conversations, the newest of these first.

    Damaged files are left out, without a word of them. All answers count as sampled.
    """
    for file in sorted(folder.glob("[!.]*.jsonl"), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, DFlashError):
            head, *turns = map(json.loads, file.read_bytes().splitlines())
            if head["format"] == CHAT and head["model"] == pair.target.name:
                yield from _answers(file.stem, turns, pair)


def _answers(name: str, turns: list[Any], pair: Pair) -> Iterator[CorpusRow]:
    for i, turn in enumerate(turns):
        said = [{part: each[part] for part in ("role", "content")} for each in turns[:i]]
        is_text = not any(has_picture(each["content"]) for each in said)
        if turn["role"] == "assistant" and turn["content"] and is_text:
            prompt = prompt_tokens(pair.tokenizer, said, template=pair.template)
            thought = BEGIN if opens_thought(pair.tokenizer, prompt) else ""
            text = turn["content"].removeprefix(thought)
            answer = pair.tokenizer.encode(text, add_special_tokens=False)
            end = [pair.tokenizer.eos_token_id] if turn.get("ending") == "stop" else []
            if whole := (*answer, *end):
                yield CorpusRow(f"{name}-{i}", "conversation", (*prompt,), whole, 1.0)
