"""Where the time of a training step goes, and how much of it is arithmetic at full speed.

Real steps of the trainer, on a corpus and its features; options are the trainer's:

    .venv/bin/python scripts/profile_training.py --corpus CORPUS --init DRAFTER --steps 10

Every round takes two steps on the same blocks, and runs all of their matrix products once more by
themselves, as plain `a @ b` on float32 arrays of the same shapes. One of the steps is left alone:
its time gives tokens per second and, under the time of the products, the share of the arithmetic
peak. The other is stopped at four places to see its parts. Which comes first alternates, since it
alone may have to fetch features from the disk. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest import mock

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import mlx.core as mx

from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig, TrainConfig
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.models.load import load_target
from dflash_mlx.train import steps, trainee
from dflash_mlx.train.data import add_data_options, feature_place, read_texts
from dflash_mlx.train.start import begin
from dflash_mlx.train.trainer import Batch, Trainer

PARTS = {
    "batch": "choosing and reading the batch",
    "forward": "forward, up to the hidden states",
    "head": "head and cross-entropy, both ways",
    "backward": "backward",
    "update": "clipping and optimiser",
}


# What has to be multiplied


@dataclass(frozen=True)
class Product:
    """`times` a step: `batch` products [m, k] @ [k, n]."""

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    times: int = 1

    @property
    def multiply_adds(self) -> int:
        """In all of them; twice as many floating-point operations."""
        return self.times * self.batch * self.m * self.n * self.k

    @property
    def left_gradient(self) -> Product:
        """[m, n] @ [n, k]: of the first factor."""
        return Product(self.name, self.m, self.k, self.n, self.batch, self.times)

    @property
    def right_gradient(self) -> Product:
        """[k, m] @ [m, n]: of the second factor."""
        return Product(self.name, self.k, self.n, self.m, self.batch, self.times)


@dataclass(frozen=True)
class Shape:
    """A step: S sequences, A blocks of B tokens each, T features, N trained positions, V words."""

    S: int
    A: int
    B: int
    T: int
    N: int
    V: int

    @classmethod
    def of(cls, batch: Batch, trainer: Trainer) -> Shape:
        """Of the arrays of a step."""
        words = len(trainer.vocabulary.tokens)
        return cls(*batch.x.shape[:3], batch.features.shape[1], batch.places.size, words)

    @property
    def tokens(self) -> int:
        """In blocks, anchors included."""
        return self.S * self.A * self.B


def products(config: NetworkConfig, shape: Shape) -> list[Product]:
    """All matrix products of a step, forward and backward.

    Every product has the gradients of both factors, with two exceptions: features are given, so
    `fc` has that of its weight alone, and the head is frozen, so it has that of its input alone.
    The embeddings are given too, but the norm before the first layer has a weight, whose gradient
    needs that of the first projections' inputs. Queries, keys and values are computed, as in
    `train.packed`, for all positions of all blocks, and attention for all features of a sequence,
    also where a mask hides them; only the head is applied to the trained positions alone.
    """
    factors = _layer_products(config, shape)
    width, taps = config.hidden_size, len(config.target_layer_ids)
    features = Product("fc", shape.S * shape.T, width, taps * width)
    head = Product("head", shape.N, shape.V, width)
    backward = [gradient for p in factors for gradient in (p.left_gradient, p.right_gradient)]
    return [features, features.right_gradient, *factors, *backward, head, head.left_gradient]


def _layer_products(config: NetworkConfig, shape: Shape) -> list[Product]:
    """Forward, in every layer."""
    S, A, B, T = shape.S, shape.A, shape.B, shape.T
    d, f, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, G, layers = config.num_attention_heads, config.num_key_value_heads, len(config.layer_windows)
    rows, context, queries = S * A * B, S * T, H // G * B  # of one key head and block

    def product(name: str, m: int, n: int, k: int, batch: int = 1, each: int = 1) -> Product:
        return Product(name, m, n, k, batch, each * layers)

    return [
        product("projections", rows, H * D, d),  # queries
        product("projections", rows, G * D, d, each=2),  # keys and values of the blocks
        product("projections", context, G * D, d, each=2),  # ... and of the features
        product("projections", rows, d, H * D),  # output
        product("attention", A * queries, T, D, batch=S * G),  # scores of the features
        product("attention", A * queries, D, T, batch=S * G),  # ... and their values
        product("attention", queries, B, D, batch=S * A * G),  # scores inside the blocks
        product("attention", queries, D, B, batch=S * A * G),  # ... and their values
        product("MLP", rows, f, d, each=2),  # gate, up
        product("MLP", rows, d, f),  # down
    ]


def time_products(wanted: Sequence[Product]) -> float:
    """Seconds for plain float32 products of these shapes, one after the other."""
    seconds = 0.0
    for product in wanted:
        lead = (product.batch,) if product.batch > 1 else ()
        a = mx.full((*lead, product.m, product.k), 0.5)
        b = mx.full((*lead, product.k, product.n), 0.5)
        mx.eval(a, b)
        started = time.perf_counter()
        for _ in range(product.times):
            mx.eval(a @ b)
        seconds += time.perf_counter() - started
    return seconds


# Where the time goes


@dataclass
class Clock:
    """Seconds of every part of a step."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _last: float = field(default_factory=time.perf_counter)

    def mark(self, part: str, *arrays: Any) -> None:
        """All since the last mark, and what is left of computing `arrays`, was for `part`."""
        mx.eval(*arrays)
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


