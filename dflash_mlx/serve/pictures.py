"""Parts of messages that are no text: pictures, opened once it is known that the model sees.

Until then a text of its own stands for each of them, so that messages are made of texts alone.
"""

from __future__ import annotations

import binascii
import re
import secrets
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, PrivateAttr

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import STAND_IN, Chat, Json
from dflash_mlx.serve.errors import ApiError, refusal
from dflash_mlx.serve.fields import Sent, Strict
from dflash_mlx.serve.settings import MOST_PICTURES, MOST_PIXELS
from dflash_mlx.vision.pictures import MOST_BYTES, Picture, open_picture
from dflash_mlx.vision.remote import PATIENCE, fetch, is_address

NOTE = "[{} was here, which this model cannot see]"
_DATA = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)


class Shown(Strict):
    """What is no text; `text` stands for it."""

    type: str
    kind: ClassVar[str] = "a picture"
    _text: str = PrivateAttr(default_factory=lambda: f"\0{secrets.token_hex(16)}\0")

    @property
    def text(self) -> str:
        return self._text

    @property
    def place(self) -> str:
        """The address of a picture, or itself as a data: URL."""
        return ""


class Document(Shown, Sent):
    """A file that no model reads here."""

    type: Literal["document", "file", "input_file"]
    kind = "a document"


class Sound(Shown, Sent):
    """A recording that no model hears here."""

    type: Literal["audio", "input_audio"]
    kind = "a sound"


class Place(Strict):
    """Where a picture is, in the words of chat completions."""

    url: str
    detail: str | None = None


class ImageUrl(Shown):
    """A picture in the words of chat completions and responses."""

    type: Literal["image_url", "input_image"]
    image_url: Place | str
    detail: str | None = None
    file_id: None = None

    @property
    def place(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class Source(Strict):
    """Where a picture is, in the words of Anthropic's API."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str = ""
    url: str = ""


class Image(Shown):
    """A picture in the words of Anthropic's API."""

    type: Literal["image"]
    source: Source
    cache_control: Json | None = None

    @property
    def place(self) -> str:
        source = self.source
        return source.url if source.type == "url" else f"data:;base64,{source.data}"


AnyShown = ImageUrl | Image | Document | Sound  # which all APIs take, as programs mix them up


def _image(data: Any) -> Any:
    source = {"type": "base64", "data": data}
    return {"type": "image", "source": source} if isinstance(data, str) else data


Images = list[Annotated[Image, BeforeValidator(_image)]]  # in the words of Ollama's API


def shown_in(value: object, place: str = "") -> Iterator[tuple[str, Shown]]:
    """What is no text in a request, each behind its place there."""
    if isinstance(value, Shown):
        yield place, value
    elif isinstance(value, BaseModel):
        for name, each in value:
            yield from shown_in(each, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from shown_in(each, f"{place}[{i}]")


def fetched(body: BaseModel, most: int) -> dict[str, bytes]:
    """The files of pictures at addresses, by their texts; these many bytes at most in all.

    ApiError for one that cannot be read, or where all of them take too long.
    """
    found: dict[str, bytes] = {}
    ends = time.monotonic() + PATIENCE
    for place, shown in shown_in(body):
        if is_address(shown.place) and shown.text not in found and len(found) <= MOST_PICTURES:
            left = min(most - sum(map(len, found.values())), MOST_BYTES)
            try:
                found[shown.text] = fetch(shown.place, left, max(1.0, ends - time.monotonic()))
            except DFlashError as error:
                raise ApiError(400, str(error), place) from None
    return found


def seen(pair: Pair, chat: Chat, body: BaseModel, files: Mapping[str, bytes]) -> Chat:
    """The conversation with its pictures open, and with notes of what the model does not take.

    files: of pictures at addresses, where these are allowed. ApiError for what is no picture, for
    too many, and where a model of texts is asked about one.
    """
    given, unseen = dict[str, tuple[str, Shown]](), dict[str, tuple[str, Shown]]()
    for place, shown in shown_in(body):
        is_seen = pair.target.sees and not isinstance(shown, Document | Sound)
        (given if is_seen else unseen)[shown.text] = place, shown
    chat = _noted(chat, unseen)
    if len(given) > MOST_PICTURES:
        what = f"has {len(given)} pictures, and {MOST_PICTURES} may be"
        raise refusal(chat.fields.messages, what, "send fewer")
    opened: dict[str, Picture] = {}
    for place, shown in given.values():
        opened[shown.text] = _open(place, shown, files)
        if sum(each.width * each.height for each in opened.values()) > MOST_PIXELS:
            what = f"is behind pictures of {MOST_PIXELS // 10**6} million pixels in all"
            raise refusal(place, what, "send fewer or smaller ones")
    return replace(chat, pictures=opened)


def _open(place: str, shown: Shown, files: Mapping[str, bytes]) -> Picture:
    where = shown.place
    if (data := files.get(shown.text)) is None:
        head = _DATA.match(where)
        if head is None:
            what = f"is {where[:80]!r}, and pictures at addresses are not read here"
            raise refusal(place, what, "send it in a data: URL, as base64")
        try:
            data = b64decode("".join(where[head.end() :].split()), validate=True)
        except (binascii.Error, ValueError):
            step = "send the file of the picture as base64"
            raise refusal(place, "is not base64", step) from None
    try:
        return open_picture(data, place)
    except DFlashError as error:
        raise ApiError(400, str(error), place) from None


def _noted(chat: Chat, unseen: Mapping[str, tuple[str, Shown]]) -> Chat:
    """What is of tools and of earlier turns becomes a note, as refusing it would end the talk.

    In the last words that are not a tool's it is refused: the answer is about it.
    """
    last = chat.messages[-1] if chat.messages else {}
    asked = "" if last.get("role") == "tool" else last.get("content") or ""
    for place, shown in unseen.values():
        why, step = f"is {shown.kind}, which this model does not take", "send text"
        if shown.text in asked or chat.ignored is None:  # the server is strict
            raise refusal(place, why, step)
        name = re.sub(r"\[\d+\]", "[]", place).replace(".content[].content[]", ".content[]")
        of_ollama = name.endswith("images[]")
        name = name.removesuffix("[]") if of_ollama else f"{name} of type {shown.type}"
        chat.ignored.append(name)

    def note(found: re.Match[str]) -> str:
        return NOTE.format(unseen[found[0]][1].kind) if found[0] in unseen else found[0]

    noted = [{**m, "content": STAND_IN.sub(note, m.get("content") or "")} for m in chat.messages]
    return replace(chat, messages=noted) if unseen else chat
