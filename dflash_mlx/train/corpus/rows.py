"""Corpus files: a header line and one answer a line, as JSON; read, checked, never guessed at."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_mlx.core.errors import DFlashError

FORMAT = "dflash-corpus"
VERSION = 1

_MAKE_ANEW = "make the corpus again with python -m dflash_mlx.corpus"


@dataclass(frozen=True)
class CorpusHeader:
    """What all rows of a file have in common.

    tokenizer: its `tokenizer_fingerprint`. settings: all that decides the answers, and that a run
    which continues the file must therefore share.
    """

    model: str
    vocab_size: int
    tokenizer: str
    settings: dict[str, Any] = field(default_factory=dict)

    def as_line(self) -> str:
        """The first line of a corpus file, without its newline."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})

    @staticmethod
    def begins_with(line: bytes) -> bool:
        """Whether `line` may be the beginning of such a line, cut by a kill."""
        begin = json.dumps({"format": FORMAT, "version": VERSION})[:-1].encode()
        return begin.startswith(line[: len(begin)])


@dataclass(frozen=True)
class CorpusRow:
    """One answer of the target.

    prompt: token ids through the chat template. answer: token ids, the stop token included where
    the target ended by itself; none while it is awaited. finish: "stop", "length" (max_tokens),
    "loop" (cut where it began to repeat itself) or "" (an older file does not say). messages: the
    conversation, where the prompt is of the target's own making.
    """

    id: str
    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    finish: str = ""
    messages: tuple[dict[str, str], ...] = ()

    def as_line(self) -> str:
        """A line of a corpus file, without its newline."""
        line = {key: getattr(self, name) for name, (key, _) in _FIELDS.items()}
        if not self.messages:
            del line["messages"]
        return json.dumps(line)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    whole = isinstance(value, list) and value and all(type(token) is int for token in value)
    return bool(whole) and min(value) >= 0


_Fields = dict[str, tuple[str, Callable[[Any], bool]]]  # by our name: key in the line, and a check
_HEADER: _Fields = {
    "model": ("model", _is_text),
    "vocab_size": ("vocab_size", lambda value: type(value) is int),
    "tokenizer": ("tokenizer", _is_text),
    "settings": ("settings", lambda value: isinstance(value, dict)),
}
_FIELDS: _Fields = {
    "id": ("id", _is_text),
    "category": ("category", _is_text),
    "prompt": ("p", _are_ids),
    "answer": ("o", _are_ids),
    "temperature": ("t", _is_number),
    "top_p": ("top_p", _is_number),
    "seed": ("seed", lambda value: value is None or type(value) is int),
    "finish": ("finish", _is_text),
    "messages": ("messages", lambda v: isinstance(v, list) and all(type(m) is dict for m in v)),
}


def read_rows(
    path: Path, vocab_size: int | None = None
) -> tuple[CorpusHeader | None, list[CorpusRow]]:
    """The header, if any, and the rows of a corpus file, plain or gzip.

    vocab_size: token ids must be below it; the header's by default. A last line that a killed
    process left incomplete is ignored. Raises DFlashError for a file that cannot be read, holds
    no rows, or has a damaged line.
    """
    header, rows = parse(path, _contents(path), vocab_size)
    if not rows:
        raise DFlashError(f"{path} holds no rows", _MAKE_ANEW)
    return header, rows


def parse(
    path: Path, contents: bytes, vocab_size: int | None = None
) -> tuple[CorpusHeader | None, list[CorpusRow]]:
    """As `read_rows`, from what has been read of `path`; rows may be missing."""
    lines, header, rows = contents.split(b"\n"), None, []
    for i, line in enumerate(lines, 1):
        values = _object(path, i, line, i == len(lines))
        if i == 1 and isinstance(values, dict) and "format" in values:
            header = _header(path, values)
            vocab_size = header.vocab_size if vocab_size is None else vocab_size
            continue
        if values is None:
            continue
        row = _row(path, i, values)
        largest = max(row.prompt + row.answer)
        if vocab_size is not None and largest >= vocab_size:
            raise DFlashError(
                f"line {i} of {path} holds the token {largest}, but the model has only "
                f"{vocab_size}",
                "use the corpus with the model that made it, or " + _MAKE_ANEW,
            )
        rows.append(row)
    return header, rows


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary: the same for tokenizers whose ids mean the same."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def check_header(
    header: CorpusHeader | None, tokenizer: Any, vocab_size: int, source: str = "the corpus"
) -> None:
    """Raise DFlashError for a corpus of another tokenizer; older files do not say whose they are.

    source: the file, for the message.
    """
    if header is None:
        return
    if header.vocab_size != vocab_size:
        difference = f"has {header.vocab_size} tokens, but this model has {vocab_size}"
    elif header.tokenizer != tokenizer_fingerprint(tokenizer):
        difference = "has other tokens than this model's"
    else:
        return
    raise DFlashError(
        f"{source} was made with {header.model}, whose vocabulary {difference}",
        f"use it with {header.model}, or {_MAKE_ANEW}",
    )


def _contents(path: Path) -> bytes:
    try:
        contents = path.read_bytes()
        return gzip.decompress(contents) if path.suffix == ".gz" else contents
    except (OSError, EOFError, zlib.error) as error:
        raise DFlashError(f"{path} cannot be read ({error})", "name a corpus file") from None


def _object(path: Path, i: int, line: bytes, is_last: bool) -> Any:
    """The JSON value of a line, None for a blank one; the last may have been cut by a kill."""
    try:
        return json.loads(line) if line.strip() else None
    except ValueError as error:
        if is_last:
            return None
        raise DFlashError(
            f"line {i} of {path} is no JSON ({error})", f"delete that line, or {_MAKE_ANEW}"
        ) from None


def _header(path: Path, values: dict[str, Any]) -> CorpusHeader:
    if values["format"] != FORMAT or values.get("version") != VERSION:
        raise DFlashError(
            f"{path} has the format {values['format']!r}, version {values.get('version')!r}, "
            f"instead of {FORMAT!r}, version {VERSION}",
            "update dflash-chat, or " + _MAKE_ANEW,
        )
    return CorpusHeader(**_checked(path, 1, {"settings": {}, **values}, _HEADER))


def _row(path: Path, i: int, values: Any) -> CorpusRow:
    if not isinstance(values, dict):
        raise DFlashError(f"line {i} of {path} is no row", f"delete that line, or {_MAKE_ANEW}")
    usual = {"top_p": 1.0, "id": f"line-{i}", "category": "", "finish": "", "messages": []}
    return CorpusRow(**_checked(path, i, {**usual, **values}, _FIELDS))


def _checked(path: Path, i: int, given: dict[str, Any], wanted: _Fields) -> dict[str, Any]:
    """The values of a line by our names; DFlashError for the first that is wrong or missing."""
    result = {}
    for name, (key, is_right) in wanted.items():
        value = given.get(key)
        if not is_right(value):
            shown = "missing" if value is None else repr(value)[:60]
            raise DFlashError(
                f"field {key!r} in line {i} of {path} is {shown}",
                f"delete that line, or {_MAKE_ANEW}",
            )
        result[name] = tuple(value) if isinstance(value, list) else value
    return result
