"""Pictures for tests: files made by Pillow, whole and damaged; a model that is said to see."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

from PIL import Image

from dflash_mlx.core.prompt import Piece, Prompt
from dflash_mlx.engine.pair import Pair
from support.serving import ROLE, TEMPLATE, Act, actor_pair

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
PLACES = 8  # tokens of a picture
MARK = "^"  # each of them


def picture(colour: str = "red", size: tuple[int, int] = (8, 6), kind: str = "PNG") -> bytes:
    """The file of a picture of one colour."""
    return encoded(Image.new("RGB", size, colour), kind)


def encoded(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def noise(rng: random.Random, size: tuple[int, int] = (24, 17)) -> Image.Image:
    return Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG that says to be of this size, with these chunks behind its head."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bombs() -> Iterator[bytes]:
    """Small files that would become very large, in each of the places where that is possible."""
    row = zlib.compress(b"\0" * 10**7, 9)
    yield png(60_000, 60_000, chunk(b"IDAT", row))
    yield png(2**31 - 1, 1, chunk(b"IDAT", row))
    yield png(8, 8, chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 10**8, 9)))
    yield png(8, 8, chunk(b"iTXt", b"k\0\1\0\0\0" + zlib.compress(b"a" * 10**8, 9)))
    yield png(8, 8, chunk(b"iCCP", b"k\0\0" + zlib.compress(b"a" * 10**8, 9)))
    yield picture(kind="GIF")[:6] + b"\xff\xff\xff\xff" + picture(kind="GIF")[10:]
    webp = bytearray(picture(kind="WEBP", size=(16, 16)))
    yield bytes(webp[:12]) + b"VP8X" + struct.pack("<IB3x", 10, 0) + b"\xff\xff\xff" * 2
    head = picture(kind="JPEG")
    place = head.index(b"\xff\xc0") + 5
    yield head[:place] + b"\xff\xff\xff\xff" + head[place + 4 :]


def hostile(seed: int, count: int) -> Iterator[bytes]:
    """Files that are damaged in all ways that a seed brings: cut, changed, mixed, swollen."""
    rng = random.Random(seed)
    whole = [encoded(noise(rng), kind) for kind in KINDS]
    frames = [noise(rng) for _ in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        whole.append(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    exif = Image.Exif()
    exif[0x0112] = 6
    whole.append(encoded(noise(rng), "JPEG", exif=exif, progressive=True))
    whole += [encoded(noise(rng).convert(mode)) for mode in ("P", "RGBA", "LA", "1", "I;16")]
    ways = (_cut, _changed, _changed, _grafted, _swollen)
    for _ in range(count):
        yield rng.choice(ways)(rng, rng.choice(whole), rng.choice(whole))


def _cut(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _changed(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Some bytes are others, more often at the beginning, where sizes stand."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 2, 8, 64))):
        place = rng.randrange(min(len(found), rng.choice((40, 200, 10**6))))
        found[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(found)


def _grafted(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def _swollen(rng: random.Random, data: bytes, other: bytes) -> bytes:
    place = rng.randrange(min(len(data), 60))
    return data[:place] + rng.randbytes(rng.randrange(1, 20)) + data[place:]


def seeing(act: Act, **more: Any) -> Pair:
    """A pair whose target sees, as far as prompts go: pictures are places in them."""
    pair = actor_pair(act, TEMPLATE, **more)
    pair.target.sees = True
    return pair


def read_prompt(
    target: Any, tokenizer: Any, messages: Any, salt: str = "", /, **options: Any
) -> Prompt:
    """As `vision/prompts.py` has it, with PLACES marks for a picture, whose pixels nobody sees."""
    pieces: list[Piece] = []
    digests: list[str] = []
    written = []
    for each in messages:
        content = each["content"]
        for part in [] if isinstance(content, str) else content:
            digests += [part["picture"].digest] if part["type"] == "image" else []
        parts = [content] if isinstance(content, str) else [p.get("text", "\1") for p in content]
        written.append({**each, "content": "".join(parts)})
    text = tokenizer.apply_chat_template(written, tokenize=False, **options)
    texts = text.split("\1")
    assert len(texts) == len(digests) + 1
    tokens = [*tokenizer.encode(texts[0])]
    for digest, behind in zip(digests, texts[1:], strict=True):
        pieces.append(Piece(len(tokens), PLACES, digest))
        tokens += [*tokenizer.encode(MARK * PLACES), *tokenizer.encode(behind)]
    return Prompt(tuple(tokens), tuple(pieces))


def answered(prompt: str) -> str:
    """What `seeing` says: how many pictures there are, and the last words."""
    words = prompt.rpartition("[user]")[2].removesuffix(ROLE).replace(MARK, "")
    return f"{prompt.count(MARK) // PLACES} for {words}"


def without(prompt: Prompt) -> Prompt:
    return replace(prompt, pieces=())
