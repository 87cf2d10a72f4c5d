"""The target's features on disk: right, complete after interruptions, never mixed up."""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.target.block import Block
from dflash_mlx.target.model import Target
from dflash_mlx.train import features as module
from dflash_mlx.train.features import CHOICE, CHOICES, FeatureCache
from support.families import VOCAB_SIZE, make_model
from support.tiny_training import CONTEXT, TAPS, WIDTH, full_disk, tiny_target

ROW = len(TAPS) * WIDTH * 2  # bytes per token
CHOICES_ROW = 8 * (4 + 4)
PLENTY = 1 << 30
LENGTHS = (9, 23, 1, 14, 30)
SEQUENCES = [
    np.random.default_rng(i).integers(VOCAB_SIZE, size=length).tolist()
    for i, length in enumerate(LENGTHS)
]


def open_cache(folder: Path, limit: int = PLENTY) -> FeatureCache:
    return FeatureCache(folder, SEQUENCES, tiny_target(), TAPS, limit)


def filled(folder: Path, limit: int = PLENTY) -> FeatureCache:
    cache = open_cache(folder, limit)
    assert list(cache.fill()) == list(LENGTHS[: len(cache)])
    return cache


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a cache that was filled without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    filled(folder)
    return contents(folder)


def by_target(tokens: list[int]) -> tuple[mx.array, mx.array]:
    """Features and logits of one pass over a whole sequence."""
    target = tiny_target()
    target.tap(TAPS)
    block = Block(len(tokens))
    logits, features = target.forward(mx.array(tokens), target.new_cache(), block, TAPS)
    assert features is not None
    return features, logits


# What is kept


