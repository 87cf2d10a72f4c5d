"""From corpus files to what a trainer reads: texts, their features, and which are held out."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import platformdirs
from tqdm import tqdm

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.blocks import Array, TextTokens
from dflash_mlx.train.corpus.rows import Row, check_header, read_rows
from dflash_mlx.train.features import FeatureCache, fingerprint
from dflash_mlx.train.start import vocabulary_size


@dataclass(frozen=True)
class Texts:
    """Sequences of corpora, one entry of each list per sequence.

    numbers: the row's number in its file. places: its features, as a cache and a number in it.
    name: tells corpora, targets and taps apart.
    """

    name: str
    sequences: list[TextTokens]
    rows: list[Row]
    numbers: list[int]
    places: list[tuple[FeatureCache, int]]

    def __len__(self) -> int:
        return len(self.sequences)

    def features(self, chosen: Array, length: int) -> mx.array:
        """[S, length, m*d] float32 of the sequences `chosen` [S], zeros after their ends."""
        parts = []
        for i in chosen:
            cache, place = self.places[i]
            part = cache.features(place)[:length].astype(mx.float32)
            parts.append(mx.pad(part, [(0, length - part.shape[0]), (0, 0)]))
        return mx.stack(parts)

    def only(self, wanted: Callable[[int], bool]) -> Texts:
        """Those of the sequences 0, 1, ... that are wanted."""
        chosen = [i for i in range(len(self)) if wanted(i)]
        lists = (self.sequences, self.rows, self.numbers, self.places)
        return Texts(self.name, *([values[i] for i in chosen] for values in lists))  # type: ignore[arg-type]

    def split(self, held_out: int) -> tuple[Texts, Texts]:
        """What to train on, and what to measure with.

        Rows 0, held_out, 2 held_out, ... of every file are kept out of training. Only the greedy
        ones among them, if there are any, measure: of the others only the first draft could be
        judged. Raises DFlashError when nothing is left to train on.
        """
        if held_out < 2:
            raise DFlashError(f"held_out is {held_out}", "choose 2 or more")
        train = self.only(lambda i: self.numbers[i] % held_out != 0)
        kept = self.only(lambda i: self.numbers[i] % held_out == 0)
        if not train.sequences:
            raise DFlashError("the corpora have one row in all", "make a larger corpus")
        greedy = kept.only(lambda i: kept.rows[i].temperature == 0)
        return train, greedy if greedy.sequences else kept


def read_texts(
    paths: Sequence[Path], pair: Pair, taps: tuple[int, ...], cache: tuple[Path, int]
) -> Texts:
    """Read corpora, and compute the features that are missing.

    cache: the folder of all features, and the most bytes per corpus. Raises DFlashError for a
    corpus of another tokenizer, or one that has no usable row.
    """
    parts = [_read_file(path, pair, taps, cache) for path in paths]
    return Texts(
        " ".join(part.name for part in parts),
        [sequence for part in parts for sequence in part.sequences],
        [row for part in parts for row in part.rows],
        [number for part in parts for number in part.numbers],
        [place for part in parts for place in part.places],
    )


def _read_file(path: Path, pair: Pair, taps: tuple[int, ...], cache: tuple[Path, int]) -> Texts:
    vocab_size, context = vocabulary_size(pair.target), pair.target.context_length
    header, rows = read_rows(path, vocab_size)
    check_header(header, pair.tokenizer, vocab_size, str(path))
    fits = [len(row.prompt) + len(row.answer) <= context for row in rows]
    usable = [row for row, fit in zip(rows, fits, strict=True) if fit]
    numbers = [i for i, fit in enumerate(fits) if fit]
    if not usable:
        raise DFlashError(
            f"no row of {path} fits the context of {context} tokens",
            "make the corpus again with shorter prompts",
        )
    _tell(path, len(rows) - len(usable), f"longer than the context of {context} tokens")
    tokens = [r.prompt + r.answer for r in usable]
    identity = repr((fingerprint(pair.target), taps, tokens)).encode()
    name = f"{path.name.partition('.')[0]}-{hashlib.sha256(identity).hexdigest()[:12]}"
    features = FeatureCache(cache[0] / name, tokens, pair.target, taps, cache[1])
    _tell(path, len(usable) - len(features), "no room for their features; --cache-gb gives more")
    _fill(features, path)
    usable = usable[: len(features)]
    sequences = [text_tokens(row, features, i) for i, row in enumerate(usable)]
    places = [(features, i) for i in range(len(features))]
    name = f"{name}:{len(features)}"  # a smaller cache means other texts
    return Texts(name, sequences, usable, numbers[: len(features)], places)


def _tell(path: Path, rows: int, why: str) -> None:
    if rows:
        print(f"{path}: rows left out: {rows}, {why}", file=sys.stderr)


def text_tokens(row: Row, features: FeatureCache, i: int) -> TextTokens:
    """A row, and what the target thought of it as sequence `i` of `features`."""
    choices = features.choices(i)
    tokens = np.array(row.prompt + row.answer)
    return TextTokens(tokens, len(row.prompt), choices["token"], choices["probability"])


def _fill(features: FeatureCache, path: Path) -> None:
    missing = len(features) - features.finished
    if missing:
        with tqdm(desc=f"features of {path.name}", total=missing, unit="row") as bar:
            for _ in features.fill():
                bar.update()


def feature_place(arguments: argparse.Namespace) -> tuple[Path, int]:
    """`cache` of `read_texts` from those options; DFlashError for a size that is none."""
    if not 0 < arguments.cache_gb < float("inf"):
        raise DFlashError(f"cache_gb is {arguments.cache_gb}", "choose a number above 0")
    return arguments.cache, int(arguments.cache_gb * 1e9)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add --corpus, --cache and --cache-gb."""
    cache = platformdirs.user_cache_path("dflash-chat") / "features"
    parser.add_argument(
        "--corpus",
        required=True,
        action="append",
        type=Path,
        help="corpus file; may be given several times",
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
