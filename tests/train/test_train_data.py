"""Corpora become texts with the target's features: right, complete after interruptions, never mixed
up; some rows are kept for measuring and never trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train import data as module
from dflash_mlx.train.config import DataConfig
from dflash_mlx.train.data import (
    CHOICE,
    CHOICES,
    FeatureCache,
    Texts,
    likeliest,
    read_texts,
)
from dflash_mlx.train.rows import CorpusHeader, CorpusRow, tokenizer_fingerprint
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from support.families import VOCAB_SIZE, make_model
from support.tiny_training import (
    CONTEXT,
    TAPS,
    WIDTH,
    LetterTokenizer,
    files,
    full_disk,
    greedy_rows,
    sampled_row,
    tiny_target,
    write_corpus,
)

WORDS = LetterTokenizer("".join(map(chr, range(40, 40 + VOCAB_SIZE))))
HEADER = CorpusHeader("tiny", VOCAB_SIZE, tokenizer_fingerprint(WORDS))
ROW = len(TAPS) * WIDTH * 2  # bytes per token
PLENTY = 1 << 30
LENGTHS = (9, 23, 1, 14, 30)
SEQUENCES = [
    np.random.default_rng(i).integers(VOCAB_SIZE, size=length).tolist()
    for i, length in enumerate(LENGTHS)
]


def open_cache(root: Path, limit: int = PLENTY) -> FeatureCache:
    return FeatureCache(root / "cache", SEQUENCES, tiny_target(), TAPS, limit)


def filled(root: Path, limit: int = PLENTY) -> FeatureCache:
    cache = open_cache(root, limit)
    assert list(cache.fill()) == list(LENGTHS[: len(cache)])
    return cache


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a cache that was filled without interruption."""
    root = tmp_path_factory.mktemp("whole")
    filled(root)
    return files(root)


# What is kept