@pytest.mark.parametrize("chunk", [512, 7])
def test_features_and_choices_are_those_of_the_target(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    cache = filled(tmp_path / "cache")
    assert len(cache) == cache.finished == len(SEQUENCES)
    for i, tokens in enumerate(SEQUENCES):
        features, logits = by_target(tokens)
        found = cache.features(i)
        assert found.dtype == mx.bfloat16 and found.shape == features.shape
        error = mx.abs(found.astype(mx.float32) - features)
        assert bool(mx.all(error <= mx.abs(features) / 256 + 1e-4).item())
        choices, p = cache.choices(i), np.array(mx.softmax(logits.astype(mx.float32), axis=-1))
        assert choices.dtype == CHOICE and choices.shape == (len(tokens), CHOICES)
        assert choices["token"][:, 0].tolist() == mx.argmax(logits, axis=-1).tolist()
        assert all(len(set(row.tolist())) == CHOICES for row in choices["token"])
        of_them = np.take_along_axis(p, choices["token"].astype(np.int64), axis=-1)
        assert np.allclose(choices["probability"], of_them, rtol=1e-3)
        assert np.allclose(choices["probability"], -np.sort(-p)[:, :CHOICES], rtol=1e-3)


@pytest.mark.parametrize("count", range(2, len(LENGTHS) + 1))
def test_sequences_from_the_first_that_does_not_fit_are_left_out(tmp_path, count):
    limit = sum(LENGTHS[:count]) * ROW
    for fitting, room in ((count - 1, limit - 1), (count, limit), (count, limit + ROW - 1)):
        cache = filled(tmp_path / str(room), room)
        assert len(cache) == cache.finished == fitting
        stored = (tmp_path / str(room) / "features.bin").stat().st_size
        assert stored == sum(LENGTHS[:fitting]) * ROW


def test_a_limit_that_fits_nothing_is_refused(tmp_path):
    with pytest.raises(DFlashError, match=r"have no room for the features.*--cache-gb"):
        open_cache(tmp_path / "cache", LENGTHS[0] * ROW - 1)
    assert not (tmp_path / "cache").exists()


def test_a_filled_folder_is_read_without_the_target(tmp_path, monkeypatch, whole):
    filled(tmp_path / "cache")
    monkeypatch.setattr(Target, "forward", lambda *_: pytest.fail("the target was run"))
    cache = open_cache(tmp_path / "cache")
    assert list(cache.fill()) == []
    assert [len(cache.choices(i)) for i in range(len(cache))] == list(LENGTHS)
    assert contents(tmp_path / "cache") == whole


# Interruptions


@pytest.mark.parametrize("count", range(len(LENGTHS) + 1))
def test_a_fill_that_is_given_up_goes_on_where_it_stopped(tmp_path, whole, count):
    filling = iter(open_cache(tmp_path / "cache").fill())
    for _ in range(count):
        next(filling)
    filling.close()  # type: ignore[attr-defined]
    cache = open_cache(tmp_path / "cache")
    assert cache.finished == count
    assert list(cache.fill()) == list(LENGTHS[count:])
    assert contents(tmp_path / "cache") == whole


# Bytes that a kill leaves of features, choices and checksums, behind whole sequences: how many
# sequences each file holds completely, and how many bytes of the next.
KILLS = {
    "in the first features": ((0, 333), (0, 0), (0, 0)),
    "before the first choices": ((1, 0), (0, 0), (0, 0)),
    "in the choices": ((2, 0), (1, 5), (1, 0)),
    "between two choices of a token": ((2, 0), (1, CHOICES_ROW + 8), (1, 0)),
    "before the checksum": ((2, 0), (2, 0), (1, 0)),
    "in the checksum": ((4, 0), (4, 0), (3, 3)),
    "between the checksums": ((4, 0), (4, 0), (3, 4)),
    "in later features": ((3, 1), (3, 0), (3, 0)),
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_fill_goes_on_and_ends_with_the_same_files(tmp_path, whole, kill):
    filled(tmp_path / "cache")
    ends = np.array([0, *np.cumsum(LENGTHS)])
    files = (
        ("features", ROW, ends),
        ("choices", CHOICES_ROW, ends),
        ("checksums", 8, np.arange(6)),
    )
    for (name, size, starts), (complete, more) in zip(files, KILLS[kill], strict=True):
        with (tmp_path / "cache" / f"{name}.bin").open("ab") as file:
            file.truncate(int(starts[complete]) * size + more)
    cache = open_cache(tmp_path / "cache")
    done = KILLS[kill][2][0]
    assert cache.finished == done
    for i in range(done):
        cache.features(i), cache.choices(i)
    assert list(cache.fill()) == list(LENGTHS[done:])
    assert contents(tmp_path / "cache") == whole


def test_only_one_process_fills_a_folder(tmp_path, whole):
    filling = iter(open_cache(tmp_path / "cache").fill())
    next(filling)
    other = open_cache(tmp_path / "cache")
    with pytest.raises(DFlashError, match="another process is computing .*cache; wait for it"):
        list(other.fill())
    assert list(filling) == list(LENGTHS[1:])
    assert list(other.fill()) == []
    assert contents(tmp_path / "cache") == whole


@pytest.mark.parametrize("room", [ROW // 3, sum(LENGTHS[:2]) * ROW, sum(LENGTHS[:4]) * ROW + 77])
def test_a_full_disk_leaves_a_usable_cache(tmp_path, whole, room):
    folder = tmp_path / "cache"
    cache, done = open_cache(folder), 0
    with full_disk(room), pytest.raises(OSError) as failure:
        for _ in cache.fill():
            done += 1
    assert failure.value.errno == errno.EFBIG
    assert done == sum(end * ROW <= room for end in np.cumsum(LENGTHS))
    again = open_cache(folder)
    assert again.finished == done
    for i in range(done):
        assert again.features(i).shape == (LENGTHS[i], len(TAPS) * WIDTH)
    assert list(again.fill()) == list(LENGTHS[done:])
    assert contents(folder) == whole


# Damage, and folders of something else


@pytest.mark.parametrize("name", ["features", "choices", "checksums"])
@pytest.mark.parametrize("damaged", [0, 3])
def test_a_damaged_byte_is_found(tmp_path, name, damaged):
    cache, file = filled(tmp_path / "cache"), tmp_path / "cache" / f"{name}.bin"
    start, size = sum(LENGTHS[:damaged]), {"features": ROW, "choices": CHOICES_ROW}.get(name)
    at = damaged * 8 if size is None else start * size
    data = bytearray(file.read_bytes())
    data[at + 1] ^= 4
    data[at + 5] ^= 4  # of a checksum pair: the second
    file.write_bytes(bytes(data))
    readers = {"features": [cache.features], "choices": [cache.choices]}
    for read in readers.get(name, [cache.features, cache.choices]):
        with pytest.raises(DFlashError, match=f"cache is damaged at sequence {damaged}") as failure:
            read(damaged)
        assert "delete that folder" in failure.value.next_step
        read(damaged + 1)


@pytest.mark.parametrize("at", [0, 4, CHOICES_ROW - 8, CHOICES_ROW - 1, -CHOICES_ROW, -1])
def test_every_token_and_probability_of_the_choices_is_checked(tmp_path, at):
    cache, file = filled(tmp_path / "cache"), tmp_path / "cache" / "choices.bin"
    assert file.stat().st_size == sum(LENGTHS) * CHOICES_ROW
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))
    damaged = 0 if at >= 0 else len(LENGTHS) - 1
    for i in range(len(LENGTHS)):
        if i != damaged:
            cache.choices(i)
    with pytest.raises(DFlashError, match=f"cache is damaged at sequence {damaged}"):
        cache.choices(damaged)


@pytest.mark.parametrize("name", ["features", "choices", "checksums"])
@pytest.mark.parametrize("size", [None, 0, 35, -8, -1])
def test_a_file_that_is_cut_or_missing_is_reported(tmp_path, name, size):
    cache, file = filled(tmp_path / "cache"), tmp_path / "cache" / f"{name}.bin"
    data = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(data[:size])
    readers = {"features": [cache.features], "choices": [cache.choices]}
    for read in readers.get(name, [cache.features, cache.choices]):
        with pytest.raises(DFlashError, match="cache is damaged at sequence 4"):
            read(4)


@pytest.mark.parametrize("name", ["features", "choices"])
def test_a_fill_does_not_go_on_behind_missing_features(tmp_path, name):
    filling = iter(open_cache(tmp_path / "cache").fill())
    next(filling), next(filling)
    filling.close()  # type: ignore[attr-defined]
    with (tmp_path / "cache" / f"{name}.bin").open("ab") as file:
        file.truncate(3)
    with pytest.raises(DFlashError, match=rf"{name}.bin is shorter than its index says"):
        list(open_cache(tmp_path / "cache").fill())


OTHERS = {
    "another corpus": ([*SEQUENCES[:-1], [1, 2, 3]], 0, TAPS),
    "a token changed": ([[*SEQUENCES[0][:-1], SEQUENCES[0][-1] ^ 1], *SEQUENCES[1:]], 0, TAPS),
    "fewer sequences": (SEQUENCES[:-1], 0, TAPS),
    "another target": (SEQUENCES, 1, TAPS),
    "other layers": (SEQUENCES, 0, (0, 1)),
    "layers in another order": (SEQUENCES, 0, TAPS[::-1]),
    "more layers": (SEQUENCES, 0, (0, 1, 2)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_features_of_something_else_are_refused_and_kept(tmp_path, whole, other):
    filled(tmp_path / "cache")
    sequences, seed, taps = OTHERS[other]
    with pytest.raises(DFlashError, match="features of another corpus, target or set") as failure:
        FeatureCache(tmp_path / "cache", sequences, tiny_target(seed), taps, PLENTY)
    assert str(tmp_path / "cache") in failure.value.what
    assert "--cache" in failure.value.next_step
    assert contents(tmp_path / "cache") == whole


def test_a_target_that_was_tuned_further_is_another_one(tmp_path, whole):
    filled(tmp_path / "cache")
    model = make_model("llama")
    model.model.norm.weight = model.model.norm.weight * 1.001
    with pytest.raises(DFlashError, match="of another corpus, target"):
        FeatureCache(tmp_path / "cache", SEQUENCES, Target(model, CONTEXT, "b"), TAPS, PLENTY)


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DFlashError, match=r"is not empty and holds no features.*--cache"):
        open_cache(tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": "dflash-features"}', "\xff"])
def test_an_index_that_is_damaged_is_refused(tmp_path, text):
    filled(tmp_path / "cache")
    (tmp_path / "cache" / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(DFlashError) as failure:
        open_cache(tmp_path / "cache")
    assert "delete that folder" in failure.value.next_step


def make_version_1(folder: Path) -> None:
    """What was written before: of every token the likeliest next one alone, as uint32."""
    cache = open_cache(folder)
    choices = [cache.choices(i)["token"][:, 0].tobytes() for i in range(len(cache))]
    (folder / "choices.bin").write_bytes(b"".join(choices))
    checksums = np.fromfile(folder / "checksums.bin", "<u4").reshape(-1, 2)
    checksums[:, 1] = [zlib.crc32(data) for data in choices]
    checksums.tofile(folder / "checksums.bin")
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    (folder / "index.json").write_text(json.dumps({**index, "version": 1}, indent=1))


def test_a_folder_with_the_choices_of_version_1_is_refused_and_kept(tmp_path):
    filled(tmp_path / "cache")
    make_version_1(tmp_path / "cache")
    before = contents(tmp_path / "cache")
    assert len(before["choices.bin"]) == sum(LENGTHS) * 4
    with pytest.raises(DFlashError, match="cache holds features of version 1, not 2") as failure:
        open_cache(tmp_path / "cache")
    assert "choose another folder with --cache" in failure.value.next_step
    assert contents(tmp_path / "cache") == before


def test_a_kill_while_the_index_is_written_is_survived(tmp_path, whole):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".new-1-index.json").write_text('{"form')
    filled(tmp_path / "cache")
    assert contents(tmp_path / "cache") == whole
