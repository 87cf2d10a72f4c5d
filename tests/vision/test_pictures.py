"""Files of pictures: what is taken, what is refused and how, and 1,000 that are damaged."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.vision.pictures import MOST_BYTES, open_picture
from support.pictures import KINDS, bombs, encoded, hostile, noise, picture, png

HOSTILE = 1000
LIMIT = 200 * 10**6  # bytes that none of them may add to this process
RED, NAME = (255, 0, 0), "it.png"


def refused(data: bytes) -> str:
    with pytest.raises(DFlashError) as found:
        open_picture(data, NAME)
    assert NAME in found.value.what and found.value.next_step
    assert "\n" not in str(found.value)
    return found.value.what


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_each_kind_is_taken_and_told_by_its_pixels(kind):
    found = open_picture(picture(kind=kind, size=(9, 7)), NAME)
    assert (found.width, found.height) == found.pixels().size == (9, 7)
    pixels = found.pixels()
    assert pixels.mode == "RGB"
    assert np.abs(np.array(pixels).astype(int) - RED).max() <= 2
    assert found.digest == hashlib.sha256(b"9x7 " + pixels.tobytes()).hexdigest()


def test_equal_pixels_have_one_digest_and_others_another():
    same = {open_picture(picture(kind=kind), NAME).digest for kind in ("PNG", "GIF")}
    assert len(same) == 1
    others = [picture("blue"), picture(size=(6, 8)), picture(size=(4, 12))]
    tall = noise(random.Random(1), (5, 150))
    whole = open_picture(encoded(tall), NAME).digest
    assert whole == hashlib.sha256(b"5x150 " + tall.tobytes()).hexdigest(), "strip by strip"
    assert same.isdisjoint({open_picture(each, NAME).digest for each in others})


def test_a_picture_is_as_it_is_seen_upright_the_first_frame_and_white_behind_it():
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera that was turned
    wide = Image.new("RGB", (8, 6), "red")
    turned = open_picture(encoded(wide, "JPEG", exif=exif), NAME)
    assert (turned.width, turned.height) == turned.pixels().size == (6, 8)
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        moving = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        first = np.array(open_picture(moving, NAME).pixels()).astype(int)
        assert np.abs(first - RED).max() <= 2
    clear = Image.new("RGBA", (8, 6), (0, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    for mode in ("RGBA", "P"):
        seen = open_picture(encoded(clear.convert(mode)), NAME).pixels()
        assert seen.getpixel((0, 0)) == RED and seen.getpixel((7, 5)) == (255,) * 3


def test_sixteen_bits_of_grey_are_the_same_greys_in_eight():
    greys = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    seen = np.array(open_picture(encoded(Image.fromarray(greys)), NAME).pixels())
    assert np.abs(seen[..., 0].astype(int) - greys // 256).max() <= 1


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"%PDF-1.7", "PDF"),
        (b"BM" + bytes(60), "BMP"),
        (b"II*\0" + bytes(60), "TIFF"),
        (b"\0\0\0\x18ftypheic" + bytes(60), "HEIC"),
        (b"\0\0\0\x18ftypavif" + bytes(60), "AVIF"),
        (b"  <svg xmlns=", "SVG"),
        (b"only words", "no picture"),
    ],
)
def test_other_files_are_refused_by_what_they_are(data, word):
    assert word in refused(data)


@pytest.mark.parametrize("size", [(8000, 7000), (1, 300), (300, 1)])
def test_a_picture_beyond_the_limits_is_refused_with_its_size_and_is_not_decoded(size):
    tracemalloc.start()
    assert f"{size[0]} x {size[1]}" in refused(png(*size))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_file_that_is_too_large_missing_or_no_file_is_refused_unread(tmp_path):
    large, pipe = tmp_path / "large.png", tmp_path / "pipe.png"
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    os.mkfifo(pipe)
    for file, word in (
        (large, "20.0 MB"),
        (tmp_path / "none.png", "No such file"),
        (tmp_path, "regular"),
        (pipe, "regular"),
    ):
        with pytest.raises(DFlashError, match=word) as found:
            open_picture(file, str(file))
        assert str(file) in found.value.what
    whole = tmp_path / "whole.png"
    whole.write_bytes(picture())
    assert open_picture(whole, "whole").digest == open_picture(picture(), NAME).digest


def test_of_a_thousand_damaged_files_each_is_a_picture_or_a_sentence_in_little_memory(recwarn):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = refusals = 0
    for data in hostile(seed=1, count=HOSTILE):
        try:
            found = open_picture(data, NAME)
        except DFlashError as error:
            assert NAME in error.what and len(str(error)) < 500
            refusals += 1
        else:
            assert found.pixels().size == (found.width, found.height)
            taken += 1
    assert taken > 50 and refusals > 500, "both kinds are tried"
    for bomb in bombs():
        refused(bomb)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < LIMIT
    assert not recwarn.list


def test_without_pillow_the_sentence_says_what_to_install(monkeypatch):
    data = picture()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "Pillow" in refused(data)
