"""Pictures from users and programs: checked by size and kind before anything is decoded.

Pillow decodes them. Whatever is wrong with a file is a DFlashError, one sentence with its name.
"""

from __future__ import annotations

import hashlib
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.core.text import amount

if TYPE_CHECKING:
    from PIL import Image

MOST_BYTES = 20 * 10**6  # of a file
MOST_PIXELS = 50 * 10**6  # of a picture, which takes up to 20 bytes a pixel while it is decoded
MOST_TIMES = 200  # that one side may be longer than the other, as in Qwen's own processor
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")

_KINDS, _HEADS = ("PNG", "JPEG", "WEBP", "GIF"), (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8")
_STRIP = 64  # rows
_AGAIN = "save it again, or give another picture"
_SHAPE, _SMALLER = "give a PNG, JPEG, WebP or GIF", "make it smaller, or cut a part out"
_OTHERS = {  # what else people give, by how it begins
    b"%PDF": "PDF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"<svg": "SVG",
    b"<?xml": "XML", b"\0\0\0\x0cJXL": "JPEG XL", b"<!DOCTYPE": "HTML", b"<html": "HTML",
}  # fmt: skip
_BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"avif": "AVIF"}
# What Pillow raises for damaged files; a bomb within a picture is a ValueError.
_FAULTS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(SyntaxError, EOFError, MemoryError, AssertionError, struct.error, zlib.error),
)


@dataclass(frozen=True)
class Picture:
    """A picture that was decoded once, so it can be again."""

    data: bytes = field(repr=False)  # the file
    width: int  # pixels, as it is seen
    height: int
    digest: str  # SHA-256 of its size and its RGB pixels

    def pixels(self) -> Image.Image:
        """The first frame, RGB and upright; what is transparent is white."""
        with _judging("a picture", self.data):
            return _decoded(self.data)


def check_sees(target: Any) -> None:
    """DFlashError where a target does not see."""
    if not target.sees:
        step = "leave them out, or choose a model that does"
        step += "" if find_spec("mlx_vlm") else ", and install the extra vision (docs/vision.md)"
        raise DFlashError(f"{target.name} does not see pictures", step)


def open_picture(source: bytes | Path, name: str) -> Picture:
    """A picture by its file or the file's content, decoded to see that it can be.

    name: what sentences call it. Raises DFlashError for anything but one PNG, JPEG, WebP or GIF
    within the limits, of which no more is read than they allow.
    """
    data = source if isinstance(source, bytes) else _read(source, name)
    if not data:
        raise DFlashError(f"{name} is empty", _SHAPE)
    if len(data) > MOST_BYTES:
        raise too_large(name, len(data))
    with _judging(name, data):
        _check_size(data, name)
        image = _decoded(data)
        digest = _digest(image)
    return Picture(data, image.width, image.height, digest)


def too_large(name: str, size: int, most: int = MOST_BYTES) -> DFlashError:
    """The refusal of a file of so many bytes, or more."""
    what = f"{name} has {amount(size)}, and a picture may have {amount(most)}"
    return DFlashError(what, _SMALLER)


def _digest(image: Image.Image) -> str:
    found = hashlib.sha256(f"{image.width}x{image.height} ".encode())
    for top in range(0, image.height, _STRIP):  # a copy of the whole would take as much again
        strip = 0, top, image.width, min(top + _STRIP, image.height)
        found.update(image.crop(strip).tobytes())
    return found.hexdigest()


def _read(file: Path, name: str) -> bytes:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a folder; or a FIFO, which may never end
            raise DFlashError(f"{name} is not a regular file", _SHAPE)
        if status.st_size > MOST_BYTES:
            raise too_large(name, status.st_size)
        with file.open("rb") as opened:
            return opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DFlashError(f"{name} cannot be read ({reason})", "check its name") from None


@contextmanager
def _judging(name: str, data: bytes) -> Iterator[None]:
    """Say in a sentence what Pillow, if it is there, finds wrong with a file."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        step = 'install it with pip install "dflash-chat[vision]"'
        raise DFlashError(f"Pillow, which reads {name}, is not installed", step) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of broken tags, and of sizes that are checked here
            yield
    except UnidentifiedImageError:
        if data.startswith(_HEADS):
            raise DFlashError(f"{name} is damaged (at its beginning)", _AGAIN) from None
        kind = _BRANDS.get(data[8:12]) if data[4:8] == b"ftyp" else None
        found = (kind for begin, kind in _OTHERS.items() if data.lstrip().startswith(begin))
        kind = kind or next(found, "")
        raise DFlashError(f"{name} is {kind or 'no picture that is known'}", _SHAPE) from None
    except Image.DecompressionBombError:
        what = f"{name} has more than {MOST_PIXELS // 10**6} million pixels"
        raise DFlashError(what, _SMALLER) from None
    except _FAULTS as error:
        raise DFlashError(f"{name} is damaged ({in_one_line(error)})", _AGAIN) from None


def _check_size(data: bytes, name: str) -> None:
    """DFlashError for a picture that its head says to be too large; nothing is decoded."""
    from PIL import Image

    with Image.open(BytesIO(data), formats=_KINDS) as image:
        width, height = image.size
    shown = f"{name} has {width} x {height} pixels"
    if width * height > MOST_PIXELS:
        raise DFlashError(
            f"{shown}, and a picture may have {MOST_PIXELS // 10**6} million", _SMALLER
        )
    if max(width, height) > MOST_TIMES * min(width, height):
        what = f"{shown}, and no side may be more than {MOST_TIMES} times the other"
        raise DFlashError(what, _SMALLER)


def _decoded(data: bytes) -> Image.Image:
    from PIL import Image, ImageOps

    with Image.open(BytesIO(data), formats=_KINDS) as image:
        image.load()
        with suppress(*_FAULTS):  # broken tags turn nothing
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16 bits, of which Pillow would keep the lower ones
            return image.point(lambda shade: shade / 256, "L").convert("RGB")
        if not image.has_transparency_data:
            return image.convert("RGB")
        seen = image.convert("RGBA")
    white = Image.new("RGB", seen.size, "white")
    white.paste(seen, mask=seen.getchannel("A"))
    return white
