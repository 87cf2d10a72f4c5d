"""From corpus files to what a trainer reads: texts, and the target's features.

What it thinks is computed once and kept on disk. A folder is named by what it holds, so that it
never holds anything else: an .npz file per sequence of T tokens, with `features` [T, m*d] (the bits
of bfloat16) and `choices` [T, CHOICES] (the target's most likely next tokens after every token,
with their probabilities), each of which a zip file keeps with a CRC-32. A file is complete before
it takes its name, so an interrupted build goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs
from tqdm import tqdm

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.growth.grow import Ranked, rank
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import weights_digest
from dflash_mlx.system import cpu_math
from dflash_mlx.system.files import locked, remove_partial, replacing
from dflash_mlx.train.blocks import Array, TextTokens
from dflash_mlx.train.config import DataConfig
from dflash_mlx.train.rows import CorpusRow, conversation_rows, read_rows
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target

CHOICES = 8  # next tokens that are kept
CHOICE = np.dtype([("token", "<u4"), ("probability", "<f4")])

_VERSION = 4  # of the files
_ROWS = 64  # logits ranked at once
_BYTES = 2  # of a bfloat16
_CHUNK = 512  # tokens per target pass
# What a zip file is found to be, be it damaged in its data, its names or its end
_DAMAGED = (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, RuntimeError)
_BUILD_AGAIN = "delete that folder and start again; the features will be computed again"


@dataclass(frozen=True)
class Text(TextTokens):
    """A row of a corpus."""

    row: CorpusRow
    number: int  # in its file
    cache: FeatureCache | None = None  # where its features are, if any
    place: int = 0  # in that

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
    """Rows of corpora."""

    name: str  # tells corpora, targets and taps apart
    texts: list[Text]

    def __len__(self) -> int:
        return len(self.texts)

    def features(self, chosen: Array, starts: Array, length: int) -> mx.array:
        """[S, length, m*d] float32 from token `starts` [S] of texts [S] on; zeros after the end."""
        parts = []
        for i, start in zip(chosen, starts.tolist(), strict=True):
            text = self.texts[i]
            assert text.cache is not None
            part = text.cache.features(text.place)[start : start + length].astype(mx.float32)
            parts.append(mx.pad(part, [(0, length - part.shape[0]), (0, 0)]))
        return mx.stack(parts)

    def tokens(self, chosen: Array, start: int, length: int) -> Array:
        """[S, length] tokens from `start` of texts [S] on; 0 after the end."""
        result = np.zeros((len(chosen), length), np.int64)
        for row, i in zip(result, chosen, strict=True):
            tokens = self.texts[i].tokens[start : start + length]
            row[: len(tokens)] = tokens
        return result

    def split(self, held_out: int) -> tuple[Texts, Texts]:
        """What to train on, and what to measure with: rows 0, held_out, ... of every file.

        Only the greedy ones among these, if there are any, measure: of the others only the first
        draft could be judged. Raises DFlashError when nothing is left to train on.
        """
        train = [text for text in self.texts if text.number % held_out]
        kept = [text for text in self.texts if not text.number % held_out]
        if not train:
            raise DFlashError("the corpora have one row in all", "make a larger corpus")
        greedy = [text for text in kept if text.row.temperature == 0]
        return replace(self, texts=train), replace(self, texts=greedy or kept)


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
    context = pair.target.context_length
    rows = [*rows_of(path, pair)]
    usable = [(i, r) for i, r in enumerate(rows) if len(r.prompt) + len(r.answer) <= context]
    if not usable:
        what = f"{path} has no answer of this model that fits its context of {context} tokens"
        raise DFlashError(what, "name another, or make the corpus again with shorter prompts")
    _tell(path, len(rows) - len(usable), f"longer than the context of {context} tokens")
    if not aux_layers:
        greedy = [Text.by_itself(row, i) for i, row in usable if row.temperature == 0]
        _tell(path, len(usable) - len(greedy), "sampled, and only greedy ones teach this drafter")
        crc = zlib.crc32(b"".join(text.tokens.tobytes() for text in greedy))
        target = weights_digest(pair.target.parameters())[:12]
        return Texts(f"{path.name}:{len(greedy)}-{crc:08x}:{target}", greedy)
    tokens = [row.prompt + row.answer for _, row in usable]
    cache = config.cache or platformdirs.user_cache_path("dflash-chat") / "features"
    place, limit = cache / path.name.partition(".")[0], int(config.cache_gb * 1e9)
    features = FeatureCache(place, tokens, pair.target, aux_layers, limit)
    _tell(path, len(usable) - len(features), "no room for their features; --cache-gb gives more")
    if missing := features.missing:
        for _ in tqdm(features.fill(), f"features of {path.name}", len(missing), unit="row"):
            pass
    kept = enumerate(usable[: len(features)])
    texts = [Text.of(row, number, features, i) for i, (number, row) in kept]
    return Texts(f"{features.folder.name}:{len(texts)}", texts)  # with less room, other texts


def rows_of(path: Path, pair: Pair) -> Iterable[CorpusRow]:
    """The rows of a corpus file, or of a folder of the chat's conversations; of this target."""
    if path.is_dir():
        return conversation_rows(path, pair)
    return read_rows(path, vocabulary_size(pair.target), pair.tokenizer)


def _tell(path: Path, rows: int, why: str) -> None:
    if rows:
        print(f"{path}: rows left out: {rows}, {why}", file=sys.stderr)


