"""`python -m dflash_mlx.train.adapt`: adapt a draft model to its user's own conversations.

Only a low-rank delta is trained, and kept where drafts of answers that it never saw get better by
it. All of it is short pieces of work, so that a program can do it between two answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs
from tqdm import tqdm

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks import adapter
from dflash_mlx.drafters.networks.files import read_json
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_target
from dflash_mlx.models.names import Names, find_names, find_source
from dflash_mlx.train.__main__ import TRAINEES
from dflash_mlx.train.acceptance import measure
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import FeatureCache, Text, Texts, read_pieces, rows_of
from dflash_mlx.train.rows import conversation_rows
from dflash_mlx.train.trainee import START_FROM, Trainee
from dflash_mlx.train.trainer import Trainer

PROGRAM = "dflash_mlx.train.adapt"
HELD_OUT, LEAST = 10, 4  # one answer of so many decides, and so many have to
_LONGEST = 768  # tokens of a row; the beginning of a longer prompt is left out
_READ, _MEASURED = 16, 4  # tokens that a piece reads, and blocks that it measures
_MEMORY = 256e6  # bytes of features; older answers are left out
_STEPS = 6  # for each answer, which cost nothing on other texts
_SURE = 2.0  # standard errors that drafts must get better by
_TRAINING: Any = dict(
    sequences=1, anchors=6, short_share=0.0, draft_vocabulary=4096, learning_rate=3e-4, warmup=50
)
Pieces = Generator[str, None, Any]


class Adaptation:
    """One adaptation, from reading answers to a delta that is kept or thrown away.

    `step` belongs on the thread that owns MLX, between two answers. An answer that arrives waits
    for the end of one piece; where nobody is typing when it is called, for nothing.
    """

    def __init__(self, pair: Pair, drafter: Path, rows: Iterable[Any], minutes: float = 0) -> None:
        """rows: of a corpus, the newest first. minutes: of training, 0 for a few steps a row."""
        self.told, self.kept = "", False  # what became of it
        self.file = adapter.file_of(drafter, pair.target.name)
        config = TrainConfig(minutes=minutes, **_TRAINING) if minutes else None
        self._pieces = self._run(pair, drafter, rows, config)

    def step(self) -> str:
        """Do the next piece: what it is, "" where all is done; DFlashError for too few answers."""
        return next(self._pieces, "")

    def _run(
        self, pair: Pair, drafter: Path, rows: Iterable[Any], config: TrainConfig | None
    ) -> Pieces:
        trainee = open_trainee(drafter, pair)
        yield "opening"
        adapter.attach(self.file, trainee.network)
        texts = yield from _read(pair, trainee.aux_layers, rows)
        train, held_out = texts.split(HELD_OUT) if len(texts) else (texts, texts)
        if len(held_out) < LEAST:
            what = f"{len(texts)} answers of {pair.target.name} are too few to learn from"
            raise DFlashError(what, f"try again after some {2 * HELD_OUT * LEAST}")
        config = config or TrainConfig(steps=_STEPS * len(train), **_TRAINING)
        trainer = Trainer(trainee, train, config)
        before = yield from _measure(trainee, held_out)
        for _ in trainer.losses():
            yield f"training, {trainer.progress:.0%}"
        after = yield from _measure(trainee, held_out)
        self.told = f"{before.mean():.2f} to {after.mean():.2f} tokens a round on held-out answers"
        gains = after - before
        if gains.mean() * len(gains) ** 0.5 > _SURE * gains.std(ddof=1):
            adapter.keep(self.file, trainee.network)
            self.kept = True


def _read(pair: Pair, aux_layers: tuple[int, ...], rows: Iterable[Any]) -> Pieces:
    """Texts of the newest rows, as many as there is memory for."""
    texts: list[Text] = []
    cache, size = _InMemory(), 0
    pair.target.tap(aux_layers)
    for row in rows:
        answer, parts = row.answer[: _LONGEST // 2], []
        row = replace(row, prompt=row.prompt[len(answer) - _LONGEST :], answer=answer)
        for part in read_pieces(pair.target, row.prompt + answer, aux_layers, _READ):
            parts.append(part)
            yield f"reading, {len(texts)} answers"
        features, choices = map(list, zip(*parts, strict=True))
        cache.held.append((mx.concatenate(features), np.concatenate(choices)))
        number = zlib.crc32(row.id.encode())  # so that it is held out every time, or never
        texts.append(Text.of(row, number, cache, len(texts)))
        if (size := size + cache.held[-1][0].nbytes) > _MEMORY:
            break
    return Texts("conversations", texts)


class _InMemory(FeatureCache):
    """Features and choices that no disk sees."""

    def __init__(self) -> None:
        self.held: list[tuple[mx.array, Any]] = []

    def _read(self, i: int, name: str) -> Any:
        return self.held[i][name == "choices"]


def _measure(trainee: Trainee, texts: Texts) -> Pieces:
    """[texts] tokens a round of each, over blocks that are evenly spread."""
    found = []
    for text in texts.texts:
        hits = measure(trainee, replace(texts, texts=[text]), anchors=_MEASURED)
        found.append(1 + hits.sum(axis=-1).mean())
        yield f"measuring, {len(found) / len(texts):.0%}"
    return np.array(found)


def open_trainee(folder: Path, pair: Pair) -> Trainee:
    """A drafter folder in training; DFlashError for one that cannot learn from sampled answers."""
    raw = read_json(folder)
    for kind in TRAINEES.values():
        if kind.files.recognises(raw) and (trainee := kind.read(folder, pair.target)).aux_layers:
            return trainee
    what = f"{folder} holds a drafter that reads no layers of its target, or of another family"
    raise DFlashError(what, START_FROM)


def find_drafter(config: PairConfig) -> tuple[Names, Path]:
    """The pair that is meant, and the folder of its drafter; DFlashError where none is known."""
    names = find_names(config)
    if names.drafter is None:
        raise DFlashError(f"no drafter is known for {names.shown}", "name one with --drafter")
    return names, find_source(names.drafter, "drafter", update=False).fetch().here


def main(argv: Sequence[str]) -> None:
    """Adapt, or undo the last adaptation. Raises DFlashError for bad input."""
    parser = cli.Parser(prog=PROGRAM, description="Adapt a draft model to your texts.")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training (default: 5)")
    parser.add_argument("--corpus", type=Path, action="append", help="other texts than the chat's")
    parser.add_argument("--undo", action="store_true", help="go back to before the last adaptation")
    cli.add_options(parser, PairConfig, without=tuple({*ALL_BUT_MODEL} - {"drafter"}))
    asked = parser.parse_args(argv)
    names, folder = find_drafter(cli.read_pair_config(asked))
    if asked.undo:
        adapter.undo(adapter.file_of(folder, names.shown))
        return print("the draft model drafts as before the last adaptation")
    pair, own = load_target(names.model), platformdirs.user_data_path("dflash-chat")
    rows: Iterable[Any] = conversation_rows(own / "conversations", pair)  # there may be none yet
    if asked.corpus:
        rows = (row for path in asked.corpus for row in rows_of(path, pair))
    adaptation = Adaptation(pair, folder, rows, asked.minutes)
    for doing in (bar := tqdm(iter(adaptation.step, ""), unit=" pieces")):
        bar.set_postfix_str(doing, refresh=False)
    after = "--adapted drafts with it, --undo goes back" if adaptation.kept else "nothing is kept"
    return print(f"{adaptation.told}; {after}")


if __name__ == "__main__":
    cli.run(main, PROGRAM)
