"""Settings of training and of what it learns from; each is a command-line option as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_mlx.core.config import AUTO, HOTTEST, MOST_ROWS
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import (
    option,
    require,
    require_least,
    require_positive,
    require_possible,
)

TRAIN_MODES = ("dflash", "variable-prefix", "specdiff", "eagle3")
STARTS = ("target", "random")
LOSSES = ("dpace", "decay")
ANCHOR_LAWS = ("even", "starts")


def _anchor_law() -> Any:
    return option(
        "even",
        "which blocks: at every token as often, or more where rounds begin more often (starts)",
        choices=ANCHOR_LAWS,
    )


def _prefix_base() -> Any:
    what = "variable-prefix: each visible token more is so many times as likely"
    return option(0.8, what, type=float)


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained."""

    mode: str = option("dflash", "which drafter to train", choices=TRAIN_MODES)
    init: str | None = option(
        None, "drafter to start from: a Hugging Face id or a local folder (default: a new one)"
    )
    start: str = option(
        "target", "a new drafter starts as the target's last layers, or random", choices=STARTS
    )
    layers: int | None = option(None, "layers of a new drafter (default: 3; eagle3: 1)", type=int)
    taps: int | None = option(None, "target layers it reads (default: 5; eagle3: 3)", type=int)
    block_size: int | None = option(
        None, "tokens per block, the anchor included (default: 8, or those of --init)", type=int
    )
    minutes: float | None = option(None, "train for so long, over all runs together", type=float)
    steps: int | None = option(None, "train for so many steps, over all runs together", type=int)
    sequences: int = option(8, "sequences per step", type=int)
    anchors: int = option(32, "blocks per sequence and step", type=int)
    anchor_law: str = _anchor_law()
    short_share: float = option(
        0.5, "share of the steps that train on blocks of half the size, 0 to 1", type=float
    )
    draft_vocabulary: int | None = option(
        None, "train on the logits of so many frequent tokens (default: a quarter)", type=int
    )
    loss: str = option("dpace", "how positions in a block are weighted", choices=LOSSES)
    soft: float = option(
        0.5, "how much of every label is the target's own distribution, 0 to 1", type=float
    )
    tau: float = option(4.0, "decay loss: positions until the weight is 1/e", type=float)
    alpha: float = option(0.5, "dpace loss: smoothing of the confidences", type=float)
    prefix_base: float = _prefix_base()
    least_prefix: int = option(
        0, "variable-prefix: tokens behind the anchor that are visible at least", type=int
    )
    reveal_share: float = option(
        0.25, "specdiff: share of the blocks that show some of their tokens, 0 to 1", type=float
    )
    learning_rate: float = option(8e-4, "AdamW's peak", type=float)
    warmup: int = option(100, "steps until the peak", type=int)
    weight_decay: float = option(0.01, "AdamW's decay of the weights", type=float)
    clip: float = option(1.0, "largest norm of a gradient", type=float)
    held_out: int = option(50, "keep every so many-th row of a corpus for measuring", type=int)
    evaluate_minutes: float = option(5.0, "minutes between measurements and saves", type=float)
    seed: int = option(0, "decides anchors, prefixes and order", type=int)

    def __post_init__(self) -> None:
        require_possible(self)
        choices = {"mode": TRAIN_MODES, "start": STARTS, "loss": LOSSES, "anchor_law": ANCHOR_LAWS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {', '.join(allowed)}")
        require_least(self, 0, "warmup", "weight_decay", "seed", "least_prefix")
        require_least(self, 1, "layers", "taps", "sequences", "anchors")
        require_least(self, 1, "steps", "draft_vocabulary")
        require_least(self, 2, "held_out")
        block_ok = self.block_size is None or 2 <= self.block_size <= MOST_ROWS
        require(block_ok, "block_size", self.block_size, f"2 to {MOST_ROWS}")
        require_positive(self, "tau", "learning_rate", "clip", "evaluate_minutes", "prefix_base")
        endless_ok = self.minutes is None or self.minutes > 0
        require(endless_ok, "minutes", self.minutes, "a number above 0")
        require(0 < self.alpha <= 1, "alpha", self.alpha, "a number above 0 and up to 1")
        require(0 <= self.short_share <= 1, "short_share", self.short_share, "0 to 1")
        for name in ("soft", "reveal_share"):
            value = getattr(self, name)
            require(0 <= value <= 1, name, value, "0 to 1")
        if (self.minutes is None) == (self.steps is None):
            ends = "no end" if self.steps is None else "two ends"
            raise DFlashError(f"the training has {ends}", "give either --minutes or --steps")


@dataclass(frozen=True)
class SelectorTraining:
    """How a drafter's candidate selector is trained."""

    minutes: float = option(20.0, "train for so long", type=float)
    steps: int | None = option(None, "train for so many steps instead", type=int)
    rank: int = option(32, "columns of the selector's codebooks", type=int)
    top_k: int = option(16, "candidates per position", type=int)
    sequences: int = option(4, "sequences per step", type=int)
    anchors: int = option(32, "blocks per sequence and step", type=int)
    anchor_law: str = _anchor_law()
    draft_vocabulary: int | None = option(
        None, "take candidates from so many frequent tokens (default: a quarter)", type=int
    )
    prefix_base: float = _prefix_base()
    learning_rate: float = option(1e-2, "AdamW's peak", type=float)
    warmup: int = option(50, "steps until the peak", type=int)
    weight_decay: float = 0.01  # AdamW's
    clip: float = 1.0  # largest norm of a gradient
    held_out: int = option(50, "keep every so many-th row of a corpus for measuring", type=int)
    seed: int = option(0, "decides first weights, anchors and order", type=int)

    def __post_init__(self) -> None:
        require_possible(self)
        laws = ", ".join(ANCHOR_LAWS)
        require(self.anchor_law in ANCHOR_LAWS, "anchor_law", self.anchor_law, f"one of {laws}")
        require_least(self, 0, "warmup", "seed")
        require_least(self, 1, "rank", "sequences", "anchors", "steps", "draft_vocabulary")
        require_least(self, 2, "top_k", "held_out")
        require_positive(self, "minutes", "learning_rate", "prefix_base")


@dataclass(frozen=True)
class CorpusConfig:
    """How the target's own answers are collected, as training data for drafters."""

    greedy_share: float = option(0.5, "share of prompts answered greedily, 0 to 1", type=float)
    temperature: float = option(0.6, "of the other answers", type=float)
    top_p: float = option(0.95, "of the other answers", type=float)
    max_tokens: int = option(220, "cut answers after this many tokens", type=int)
    batch_size: int = option(128, "answers decoded at once", type=int)
    method: str = option(
        AUTO,
        "how tokens are drafted meanwhile, which changes no answer: none is plain decoding, auto "
        "what the model and its drafter are best used with",
    )
    seed: int = option(0, "decides the order, which answers are greedy, and every draw", type=int)
    limit: int | None = option(None, "answer only the first N prompts of that order", type=int)
    system: str | None = option(None, "system prompt")
    self_prompt: int | None = option(
        None, "let the model write N user turns itself and answer those", type=int
    )
    opening: tuple[str, ...] = option(
        (), "how a user turn begins; may be given several times, taken in turn", action="append"
    )
    self_temperature: float = option(0.9, "of the user turns that the model writes", type=float)
    self_top_p: float = option(0.95, "of the user turns that the model writes", type=float)
    self_max_tokens: int = option(200, "drop user turns that are longer", type=int)

    def __post_init__(self) -> None:
        require_possible(self)
        require(0 <= self.greedy_share <= 1, "greedy_share", self.greedy_share, "0 to 1")
        for name in ("temperature", "self_temperature"):
            value = getattr(self, name)
            require(0 < value <= HOTTEST, name, value, f"a number above 0 and up to {HOTTEST:g}")
        for name in ("top_p", "self_top_p"):
            value = getattr(self, name)
            require(0 < value <= 1, name, value, "a number above 0 and up to 1")
        require_least(self, 1, "max_tokens", "batch_size", "limit", "self_prompt")
        require_least(self, 1, "self_max_tokens")
        require(0 <= self.seed < 2**32, "seed", self.seed, "a whole number from 0 to 4294967295")
        require(not isinstance(self.opening, str), "opening", self.opening, "a tuple of texts")