class FeatureCache:
    """Features and likely next tokens on disk; DFlashError without room for one sequence."""

    def __init__(
        self,
        place: Path,  # of the folder, whose name goes on with a digest of all but the limit
        sequences: Sequence[Sequence[int]],
        target: Target,
        aux_layers: tuple[int, ...],  # 0-based, m of them
        limit: int,  # bytes of features
    ) -> None:
        self._target, self._aux_layers = target, aux_layers
        ends = np.cumsum([len(tokens) for tokens in sequences], dtype=np.int64)
        bytes_each = len(aux_layers) * hidden_width(target) * _BYTES
        self._sequences = sequences[: int((ends * bytes_each <= limit).sum())]
        if not len(self):
            what = f"{limit} bytes have no room for the features of the first sequence"
            raise DFlashError(what, "give more with --cache-gb")
        weights, tokens = weights_digest(target.parameters()), [*map(list, sequences)]
        identity = (_VERSION, weights, aux_layers, tokens)
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:12]
        self.folder = place.with_name(f"{place.name}-{digest}")

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def missing(self) -> list[int]:
        return [i for i in range(len(self)) if not self._file(i).exists()]

    def fill(self) -> Iterator[int]:
        """Compute what is missing; yields the tokens of every sequence that is done.

        Raises OSError when the disk is full; what is finished stays usable. Raises DFlashError
        while another process is at it.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self._target.kernels.mode
        try:
            with locked(self.folder, wait=False):
                remove_partial(self.folder)
                self._target.tap(self._aux_layers)
                if cpu_math.applies():  # so that NumPy computes attention; no gradient flows here
                    self._target.use_kernels("auto")
                for i in self.missing:
                    kept = self._compute(self._sequences[i])
                    with replacing(self._file(i)) as partial:
                        np.savez(partial, **kept)
                    yield len(self._sequences[i])
        except BlockingIOError:
            what = f"another process is computing the features in {self.folder}"
            raise DFlashError(what, "wait for it") from None
        finally:
            self._target.use_kernels(mode)

    def features(self, i: int) -> mx.array:
        """Features [T, m*d] (bfloat16) of sequence i; DFlashError when they are damaged."""
        return mx.array(self._read(i, "features")).view(mx.bfloat16)

    def choices(self, i: int) -> Array:
        """[T, CHOICES] of CHOICE, as `likeliest` has them, after every token of sequence i."""
        return self._read(i, "choices")

    def _read(self, i: int, name: str) -> Array:
        try:
            with zipfile.ZipFile(self._file(i)) as file:
                data = file.read(f"{name}.npy")  # which the zip file has compared with its CRC-32
            head = io.BytesIO(data)
            np.lib.format.read_magic(head)
            shape, _, kind = np.lib.format.read_array_header_1_0(head)
            return np.frombuffer(data, kind, offset=head.tell()).reshape(shape)
        except (*_DAMAGED, OSError):
            raise DFlashError(f"{self.folder} is damaged at sequence {i}", _BUILD_AGAIN) from None

    def _compute(self, tokens: Sequence[int]) -> dict[str, Any]:
        parts = [*read_pieces(self._target, tokens, self._aux_layers, _CHUNK)]
        features = [np.array(features.view(mx.uint16)) for features, _ in parts]
        choices = [choices for _, choices in parts]
        return {"features": np.concatenate(features), "choices": np.concatenate(choices)}

    def _file(self, i: int) -> Path:
        return self.folder / f"{i}.npz"


def read_pieces(
    target: Target, tokens: Sequence[int], aux_layers: tuple[int, ...], size: int
) -> Iterator[tuple[mx.array, Array]]:
    """Features [n, m*d] (bfloat16) and CHOICE [n, CHOICES] of n tokens after n tokens."""
    cache = target.new_cache()
    for start in range(0, len(tokens), size):
        piece = mx.array(list(tokens[start : start + size]))
        logits, features = target.forward(piece, cache, Block(piece.size), aux_layers)
        assert features is not None
        features = features.astype(mx.bfloat16)
        mx.eval(features, cache.arrays)
        yield features, likeliest(logits)
        cache.commit(range(piece.size))


def hidden_width(target: Target) -> int:
    """Width d of the target's hidden states."""
    return int(target.embedding()(mx.array([0])).shape[-1])


def vocabulary_size(target: Target) -> int:
    """Logits that the target gives, V."""
    return int(target.head()(mx.zeros((1, hidden_width(target)))).shape[-1])


def likeliest(logits: mx.array) -> Array:
    """[T, CHOICES] of CHOICE for logits [T, V], likeliest first, the first the greedy choice.

    Of a vocabulary smaller than CHOICES, the last ones are token 0 with probability 0.
    """
    rows = np.array(logits.astype(mx.float32))
    places = np.arange(len(rows)), rows.argmax(axis=-1)
    rows[places] = np.nextafter(rows[places], np.float32(np.inf))  # of equal ones it is the first
    ranked, result = rank_in_parts(mx.array, rows, CHOICES), np.zeros((len(rows), CHOICES), CHOICE)
    count = ranked.tokens.shape[-1]
    result["token"][:, :count] = ranked.tokens
    result["probability"][:, :count] = np.exp(ranked.logprobs)
    return result


def rank_in_parts(logits: Callable[[Any], mx.array], states: Any, k: int) -> Ranked:
    """The k likeliest tokens of final states [N, d]; a part of their logits at a time."""
    starts = range(0, len(states), _ROWS)
    parts = [rank(logits(states[start : start + _ROWS]), k) for start in starts]
    tokens = np.concatenate([part.tokens for part in parts])
    return Ranked(tokens, np.concatenate([part.logprobs for part in parts]))