@pytest.mark.parametrize("chunk", [512, 7])
def test_features_and_choices_are_those_of_the_target(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    cache, target = filled(tmp_path), tiny_target()
    for i, tokens in enumerate(SEQUENCES):
        whole = (target.new_cache(), Block(len(tokens)), TAPS)
        logits, features = target.forward(mx.array(tokens), *whole)
        found = cache.features(i)
        assert found.dtype == mx.bfloat16 and found.shape == features.shape
        error = mx.abs(found.astype(mx.float32) - features)
        assert bool(mx.all(error <= mx.abs(features) / 256 + 1e-4).item())
        choices, p = cache.choices(i), np.array(mx.softmax(logits.astype(mx.float32), axis=-1))
        assert choices.dtype == CHOICE and choices.shape == (len(tokens), CHOICES)
        assert choices["token"][:, 0].tolist() == mx.argmax(logits, axis=-1).tolist()
        of_them = np.take_along_axis(p, choices["token"].astype(np.int64), axis=-1)
        assert np.allclose(choices["probability"], of_them, rtol=1e-3)
        assert np.allclose(choices["probability"], -np.sort(-p)[:, :CHOICES], rtol=1e-3)


def test_sequences_from_the_first_that_does_not_fit_are_left_out(tmp_path):
    limit = sum(LENGTHS[:2]) * ROW
    for fitting, room in ((1, limit - 1), (2, limit), (2, limit + ROW - 1)):
        cache = filled(tmp_path / str(room), room)
        assert len(cache) == fitting and cache.missing == []
        kept = [np.load(file)["features"].nbytes for file in cache.folder.glob("*.npz")]
        assert sum(kept) == sum(LENGTHS[:fitting]) * ROW
    with pytest.raises(DFlashError, match="9 bytes .*--cache-gb"):
        open_cache(tmp_path, 9)


def test_something_else_has_a_folder_of_its_own(tmp_path):
    model, tokens = make_model("llama"), [*SEQUENCES[0][:-1], SEQUENCES[0][-1] ^ 1]
    model.model.norm.weight = model.model.norm.weight * 1.001  # trained a little further
    others = [
        ([tokens, *SEQUENCES[1:]], tiny_target(), TAPS),
        (SEQUENCES, Target(model, CONTEXT, "tiny"), TAPS),
        (SEQUENCES, tiny_target(), TAPS[::-1]),
    ]
    folders = {FeatureCache(tmp_path / "cache", *other, PLENTY).folder for other in others}
    assert len({*folders, open_cache(tmp_path).folder}) == 4


# Interruptions


@pytest.mark.parametrize(("count", "room"), [(1, None), (0, ROW // 3), (1, 23 * ROW)])
def test_a_fill_that_was_stopped_killed_or_met_a_full_disk_goes_on(tmp_path, whole, count, room):
    filling, other = open_cache(tmp_path).fill(), open_cache(tmp_path)
    for _ in range(count):
        next(filling)
        with pytest.raises(DFlashError, match="another process .*cache-"):
            list(other.fill())
    if room is not None:
        with full_disk(room), pytest.raises(OSError):
            next(filling)
    filling.close()
    cache = open_cache(tmp_path)
    if count:
        (cache.folder / f".new-1-{count}.npz").write_bytes(b"half")  # pid 1 runs
    assert cache.missing == list(range(count, len(LENGTHS)))
    assert list(cache.fill()) == list(LENGTHS[count:])
    assert files(tmp_path) == whole


def flipped(name: str, at: float) -> Callable[[bytes, Path], bytes]:
    """One bit of a tensor in a file's bytes, somewhere in it."""

    def damaged(data: bytes, file: Path) -> bytes:
        kept, changed = np.load(file)[name].tobytes(), bytearray(data)
        changed[data.index(kept) + int(at * len(kept))] ^= 4
        return bytes(changed)

    return damaged


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (flipped("features", 0.999), ["features"]),
        (flipped("choices", 0.5), ["choices"]),
        *((lambda data, _, end=end: data[:end], ["features", "choices"]) for end in (0, 30, -1)),
        (None, ["features", "choices"]),
    ],
)
def test_a_damaged_or_missing_file_is_found(tmp_path, damage, names):
    cache = filled(tmp_path)
    file = cache.folder / "3.npz"
    data = None if damage is None else damage(file.read_bytes(), file)
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    for name in names:
        with pytest.raises(DFlashError, match=f"{cache.folder} .* sequence 3; delete that folder"):
            getattr(cache, name)(3)
    cache.features(2), cache.choices(4)


@settings(max_examples=50)
@given(
    rows=st.sampled_from([1, 300]),
    words=st.sampled_from([1, 5, 8, 9, 97, 2000]),
    levels=st.sampled_from([1, 2, 6, 10**6]),
    seed=st.integers(0, 1000),
)
def test_the_likeliest_tokens_are_those_of_a_sort_and_the_first_is_the_greedy_choice(
    rows, words, levels, seed
):
    logits = np.random.default_rng(seed).integers(levels, size=(rows, words)).astype(np.float32)
    logits *= 6 / levels
    logits[0, 1:] = -np.inf if levels == 6 else logits[0, 1:]
    found, count = likeliest(mx.array(logits)), min(CHOICES, words)
    assert found.shape == (rows, CHOICES) and not found[:, words:]["probability"].any()
    assert np.array_equal(found["token"][:, 0], logits.argmax(axis=-1))
    tokens = found["token"][:, :count].astype(np.int64)
    p = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    assert all(len({*chosen}) == count for chosen in tokens.tolist())
    # Which of equal ones are kept, and in what order, is left open, but not their probabilities.
    kept = found["probability"][:, :count]
    assert np.allclose(kept, -np.sort(-p)[:, :count], rtol=1e-5, atol=1e-9)
    assert np.allclose(kept, np.take_along_axis(p, tokens, axis=-1), rtol=1e-5, atol=1e-9)


def rows_of(count: int, seed: int = 0) -> list[CorpusRow]:
    """Greedy answers, each with a category of its own."""
    rows = greedy_rows(count, 9, seed=seed)
    return [replace(row, category=f"{seed}-{i}") for i, row in enumerate(rows)]


def read(folder: Path, *corpora: list[CorpusRow], gigabytes: float = 1.0) -> Texts:
    named = enumerate(corpora)
    paths = [write_corpus(folder / f"corpus-{i}.jsonl", rows, HEADER) for i, rows in named]
    data = DataConfig(tuple(paths), folder / "cache", gigabytes)
    return read_texts(data, Pair(tiny_target(), WORDS), TAPS)


def rows_in(texts: Texts) -> list[CorpusRow]:
    return [text.row for text in texts.texts]


# Reading


def test_texts_are_the_rows_of_all_corpora_with_their_features(tmp_path):
    first, second = rows_of(3), rows_of(2, seed=1)
    texts = read(tmp_path, first, second)
    assert rows_in(texts) == [*first, *second] and len(texts) == 5
    assert [text.number for text in texts.texts] == [0, 1, 2, 0, 1]
    for i, row in enumerate(rows_in(texts)):
        sequence, alone = texts.texts[i], read(tmp_path / "cache", [row])
        assert tuple(sequence.tokens) == row.prompt + row.answer
        assert tuple(sequence.likely[sequence.prompt_length - 1 : -1, 0]) == row.answer
        place = np.array([1]), len(sequence.tokens)
        found = texts.features(np.array([i]), *place)
        assert not found[0, -1].any().item()  # behind its end
        assert mx.array_equal(found, alone.features(np.array([0]), *place)).item()
        choices = alone.texts[0].cache.choices(0)
        assert np.array_equal(sequence.likely, choices["token"])
        assert np.array_equal(sequence.shares, choices["probability"])


def test_a_row_fills_the_context_at_most(tmp_path, capsys):
    row = rows_of(1)[0]
    full = replace(row, answer=tuple(range(CONTEXT - len(row.prompt))))
    over = replace(row, answer=(*full.answer, 1))
    assert rows_in(read(tmp_path, [full, over, row])) == [full, row]
    said = capsys.readouterr().err
    assert f"corpus-0.jsonl: rows left out: 1, longer than the context of {CONTEXT} tokens" in said
    assert "no room" not in said
    some = rows_of(4)
    room = 2 * len(some[0].prompt + some[0].answer) * ROW
    texts = read(tmp_path, some, gigabytes=(room + 1) / 1e9)
    assert texts.name != read(tmp_path / "cache", some).name and len(texts) == 2
    assert "rows left out: 2, no room for their features; --cache-gb" in capsys.readouterr().err


def test_without_features_only_greedy_answers_teach_and_a_name_tells_texts_and_targets_apart(
    tmp_path,
):
    def read(target: Target, **files: Sequence[CorpusRow]) -> Texts:
        paths = [write_corpus(tmp_path / f"{n}.jsonl", rows, HEADER) for n, rows in files.items()]
        return read_texts(DataConfig(tuple(paths)), Pair(target, WORDS), ())

    other = Target(make_model("llama"), CONTEXT, "tiny")
    other.model.update({"model": {"norm": {"weight": mx.full(WIDTH, 1.5)}}})
    rows, tiny = rows_of(4), tiny_target()
    read_by = [(tiny, rows), (tiny, rows), (tiny, rows[:3]), (other, rows)]
    assert len({read(target, c=some).name for target, some in read_by}) == 3
    sampled = [sampled_row("a", rows[0])]
    with pytest.raises(DFlashError, match="first.jsonl, .*second.jsonl .* greedy") as failure:
        read(tiny, first=sampled, second=sampled)
    assert "--greedy-share" in failure.value.next_step
    assert rows_in(read(tiny, first=sampled, second=sampled, third=rows)) == rows


# Holding out


@pytest.mark.parametrize("held_out", [2, 50])
def test_every_so_many_th_row_of_a_file_measures_and_is_not_trained_on(tmp_path, held_out):
    train, kept = read(tmp_path, rows_of(7), rows_of(4, seed=1)).split(held_out)
    numbers = [(seed, i) for seed, n in ((0, 7), (1, 4)) for i in range(n)]
    wanted = [f"{seed}-{i}" for seed, i in numbers if i % held_out == 0]
    assert [row.category for row in rows_in(kept)] == wanted
    assert {row.category for row in rows_in(train)} == {f"{s}-{i}" for s, i in numbers} - {*wanted}


def test_greedy_rows_alone_measure_where_there_are_any(tmp_path):
    rows = rows_of(6)
    rows[0], rows[3] = sampled_row("a", rows[0]), sampled_row("b", rows[3])
    train, kept = read(tmp_path, rows).split(2)
    assert [row.id for row in rows_in(kept)] == ["row-2", "row-4"]
    assert [row.id for row in rows_in(train)] == ["row-1", "b", "row-5"]
    only = read(tmp_path, [rows[0], rows[1]])
    assert [row.id for row in rows_in(only.split(2)[1])] == ["a"]
