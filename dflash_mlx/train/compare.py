"""`python -m dflash_mlx.train.compare`: which drafts of texts are right, without decoding."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import markdown
from dflash_mlx.drafters.networks.files import read_json
from dflash_mlx.models.load import load_target
from dflash_mlx.models.names import resolve_folder
from dflash_mlx.system.files import write_report
from dflash_mlx.train.blocks import Array, cut_blocks
from dflash_mlx.train.config import DataConfig
from dflash_mlx.train.data import Texts, read_texts
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.paired import EagleTrainee, HeadTrainee
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.verifier.model import Target

PROGRAM = "dflash_mlx.train.compare"
TRAINEES: dict[str, type[Trainee]] = {  # by `TrainConfig.mode`
    "dflash": DFlashTrainee,
    "variable-prefix": DFlashTrainee,
    "specdiff": SpecDiffTrainee,
    "eagle3": EagleTrainee,
    "mtp": HeadTrainee,
}
ANCHORS = 16  # per text
_TEXTS = 8  # drafted for at once
_CHUNK = 2048  # block tokens drafted at once


@dataclass(frozen=True)
class Acceptance:
    """Which drafts of some texts were right."""

    by_text: list[Array]  # [blocks, B - 1 - prefix] each, 1 where this and all earlier ones are

    @property
    def hits(self) -> Array:
        return np.concatenate(self.by_text)

    def of(self, chosen: Iterable[int]) -> Acceptance:
        return Acceptance([self.by_text[i] for i in chosen])

    @property
    def by_position(self) -> list[float]:
        """Share of blocks whose first k drafts are all right, k = 1, 2, ..."""
        return [float(share) for share in self.hits.mean(axis=0)]

    @property
    def tokens_per_round(self) -> float:
        """1 + the mean number of leading drafts that are right."""
        return 1 + float(self.hits.sum(axis=-1).mean())


def in_words(by_position: Iterable[float], by_prefix: Sequence[float]) -> str:
    """Acceptance for people: 2.260 tokens/round | by position .763 .497 ..."""
    shares = " ".join(f"{share:.3f}".lstrip("0") for share in by_position)
    told = f"{1 + by_prefix[0]:.3f} tokens/round | by position {shares}"
    lengths = " ".join(f"{length:.2f}" for length in by_prefix)
    return f"{told} | continuation by prefix {lengths}" if len(by_prefix) > 1 else told


def hits_at(
    trainee: Trainee, texts: Texts, chosen: Array, anchors: Array, prefix: int = 0
) -> Array:
    """[S, A, B - 1 - prefix] for blocks at `anchors` [S, A] of the texts `chosen` [S].

    Teacher-forced and greedy: a draft is right when it is the target's choice and all before it
    are. `prefix` true tokens are visible after the anchor. In sampled texts a draft counts as
    wrong behind the first token that is not the target's choice.
    """
    size, prefixes = trainee.config.block_size, np.full(anchors.shape, prefix)
    blocks = cut_blocks(texts.texts, chosen, anchors, size, prefixes)
    states = trainee.states(*trainee.inputs(texts, blocks))
    drafts = trainee.drafts(states[:, :, prefix + 1 :], blocks.tokens[..., prefix:-1])
    right = (drafts == blocks.labels[..., prefix + 1 :]) & blocks.supervised[..., prefix + 1 :]
    return np.cumprod(right, axis=-1)


def measure(trainee: Trainee, texts: Texts, prefix: int = 0) -> Acceptance:
    """Drafts at 16 anchors of every text, evenly spread where the prefix leaves one to draft."""
    hits: list[Array] = []
    for start in range(0, len(texts), _TEXTS):
        chosen, parts = np.arange(start, min(start + _TEXTS, len(texts))), []
        for i in chosen:
            anchors = texts.texts[i].anchors
            anchors = anchors[: max(1, len(anchors) - prefix)]
            parts.append(anchors[np.linspace(0, len(anchors) - 1, ANCHORS).round().astype(int)])
        hits += list(hits_at(trainee, texts, chosen, np.stack(parts), prefix))
    return Acceptance(hits)


def measure_drafts(
    trainee: Trainee, texts: Texts, variable_prefix: bool
) -> tuple[list[float], list[float]]:
    """`by_position` without a prefix, and `by_prefix` for every prefix, or for 0 alone."""
    prefixes = range(trainee.config.block_size - 1 if variable_prefix else 1)
    results = [measure(trainee, texts, prefix) for prefix in prefixes]
    return results[0].by_position, [result.tokens_per_round - 1 for result in results]


def walk(trainee: Trainee, texts: Texts) -> Acceptance:
    """The rounds of greedy decoding over greedy texts, behind each answer's first token."""
    step, walked = max(1, _CHUNK // trainee.config.block_size), []
    for i, text in enumerate(texts.texts):
        anchors, chosen = text.anchors[None, 1:], np.array([i])
        parts = [anchors[:, start : start + step] for start in range(0, anchors.size, step)]
        nothing = np.zeros((0, trainee.config.block_size - 1), np.int64)
        found = [hits_at(trainee, texts, chosen, part)[0] for part in parts]
        hits = np.concatenate(found or [nothing])
        rounds, place = [], 0
        while place < len(hits):
            rounds.append(hits[place])
            place += 1 + int(hits[place].sum())
        walked.append(np.stack(rounds) if rounds else nothing)
    return Acceptance(walked)


def main(argv: Sequence[str]) -> None:
    """Print a table. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    cli.check_output(arguments.json)
    data = cli.read_options(arguments, DataConfig)
    pair = load_target(cli.read_pair_config(arguments).model)
    folders = {name: resolve_folder(name, "drafter") for name in arguments.drafter}
    drafters = {name: read_trainee(folder, pair.target) for name, folder in folders.items()}
    aux_layers = {drafter.aux_layers for drafter in drafters.values()}
    if len(aux_layers) > 1:
        raise DFlashError("the drafters read different layers", "compare them one by one")
    texts = read_texts(data, pair, aux_layers.pop())
    if not arguments.all_rows:
        _, texts = texts.split(arguments.held_out)
    if not len(texts.greedy()):
        raise DFlashError("the rows are all sampled", "compare with greedy answers")
    figures = {name: by_category(drafter, texts.greedy()) for name, drafter in drafters.items()}
    print(table(figures))
    if arguments.json is not None:
        write_report(arguments.json, json.dumps(figures, indent=1) + "\n")


def read_trainee(folder: Path, target: Target) -> Trainee:
    """An existing drafter of any family; DFlashError for one that cannot be trained here."""
    raw = read_json(folder)
    kinds = TRAINEES.values() if isinstance(raw, dict) else ()
    found = (kind for kind in kinds if kind.files.recognises(raw))
    if (kind := next(found, None)) is None:
        raise DFlashError(f"{folder} holds no drafter that can be trained", "choose another one")
    return kind.read(folder, target)


def by_category(drafter: Trainee, texts: Texts) -> dict[str, Any]:
    """The figures of all texts, and of each category that the corpora name."""
    rounds = walk(drafter, texts)
    prefixes = range(drafter.config.block_size - 1)
    continuations = [measure(drafter, texts, n) for n in prefixes]
    groups = {"all": list(range(len(texts)))}
    for i, text in enumerate(texts.texts):
        if text.row.category:
            groups.setdefault(text.row.category, []).append(i)
    result = {}
    for category, chosen in groups.items():
        walked = rounds.of(chosen)
        result[category] = {
            "texts": len(chosen),
            "rounds": len(walked.hits),
            "tokens_per_round": walked.tokens_per_round,
            "by_position": walked.by_position,
            "by_prefix": [measured.of(chosen).tokens_per_round - 1 for measured in continuations],
        }
    return result


def table(figures: dict[str, Any]) -> str:
    """Markdown: a row per drafter and category."""
    width = max(len(part["all"]["by_prefix"]) for part in figures.values())
    head = ["drafter", "texts", "tokens/round", *(f"prefix {n}" for n in range(width))]
    rows = [
        [
            f"{name} ({category})",
            str(part["texts"]),
            f"{part['tokens_per_round']:.3f}",
            *(f"{length:.2f}" for length in part["by_prefix"]),
        ]
        for name, parts in figures.items()
        for category, part in parts.items()
    ]
    return markdown(head, rows)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Compare drafters on greedy texts of the target: tokens per round of "
        "decoding, and the mean number of right drafts after a kept prefix of 0, 1, ... tokens.",
    )
    result.add_argument(
        "--drafter", required=True, action="append", help="may be given several times"
    )
    rows = result.add_mutually_exclusive_group()
    rows.add_argument("--held-out", type=int, default=50, help="as in training (default: 50)")
    rows.add_argument("--all-rows", action="store_true", help="use every row of the corpora")
    result.add_argument("--json", type=Path, help="write all figures to this file")
    cli.add_options(result, DataConfig, PairConfig, without=ALL_BUT_MODEL)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
