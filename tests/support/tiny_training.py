"""A tiny target, answers of its own, and drafters for it: what the tests of training share."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.eagle3.checkpoint import LAYERS_READ
from dflash_mlx.drafters.networks.files import parameters_of, read_json
from dflash_mlx.models.load import load_target
from dflash_mlx.train.__main__ import TRAINEES, main
from dflash_mlx.train.acceptance import hits_at
from dflash_mlx.train.blocks import Array
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import FeatureCache, Text, Texts
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.paired import EagleTrainee, HeadTrainee
from dflash_mlx.train.rows import CorpusHeader, CorpusRow, tokenizer_fingerprint
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.train.trainer import Trainer
from dflash_mlx.verifier.model import Target
from support import reference_mtp
from support.decoding import answer_rounds as answer
from support.families import VOCAB_SIZE, make_model
from support.masked_formats import tensors as masked_tensors
from support.models import write_model
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash import tiny_drafter_config as drafter_config
from support.reference_eagle3 import ours as eagle

TAPS = (0, 2)
WIDTH = 64
CONTEXT = 96


@cache
def tiny_target() -> Target:
    """The tiny llama."""
    return Target(make_model("llama"), CONTEXT, "tiny")


@cache
def greedy_rows(count: int, answer: int, seed: int = 0) -> tuple[CorpusRow, ...]:
    """Random prompts and what the tiny target answers to them."""
    rng = np.random.default_rng([seed, count])
    tokens = mx.array(rng.integers(VOCAB_SIZE, size=(count, 6)))
    for _ in range(answer):
        best = mx.argmax(tiny_target().model(tokens)[:, -1:], axis=-1)
        tokens = mx.concatenate([tokens, best.astype(tokens.dtype)], axis=1)
    return tuple(
        CorpusRow(f"row-{i}", "tiny", tuple(text[:6]), tuple(text[6:]), 0.0)
        for i, text in enumerate(tokens.tolist())
    )


def sampled_row(name: str, row: CorpusRow, seed: int = 0) -> CorpusRow:
    """`row` with two tokens of its answer replaced, as a sampler might have chosen them."""
    rng = np.random.default_rng(seed)
    answer = list(row.answer)
    for at in rng.choice(len(answer), 2, replace=False):
        answer[at] = (answer[at] + 1) % VOCAB_SIZE
    return CorpusRow(name, row.category, row.prompt, tuple(answer), 0.6)


def write_corpus(file: Path, rows: Sequence[CorpusRow], header: CorpusHeader) -> Path:
    """A corpus file."""
    file.write_text("".join(line.as_line() + "\n" for line in (header, *rows)), encoding="utf-8")
    return file


def make_trainee(raw: dict[str, Any] | None = None, seed: int = 0) -> DFlashTrainee:
    """The drafter of a config.json with random weights."""
    trainee = DFlashTrainee.of(drafter_config() if raw is None else raw, tiny_target())
    weights = random_drafter(trainee.raw, seed)
    trainee.network.load_weights([(name, mx.array(array)) for name, array in weights.items()])
    return trainee


def texts_of(folder: Path, rows: Sequence[CorpusRow]) -> Texts:
    """`rows` with the tiny target's features, kept in `folder`."""
    tokens = [row.prompt + row.answer for row in rows]
    features = FeatureCache(folder, tokens, tiny_target(), TAPS, 1 << 30)
    for _ in features.fill():
        pass
    return Texts(folder.name, [Text.of(row, i, features, i) for i, row in enumerate(rows)])


def eagle_of(block_size: int = 5, **changes: Any) -> EagleTrainee:
    """With random weights that are no longer small."""
    raw = {**eagle(**changes), "eagle_config": {LAYERS_READ: list(TAPS)}, "block_size": block_size}
    trainee = EagleTrainee.fresh(raw, tiny_target(), 0)
    larger = [(n, a * 8 if a.ndim > 1 else a) for n, a in parameters_of(trainee.network).items()]
    trainee.network.load_weights(larger)
    return trainee


def head_of(block_size: int = 5, **changes: Any) -> HeadTrainee:
    """With random weights, for the tiny target's last layer."""
    raw = reference_mtp.ours(block_size=block_size, **changes)
    trainee = HeadTrainee.of(raw, tiny_target())
    weights = reference_mtp.random_head(reference_mtp.text_of(raw))
    trainee.network.load_weights([(name, mx.array(array)) for name, array in weights.items()])
    return trainee


class OfLastLayer(Texts):
    """Texts with the features of the last layer that was read alone."""

    def features(self, *which: Any) -> mx.array:
        return super().features(*which)[..., -WIDTH:]


def seen_by(trainee: Trainee, texts: Texts) -> Texts:
    """`texts`, with features of TAPS, as a drafter reads them."""
    return OfLastLayer(**vars(texts)) if isinstance(trainee, HeadTrainee) else texts


def masked_of(raw: dict[str, Any]) -> SpecDiffTrainee:
    """The masked diffusion drafter of a config.json with random weights."""
    trainee = SpecDiffTrainee.of(raw, tiny_target())
    trainee.network.load_weights([(n, mx.array(t)) for n, t in masked_tensors(raw).items()])
    return trainee


