"""Settings of training and of what it learns from; each is a command-line option as well."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.core.config import AUTO, HOTTEST, MOST_ROWS
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import ABOVE_0, Settings, option

ENDLESS = float("inf")
TRAIN_MODES = ("dflash", "variable-prefix", "specdiff", "eagle3", "mtp")


def _count(default: int | None, help: str, least: int = 1, most: int | None = None) -> Any:
    return option(default, help, type=int, least=least, most=most)


def _number(default: float | None, help: str, most: float | None = None) -> Any:
    return option(default, help, type=float, least=ABOVE_0, most=most)


def _share(default: float, help: str) -> Any:
    return option(default, help + ", 0 to 1", type=float, least=0, most=1)


@dataclass(frozen=True)
class StepConfig(Settings):
    """What all trainings have in common: their length, their blocks, and AdamW."""

    weight_decay: float = option(0.01, "AdamW's decay of the weights", type=float, least=0)
    clip: float = _number(1.0, "largest norm of a gradient")
    minutes: float | None = _number(None, "train for this long, over all runs together", ENDLESS)
    steps: int | None = _count(None, "train for this many steps, over all runs together")
    sequences: int = _count(8, "sequences per step")
    anchors: int = _count(32, "blocks per sequence and step")
    anchor_law: str = option(
        "even",
        "which blocks: at every token as often, or more where rounds begin more often (starts)",
        choices=("even", "starts"),
    )
    draft_vocabulary: int | None = _count(
        None, "train on the logits of this many frequent tokens (default: a quarter)"
    )
    prefix_base: float = _number(
        0.8, "variable-prefix: one more visible token is this many times as likely"
    )
    learning_rate: float = _number(8e-4, "AdamW's peak")
    warmup: int = _count(100, "steps until the peak", 0)
    held_out: int = _count(50, "keep every Nth row of a corpus for measuring", 2)
    seed: int = _count(0, "decides first weights, anchors, prefixes and order", 0)


@dataclass(frozen=True)
class TrainConfig(StepConfig):
    """How a drafter is trained."""

    mode: str = option("dflash", "which drafter to train", choices=TRAIN_MODES)
    init: str | None = option(
        None, "drafter to start from: a Hugging Face id or a local folder (default: a new one)"
    )
    start: str = option(
        "target",
        "a new drafter starts as the target's last layers, or random",
        choices=("target", "random"),
    )
    layers: int | None = _count(None, "layers of a new drafter (default: 3; eagle3 and mtp: 1)")
    taps: int | None = _count(None, "target layers it reads (default: 5; eagle3: 3; mtp: the last)")
    block_size: int | None = _count(
        None, "tokens per block, the anchor included (default: 8, or those of --init)", 2, MOST_ROWS
    )
    short_share: float = _share(0.5, "share of the steps that train on blocks of half the size")
    loss: str = option("dpace", "how positions in a block are weighted", choices=("dpace", "decay"))
    soft: float = _share(0.5, "how much of every label is the target's own distribution")
    tau: float = _number(4.0, "decay loss: positions until the weight is 1/e")
    alpha: float = _number(0.5, "dpace loss: smoothing of the confidences", 1)
    least_prefix: int = _count(0, "variable-prefix: fewest visible tokens after the anchor", 0)
    reveal_share: float = _share(
        0.25, "specdiff: share of the blocks that show some of their tokens"
    )
    evaluate_minutes: float = _number(5.0, "minutes between measurements and saves")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.minutes is None) == (self.steps is None):
            ends = "no end" if self.steps is None else "two ends"
            raise DFlashError(f"the training has {ends}", "give either --minutes or --steps")


@dataclass(frozen=True)
class SelectorTraining(StepConfig):
    """How a drafter's candidate selector is trained; where steps are given, they end it."""

    minutes: float = _number(20.0, "train for so long")
    rank: int = _count(32, "columns of the selector's codebooks")
    top_k: int = _count(16, "candidates per position", 2)
    sequences: int = _count(4, "sequences per step")
    learning_rate: float = _number(1e-2, "AdamW's peak")
    warmup: int = _count(50, "steps until the peak", 0)


@dataclass(frozen=True)
class DataConfig(Settings):
    """Where texts and features are."""

    corpus: tuple[Path, ...] = option(
        (), "corpus, or folder of chats; may be repeated", action="append", type=Path, required=True
    )
    cache: Path | None = option(
        None,
        "where the target's features are kept (default: with this user's other caches)",
        type=Path,
    )
    cache_gb: float = _number(20, "most gigabytes of features per corpus")


@dataclass(frozen=True)
class CorpusConfig(Settings):
    """How the target's own answers are collected, as training data for drafters."""

    greedy_share: float = _share(0.5, "share of prompts answered greedily")
    temperature: float = _number(0.6, "of the other answers", HOTTEST)
    top_p: float = _number(0.95, "of the other answers", 1)
    max_tokens: int = _count(220, "cut answers after this many tokens")
    batch_size: int = _count(128, "answers decoded at once")
    method: str = option(
        AUTO,
        "how tokens are drafted meanwhile, which changes no answer: none is plain decoding, auto "
        "picks the best for the model and its drafter",
    )
    seed: int = _count(
        0, "decides the order, which answers are greedy, and every draw", 0, 2**32 - 1
    )
    limit: int | None = _count(None, "answer only the first N prompts of that order")
    system: str | None = option(None, "system prompt")
    self_prompt: int | None = _count(
        None, "let the model write N user turns itself and answer those"
    )
    opening: tuple[str, ...] = option(
        (), "how a user turn begins; may be repeated, they are taken in turn", action="append"
    )
    self_temperature: float = _number(0.9, "of the user turns that the model writes", HOTTEST)
    self_top_p: float = _number(0.95, "of the user turns that the model writes", 1)
    self_max_tokens: int = _count(200, "drop user turns that are longer")