@contextmanager
def stops(trainer: Trainer, clock: Clock) -> Iterator[None]:
    """Let every step stop the clock between its parts; nothing else about it changes."""

    @mx.custom_function
    def end_of_head(hidden: mx.array) -> mx.array:
        return hidden

    @end_of_head.vjp  # called when the gradients of the hidden states are there
    def end_of_head_vjp(hidden: mx.array, gradient: mx.array, output: mx.array) -> mx.array:
        clock.mark("head", gradient)
        return gradient

    def batch(blocks: Any) -> Batch:
        arrays = make_batch(blocks)
        clock.mark("batch", list(vars(arrays).values()))
        return arrays

    def hidden_states(*inputs: Any) -> mx.array:
        hidden = forward(*inputs)
        clock.mark("forward", hidden)
        return end_of_head(hidden)

    def clip(gradients: Any, limit: float) -> Any:
        clock.mark("backward", gradients)
        return clip_norm(gradients, limit)

    make_batch, forward = trainer.batch, trainee.hidden_states
    clip_norm = steps.optim.clip_grad_norm
    with (
        mock.patch.object(trainer, "batch", batch),
        mock.patch.object(trainee, "hidden_states", hidden_states),
        mock.patch.object(steps.optim, "clip_grad_norm", clip),
    ):
        yield


def stopped_step(trainer: Trainer) -> Clock:
    """One step, and the seconds of its parts."""
    clock = Clock()
    with stops(trainer, clock):
        trainer.train_step()
    clock.mark("update")
    return clock


def plain_step(trainer: Trainer) -> tuple[float, Batch]:
    """One step that nothing stops: its seconds, and its batch."""
    seen: list[Batch] = []
    make_batch = trainer.batch

    def batch(blocks: Any) -> Batch:
        seen.append(make_batch(blocks))
        return seen[0]

    with mock.patch.object(trainer, "batch", batch):
        started = time.perf_counter()
        trainer.train_step()
        return time.perf_counter() - started, seen[0]


@dataclass(frozen=True)
class Round:
    """A plain step, its products by themselves, and the parts of a stopped one on its blocks."""

    seconds: float
    shape: Shape
    wanted: list[Product]
    alone: float
    parts: dict[str, float]

    @property
    def multiply_adds(self) -> int:
        """Of the plain step."""
        return sum(product.multiply_adds for product in self.wanted)


def profile(trainer: Trainer, rounds: int) -> list[Round]:
    """Warm up with a round, then measure."""
    return [profile_round(trainer, i % 2 == 0) for i in range(rounds + 1)][1:]


def profile_round(trainer: Trainer, plain_first: bool) -> Round:
    """Two steps on the same blocks, and their products between them."""
    if plain_first:
        seconds, batch = plain_step(trainer)
    else:
        parts = stopped_step(trainer).seconds
        seconds, batch = _again(trainer, plain_step)
    shape = Shape.of(batch, trainer)
    wanted = products(trainer.trainee.config, shape)
    alone = time_products(wanted)
    if plain_first:
        parts = _again(trainer, stopped_step).seconds
    return Round(seconds, shape, wanted, alone, parts)


def _again(trainer: Trainer, step: Callable[[Trainer], Any]) -> Any:
    """A step on the blocks of the step before."""
    trainer.step -= 1
    return step(trainer)


# What is said


def report(rounds: Sequence[Round]) -> str:
    """All figures, for people."""

    def middle(value: Callable[[Round], float]) -> float:
        return median(value(r) for r in rounds)

    shares = [r.alone / r.seconds for r in rounds]
    lines = [
        f"medians of {len(rounds)} rounds",
        f"{middle(lambda r: r.shape.tokens / r.seconds):10.0f}    block tokens/s",
        f"{middle(lambda r: r.seconds):10.3f} s  a step, of which, in stopped steps,",
    ]
    for part, words in PARTS.items():
        share = middle(lambda r, part=part: r.parts[part] / sum(r.parts.values()))
        lines.append(f"{middle(lambda r, part=part: r.parts[part]):10.3f} s  {share:4.0%} {words}")
    lines.append(f"{middle(lambda r: sum(r.parts.values())):10.3f} s  a stopped step")
    lines.append(
        f"{middle(lambda r: r.multiply_adds) / 1e9:10.3f} e9 multiply-adds in matrix products"
    )
    for name in dict.fromkeys(p.name for p in rounds[0].wanted):
        count = middle(
            lambda r, name=name: sum(p.multiply_adds for p in r.wanted if p.name == name)
        )
        lines.append(f"{count / 1e9:10.3f} e9   {name}")
    lines += [
        f"{middle(lambda r: r.alone):10.3f} s  the same products alone, "
        f"{middle(lambda r: 2e-9 * r.multiply_adds / r.alone):.1f} GFLOP/s",
        f"{median(shares):10.1%}    of the arithmetic peak: products alone / step "
        f"({min(shares):.1%} to {max(shares):.1%})",
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The trainer's options, without those of runs."""
    result = cli.Parser(prog="profile_training", description=str(__doc__).partition("\n")[0])
    add_data_options(result)
    cli.add_options(result, PairConfig, TrainConfig, without=[*ALL_BUT_MODEL, "minutes", "steps"])
    result.add_argument("--steps", type=int, default=10, help="rounds to measure (default: 10)")
    return result


def main(argv: Sequence[str]) -> None:
    """Print where the time goes. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    config = cli.read_options(arguments, TrainConfig)
    pair = load_target(cli.read_pair_config(arguments).model)
    first, place = begin(config, pair), feature_place(arguments)
    texts = read_texts(arguments.corpus, pair, first.config.target_layer_ids, place)
    trainer = Trainer(first, texts.split(config.held_out)[0], config)
    print(report(profile(trainer, arguments.steps)))


if __name__ == "__main__":
    cli.run(main, sys.argv[0])