def trainer_of(trainee: Trainee, texts: Texts, **settings: Any) -> Trainer:
    """`settings` are TrainConfig's."""
    given = {"steps": 10, "sequences": 2, "anchors": 4, "draft_vocabulary": VOCAB_SIZE, "warmup": 2}
    modes = {EagleTrainee: "eagle3", HeadTrainee: "mtp", SpecDiffTrainee: "specdiff"}
    mode = modes.get(type(trainee), "dflash")
    return Trainer(trainee, texts, TrainConfig(**{"mode": mode, **given, **settings}))


def make_trainer(texts: Texts, raw: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    """A trainer of a random drafter."""
    return trainer_of(make_trainee(raw), texts, **settings)


@cache
def corpus_rows() -> tuple[CorpusRow, ...]:
    """Six greedy answers and a sampled one."""
    rows = greedy_rows(6, 20)
    return (*rows, sampled_row("sampled", rows[1]))


def write_target(folder: Path) -> Path:
    """The tiny target with a tokenizer that has a mask token."""
    write_model(folder, make_model("llama"), max_position_embeddings=CONTEXT)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mask_token": "$"}))
    return folder


class Place:
    """A target, a corpus and a drafter in a folder, and commands that train there."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.out, self.cache = root / "out", root / "cache"
        self.header = CorpusHeader(
            "tiny", VOCAB_SIZE, tokenizer_fingerprint(load_target(str(model)).tokenizer)
        )
        self.corpus = self.write("corpus.jsonl", corpus_rows())

    def write(self, name: str, rows: Any, header: CorpusHeader | None = None) -> Path:
        return write_corpus(self.root / name, rows, header or self.header)

    def words(self, **options: object) -> list[str]:
        """A command line; `options` replaces and adds, None leaves out."""
        given = {"out": self.out, "steps": 4, "sequences": 2, "anchors": 4, "layers": 1}
        return self.data(**{**given, "held_out": 3, **options})

    def data(self, **options: object) -> list[str]:
        """A command line of model, corpus and cache alone; `options` as for `words`."""
        given = {"model": self.model, "corpus": self.corpus, "cache": self.cache, **options}
        words = [(f"--{k.replace('_', '-')}", str(v)) for k, v in given.items() if v is not None]
        return [word for pair in words for word in pair]

    def train(self, **options: object) -> None:
        """Run the trainer's command line."""
        main(self.words(**options))

    def drafter(self, **changes: Any) -> Path:
        """A folder with a random drafter of that config."""
        raw = drafter_config(**changes)
        return write_drafter_folder(self.root / "drafter", raw, random_drafter(raw))

    def read(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The drafter in the out folder: its weights and its config.json."""
        trainee = DFlashTrainee.read(self.out, tiny_target())
        return arrays_of(trainee.network), trainee.raw

    def history(self) -> list[dict[str, Any]]:
        """The measurements in the out folder."""
        lines = (self.out / "history.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def decoded(target: Any, drafter: Any, row: CorpusRow) -> list[tuple[int, ...]]:
    """The tokens of every round of a greedy answer as long as the row's."""
    rounds = answer(target, drafter, row.prompt, DecodeConfig(max_tokens=len(row.answer)))
    return [round_.accepted.tokens for round_ in rounds]


def _in_bfloat16(target: Target) -> Target:
    """One whose features are rounded as those on disk, which decides between close drafts."""
    result, forward = copy(target), target.forward

    def rounded(*given: Any) -> tuple[mx.array, mx.array | None]:
        logits, features = forward(*given)
        if features is not None:
            features = features.astype(mx.bfloat16).astype(mx.float32)
        return logits, features

    result.forward = rounded  # type: ignore[method-assign]
    return result


def read_trainee(folder: Path, target: Target) -> Trainee:
    """A drafter of the family that its config.json tells."""
    raw = read_json(folder)
    kind = next(kind for kind in TRAINEES.values() if kind.files.recognises(raw))
    return kind.read(folder, target)


def walk(trainee: Trainee, texts: Texts) -> list[Array]:
    """[rounds, B - 1] for each text: the rounds of greedy decoding behind its first token."""
    walked = []
    for i, text in enumerate(texts.texts):
        hits = hits_at(trainee, texts, np.array([i]), text.anchors[None, 1:])[0]
        rounds, place = [], 0
        while place < len(hits):
            rounds.append(hits[place])
            place += 1 + int(hits[place].sum())
        walked.append(np.stack(rounds))
    return walked


def assert_decoding_accepts_what_was_measured(
    trainee: Trainee, drafter: Any, rows: Sequence[CorpusRow], texts: Texts, least: float
) -> None:
    """Rounds of decoding are those of a walk over the texts; least: tokens per round."""
    answers = [decoded(_in_bfloat16(tiny_target()), drafter, row) for row in rows]
    assert [sum(rounds, ()) for rounds in answers] == [row.answer for row in rows]
    lengths = [len(tokens) for _, *rounds in answers for tokens in rounds]
    over = 1 + np.concatenate(walk(trainee, texts)).sum(axis=-1) - lengths
    assert over.min() == 0 and over.max() <= 1  # a walk counts the token behind an answer's last
    assert over.sum() <= len(rows) and np.mean(lengths) > least


def arrays_of(module: nn.Module) -> dict[str, np.ndarray]:
    """What a network holds, by name."""
    flat: Any = tree_flatten(module.parameters())
    return {name: np.array(array) for name, array in flat}


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


class LetterTokenizer:
    """A tokenizer as far as corpora need one: a token for every letter."""

    def __init__(self, letters: str) -> None:
        self._letters = letters

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self._letters)}


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes; a write is cut there, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
