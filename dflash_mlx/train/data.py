"""From corpus files to what a trainer reads: texts, their features, and which are held out."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import platformdirs
from tqdm import tqdm

from dflash_mlx.corpus.rows import Row, check_header, read_rows
from dflash_mlx.errors import DFlashError
from dflash_mlx.load import Pair
from dflash_mlx.train.blocks import Array, TextTokens
from dflash_mlx.train.features import FeatureCache, fingerprint
from dflash_mlx.train.start import vocabulary_size


@dataclass(frozen=True)
class Texts:
    """Sequences with their features and rows; indices of all three agree."""

    sequences: list[TextTokens]
    rows: list[Row]
    places: list[tuple[FeatureCache, int]]

    def features(self, chosen: Array, length: int) -> mx.array:
        """[S, length, m*d] float32 of the sequences `chosen` [S], zeros after their ends."""
        parts = []
        for i in chosen:
            cache, place = self.places[i]
            part = cache.features(place)[:length].astype(mx.float32)
            parts.append(mx.pad(part, [(0, length - part.shape[0]), (0, 0)]))
        return mx.stack(parts)

    def only(self, indices: Iterable[int]) -> Texts:
        """These sequences alone."""
        chosen = list(indices)
        return Texts(
            [self.sequences[i] for i in chosen],
            [self.rows[i] for i in chosen],
            [self.places[i] for i in chosen],
        )


@dataclass(frozen=True)
class Split:
    """Texts to learn from, and texts to measure with. name: tells data apart."""

    train: Texts
    held_out: Texts
    name: str


def read_texts(
    paths: Sequence[Path],
    pair: Pair,
    taps: tuple[int, ...],
    cache: tuple[Path, int],
    held_out: int,
) -> Split:
    """Read corpora, compute the features that are missing, and split.

    cache: the folder of all features, and the most bytes per corpus. held_out: every how many
    rows one is kept out of training (rows 0, held_out, 2 held_out, ... of each file); the greedy
    ones among them are measured with. Raises DFlashError for a corpus of another tokenizer, or
    one that has no usable row.
    """
    train, kept = Texts([], [], []), Texts([], [], [])
    names = []
    for path in paths:
        texts, name = _read_file(path, pair, taps, cache)
        names.append(name)
        for i, triple in enumerate(zip(texts.sequences, texts.rows, texts.places, strict=True)):
            part = kept if i % held_out == 0 else train
            part.sequences.append(triple[0])
            part.rows.append(triple[1])
            part.places.append(triple[2])
    if greedy := [i for i, row in enumerate(kept.rows) if row.temperature == 0]:
        kept = kept.only(greedy)  # of the others only the first draft could be judged
    if not train.sequences:
        raise DFlashError("the corpora hold too few rows to keep any out", "make a larger corpus")
    return Split(train, kept, " ".join(names))


def _read_file(
    path: Path, pair: Pair, taps: tuple[int, ...], cache: tuple[Path, int]
) -> tuple[Texts, str]:
    """The texts of a corpus, and a name that no other corpus, target or set of taps has."""
    vocab_size, context = vocabulary_size(pair.target), pair.target.context_length
    header, rows = read_rows(path, vocab_size)
    check_header(header, pair.tokenizer, vocab_size, str(path))
    usable = [r for r in rows if r.answer and len(r.prompt) + len(r.answer) <= context]
    if not usable:
        raise DFlashError(
            f"no row of {path} has an answer and fits the context of {context} tokens",
            "make the corpus again with shorter prompts",
        )
    if len(usable) < len(rows):
        print(f"{path}: {len(rows) - len(usable)} rows left out", file=sys.stderr)
    tokens = [r.prompt + r.answer for r in usable]
    identity = repr((fingerprint(pair.target), taps, tokens)).encode()
    name = f"{path.name.partition('.')[0]}-{hashlib.sha256(identity).hexdigest()[:12]}"
    features = FeatureCache(cache[0] / name, tokens, pair.target, taps, cache[1])
    _fill(features, path)
    usable = usable[: len(features)]
    sequences = [
        TextTokens(np.array(row.prompt + row.answer), len(row.prompt), features.choices(i))
        for i, row in enumerate(usable)
    ]
    return Texts(sequences, usable, [(features, i) for i in range(len(features))]), name


def _fill(features: FeatureCache, path: Path) -> None:
    missing = len(features) - features.finished
    if missing:
        with tqdm(desc=f"features of {path.name}", total=missing, unit="row") as bar:
            for _ in features.fill():
                bar.update()


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add --corpus, --cache and --cache-gb."""
    cache = platformdirs.user_cache_path("dflash-chat") / "features"
    parser.add_argument(
        "--corpus", required=True, action="append", help="corpus file; may be given several times"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache,
        help=f"where the target's features are kept (default: {cache})",
    )
    parser.add_argument(
        "--cache-gb",
        type=float,
        default=20.0,
        help="most gigabytes of features per corpus (default: 20)",
    )
