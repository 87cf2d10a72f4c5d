"""Pictures of a conversation in a terminal: in a question a line stands for each of them.

The line has the file's place and the digest of its pixels, so saved conversations hold no pictures.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.vision.pictures import SUFFIXES, Picture, check_sees, open_picture

KEPT = 200 * 10**6  # bytes of files
_LINE = re.compile(r"\n\n\[picture ([^\n]+), (\d+) x (\d+) pixels, sha256 ([0-9a-f]{64})\]")


def is_picture(file: Path) -> bool:
    """Whether a file is one by its name."""
    return file.suffix.lower() in SUFFIXES


def has_picture(question: str) -> bool:
    """Whether a picture goes with a question."""
    return _LINE.search(question) is not None


def check_seen(pair: Pair | None, question: str) -> None:
    """DFlashError for a picture that a loaded target does not see."""
    if pair is not None and has_picture(question):
        check_sees(pair.target)


def shown(question: str) -> str:
    """A question with a label for each of its pictures, as a screen shows it."""
    return _LINE.sub(
        lambda line: f"\n[{Path(line[1]).name}, {line[2]} x {line[3]} pixels]", question
    )


def bare(question: str) -> str:
    """A question as it was typed; it still mentions its pictures."""
    return _LINE.sub("", question)


def dropped(text: str) -> str:
    """Mentions of pictures whose files were dropped on a terminal, which types their names.

    "" for any other text: only whole names of files that are there count.
    """
    try:
        words = shlex.split(text) if len(text) < 10_000 and "\n" not in text.strip() else []
        files = [Path(unquote(urlsplit(w).path) if w.startswith("file://") else w) for w in words]
        named = files and all(is_picture(f) and f.is_absolute() and f.is_file() for f in files)
    except (OSError, ValueError):
        return ""
    return "".join(f'@"{file}" ' for file in files) if named and '"' not in str(files) else ""


class Album:
    """The pictures of questions; those of this program's time need not stay where they were."""

    def __init__(self) -> None:
        self._kept: dict[str, Picture] = {}  # by digest, the oldest first

    def line(self, file: Path) -> str:
        """What stands for the picture in this file; DFlashError where there is none."""
        picture = self._keep(open_picture(file, str(file)))
        size = f"{picture.width} x {picture.height} pixels"
        return f"\n\n[picture {file.resolve()}, {size}, sha256 {picture.digest}]"

    def opened(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with the pictures of questions before their words.

        Raises DFlashError for a picture that is not there any more, or is another one.
        """
        return [
            {**each, "content": [*pictures, {"type": "text", "text": bare(each["content"])}]}
            if (pictures := self._pictures(each))
            else dict(each)
            for each in messages
        ]

    def clear(self) -> None:
        self._kept.clear()

    def _pictures(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        lines = _LINE.findall(message["content"]) if message["role"] == "user" else []
        return [{"type": "image", "picture": self._find(each[0], each[-1])} for each in lines]

    def _find(self, place: str, digest: str) -> Picture:
        if (picture := self._kept.get(digest)) is None:
            step = "put it back, or begin a /new conversation"
            try:
                picture = open_picture(Path(place), place)
            except DFlashError as error:
                raise DFlashError(
                    f"a question is about a picture, but {error.what}", step
                ) from None
            if picture.digest != digest:
                raise DFlashError(f"{place} is not the picture that a question is about", step)
        return self._keep(picture)

    def _keep(self, picture: Picture) -> Picture:
        self._kept[picture.digest] = self._kept.pop(picture.digest, picture)
        while len(self._kept) > 1 and sum(len(each.data) for each in self._kept.values()) > KEPT:
            del self._kept[next(iter(self._kept))]
        return picture
