"""Every setting with its default and its help text; command lines are generated from these."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_mlx.errors import DFlashError

METHODS = ("none", "dflash")


def option(default: Any, help: str, **argparse_keywords: Any) -> Any:
    """A dataclass field that carries its own help text and argparse keywords."""
    return field(default=default, metadata={"help": help, "argparse": argparse_keywords})


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise DFlashError(f"{name} is {value!r}", f"choose {allowed}")


@dataclass(frozen=True)
class PairConfig:
    """Which target and which drafter to load."""

    model: str | None = option(
        None, "target: a Hugging Face id or a local folder (default: the embedded SmolLM2-135M)"
    )
    drafter: str | None = option(
        None, "drafter: a Hugging Face id or a local folder (default: the one that fits the model)"
    )


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen from the target's logits; temperature 0 is greedy."""

    temperature: float = option(0.0, "0 is greedy, higher is more random", type=float)
    top_p: float = option(1.0, "keep the smallest set with this probability mass", type=float)
    top_k: int = option(0, "keep the k most likely tokens, 0 keeps all", type=int)
    min_p: float = option(0.0, "drop tokens below this share of the likeliest one", type=float)
    repetition_penalty: float = option(1.0, "divide logits of recent tokens, 1 is off", type=float)
    repetition_context: int = option(20, "how many recent tokens are penalised", type=int)
    seed: int | None = option(None, "random seed (default: a new one each time)", type=int)

    def __post_init__(self) -> None:
        finite = 0 <= self.temperature < float("inf")
        _require(finite, "temperature", self.temperature, "a finite number, 0 or above")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0 and up to 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or a positive whole number")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number from 0 to 1")
        positive = 0 < self.repetition_penalty < float("inf")
        _require(positive, "repetition_penalty", self.repetition_penalty, "a number above 0")
        _require(
            self.repetition_context >= 1,
            "repetition_context",
            self.repetition_context,
            "a positive whole number",
        )
        seed_ok = self.seed is None or 0 <= self.seed < 2**32
        _require(seed_ok, "seed", self.seed, "a whole number from 0 to 4294967295")

    def with_seed(self) -> SamplingConfig:
        """These settings with a seed, a random one if none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))


@dataclass(frozen=True)
class DecodeConfig:
    """How one answer is decoded."""

    method: str = option(
        "dflash", "how tokens are drafted; none is plain decoding", choices=METHODS
    )
    block_size: int | None = option(
        None, "tokens per draft block, the anchor included (default: the drafter's)", type=int
    )
    max_tokens: int = option(512, "stop after this many tokens", type=int)
    stop: tuple[str, ...] = option(
        (), "stop before this text appears; may be given several times", action="append"
    )
    prefill_step: int = option(512, "prompt tokens per target pass", type=int)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        _require(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        block_ok = self.block_size is None or self.block_size >= 2
        _require(block_ok, "block_size", self.block_size, "2 or more")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(self.prefill_step >= 1, "prefill_step", self.prefill_step, "1 or more")
        _require(not isinstance(self.stop, str), "stop", self.stop, "a tuple of texts")
        _require("" not in self.stop, "stop", "", "a text of at least one character")
