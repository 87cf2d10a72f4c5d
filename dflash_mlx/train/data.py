"""From corpus files to what a trainer reads: texts, their features, and which are held out."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import platformdirs
from tqdm import tqdm

from dflash_mlx.core.config import option
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.blocks import Array, TextTokens
from dflash_mlx.train.corpus.rows import CorpusRow, read_rows
from dflash_mlx.train.features import FeatureCache, target_fingerprint, vocabulary_size


@dataclass(frozen=True)
class Text(TextTokens):
    """A row of a corpus. number: in its file. cache, place: where its features are, if any."""

    row: CorpusRow
    number: int
    cache: FeatureCache | None = None
    place: int = 0

    @classmethod
    def of(cls, row: CorpusRow, number: int, cache: FeatureCache, place: int) -> Text:
        """With what the target thought of it as sequence `place` of `cache`."""
        tokens, thought = np.array(row.prompt + row.answer), cache.choices(place)
        likely, shares = thought["token"], thought["probability"]
        return cls(tokens, len(row.prompt), likely, shares, row, number, cache, place)

    @classmethod
    def by_itself(cls, row: CorpusRow, number: int) -> Text:
        """A greedy answer, whose tokens are what the target prefers."""
        tokens = np.array(row.prompt + row.answer)
        likely = np.append(tokens[1:], 0)[:, None]
        shares = np.ones(likely.shape, np.float32)
        return cls(tokens, len(row.prompt), likely, shares, row, number)


@dataclass(frozen=True)
class Texts:
    """Rows of corpora. name: tells corpora, targets and taps apart."""

    name: str
    texts: list[Text]

    def __len__(self) -> int:
        return len(self.texts)

    def features(self, chosen: Array, starts: Array, length: int) -> mx.array:
        """[S, length, m*d] float32 of the texts `chosen` [S] from token `starts` [S] on.

        Zeros after their ends.
        """
        parts = []
        for i, start in zip(chosen, starts.tolist(), strict=True):
            text = self.texts[i]
            assert text.cache is not None
            part = text.cache.features(text.place)[start : start + length].astype(mx.float32)
            parts.append(mx.pad(part, [(0, length - part.shape[0]), (0, 0)]))
        return mx.stack(parts)

    def tokens(self, chosen: Array, start: int, length: int) -> Array:
        """[S, length] tokens of the texts `chosen` [S] from `start` on; 0 after their ends."""
        result = np.zeros((len(chosen), length), np.int64)
        for row, i in zip(result, chosen, strict=True):
            tokens = self.texts[i].tokens[start : start + length]
            row[: len(tokens)] = tokens
        return result

    def greedy(self) -> Texts:
        """Those that are the target's greedy answers."""
        return replace(self, texts=[text for text in self.texts if text.row.temperature == 0])

    def split(self, held_out: int) -> tuple[Texts, Texts]:
        """What to train on, and what to measure with.

        Rows 0, held_out, 2 held_out, ... of every file are kept out of training. Only the greedy
        ones among them, if there are any, measure: of the others only the first draft could be
        judged. Raises DFlashError when nothing is left to train on.
        """
        if held_out < 2:
            raise DFlashError(f"held_out is {held_out}", "choose 2 or more", "held_out")
        train = replace(self, texts=[text for text in self.texts if text.number % held_out])
        kept = replace(self, texts=[text for text in self.texts if not text.number % held_out])
        if not len(train):
            raise DFlashError("the corpora have one row in all", "make a larger corpus")
        return train, kept.greedy() if len(kept.greedy()) else kept


@dataclass(frozen=True)
class DataConfig:
    """Where texts and features are."""

    corpus: tuple[Path, ...] = option(
        (), "corpus file; may be given several times", action="append", type=Path, required=True
    )
    cache: Path | None = option(
        None,
        "where the target's features are kept (default: with this user's other caches)",
        type=Path,
    )
    cache_gb: float = option(20, "most gigabytes of features per corpus", type=float)

    def __post_init__(self) -> None:
        if not self.corpus:
            raise DFlashError("there is no corpus", "name a file or several with --corpus")
        if not 0 < self.cache_gb < float("inf"):
            problem = f"cache_gb is {self.cache_gb}"
            raise DFlashError(problem, "choose a number above 0", "cache_gb")


def read_texts(config: DataConfig, pair: Pair, aux_layers: tuple[int, ...]) -> Texts:
    """Read corpora, and compute the features that are missing.

    Without taps there are none, and only greedy answers say what the target prefers. Raises
    DFlashError for a corpus of another tokenizer, or one that has no usable row.
    """
    parts = [_read_file(path, config, pair, aux_layers) for path in config.corpus]
    if not any(map(len, parts)):
        files = ", ".join(map(str, config.corpus))
        what = f"all rows of {files} are sampled, and only greedy answers teach this drafter"
        raise DFlashError(what, "make a corpus with greedy answers: --greedy-share above 0")
    name = " ".join(part.name for part in parts)
    return Texts(name, [text for part in parts for text in part.texts])


def _read_file(path: Path, config: DataConfig, pair: Pair, aux_layers: tuple[int, ...]) -> Texts:
    vocab_size, context = vocabulary_size(pair.target), pair.target.context_length
    rows = read_rows(path, vocab_size, pair.tokenizer)
    usable = [(i, r) for i, r in enumerate(rows) if len(r.prompt) + len(r.answer) <= context]
    if not usable:
        raise DFlashError(
            f"no row of {path} fits the context of {context} tokens",
            "make the corpus again with shorter prompts",
        )
    _tell(path, len(rows) - len(usable), f"longer than the context of {context} tokens")
    if not aux_layers:
        greedy = [Text.by_itself(row, i) for i, row in usable if row.temperature == 0]
        _tell(path, len(usable) - len(greedy), "sampled, and only greedy ones teach this drafter")
        name = f"{path.name}:{digest(greedy)}:{target_fingerprint(pair.target)[:12]}"
        return Texts(name, greedy)
    tokens = [row.prompt + row.answer for _, row in usable]
    cache = config.cache or platformdirs.user_cache_path("dflash-chat") / "features"
    place, limit = cache / path.name.partition(".")[0], int(config.cache_gb * 1e9)
    features = FeatureCache(place, tokens, pair.target, aux_layers, limit)
    _tell(path, len(usable) - len(features), "no room for their features; --cache-gb gives more")
    if missing := features.missing:
        with tqdm(desc=f"features of {path.name}", total=len(missing), unit="row") as bar:
            for _ in features.fill():
                bar.update()
    kept = enumerate(usable[: len(features)])
    texts = [Text.of(row, number, features, i) for i, (number, row) in kept]
    return Texts(f"{features.folder.name}:{len(texts)}", texts)  # with less room, other texts


def digest(texts: list[Text]) -> str:
    """Tells texts apart."""
    tokens = b"".join(text.tokens.tobytes() for text in texts)
    return f"{len(texts)}-{zlib.crc32(tokens):08x}"


def _tell(path: Path, rows: int, why: str) -> None:
    if rows:
        print(f"{path}: rows left out: {rows}, {why}", file=sys.stderr)
