"""Sampled answers follow the target's law with every method, at T = 0.7."""

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import reject
from dflash_mlx.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.best_first import BestFirst
from dflash_mlx.drafters.block_diffusion import BlockDiffusion
from dflash_mlx.drafters.checkpoint import NetworkConfig
from dflash_mlx.drafters.context import FeatureContext
from dflash_mlx.drafters.drawn import DrawnBlock
from dflash_mlx.drafters.dual_diffusion import DualDiffusion, JointGrowth, PaperGrowth
from dflash_mlx.drafters.methods import METHODS
from dflash_mlx.drafters.ngram import NGram
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.resample import Resample
from law import LENGTH, VOCABULARY, answer, chi_square, enumerated_law
from toys import ToyTarget

TEMPERATURE = 0.7


class ToyContext(FeatureContext):
    """Remembers nothing."""

    def __init__(self) -> None:
        pass

    @property
    def length(self) -> int:
        return 1000

    @property
    def arrays(self) -> list[mx.array]:
        return []

    def can_trim(self, length: int) -> bool:
        return True

    def trim(self, length: int) -> None:
        pass


class ToyDrafter:
    """Stands for a drafter network: logits depend on the anchor, the prefix and the position."""

    kernels = None

    def __init__(self, seed: int, block_size: int = 4) -> None:
        shape = (VOCABULARY, block_size, VOCABULARY)
        self.table = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 1.5
        self.config = type("Config", (), {"block_size": block_size, "target_layer_ids": ()})()

    def new_context(self) -> ToyContext:
        return ToyContext()

    def logits(self, context, anchor, rows, prefixes=((),)):
        found = []
        for prefix in prefixes:
            seen = [*anchor.tolist(), *prefix]
            found += [self.table[seen[-1], k] for k in range(len(prefix), rows - 1)]
        return mx.array(np.stack(found))


def drafter(name, sampling):
    first, second = ToyDrafter(1), ToyDrafter(2)
    made = {
        "none": lambda: NoDraft(),
        "ngram": lambda: NGram(),
        "dflash": lambda: BlockDiffusion(first),
        "dflash, reject": lambda: DrawnBlock(first, None, sampling),
        "ddtree": lambda: BestFirst(first, None, 6),
        "d2sd": lambda: DualDiffusion(first, second, None, JointGrowth(2, 8)),
        "d2sd, published": lambda: DualDiffusion(first, second, None, PaperGrowth(2)),
        "d2sd, one drafter": lambda: DualDiffusion(first, None, None, JointGrowth(2, 8)),
        "resample": lambda: Resample(first, None, 3, sampling.seed),
    }
    return made[name]()


NAMES = [
    "none",
    "ngram",
    "dflash",
    "dflash, reject",
    "ddtree",
    "d2sd",
    "d2sd, published",
    "d2sd, one drafter",
    "resample",
]


def distance(name, draws, **settings):
    """Of `draws` answers with that method from the enumerated law, in standard deviations."""
    target = ToyTarget(VOCABULARY)
    sampling = {"temperature": TEMPERATURE, **settings}
    answers = []
    for seed in range(draws):
        seeded = SamplingConfig(seed=seed, **sampling)
        acceptance = "reject" if name.endswith("reject") else "match"
        config = DecodeConfig(
            name.partition(",")[0], acceptance=acceptance, max_tokens=LENGTH, sampling=seeded
        )
        answers.append(answer(target, drafter(name, seeded), config))
    return chi_square(enumerated_law(target, SamplingConfig(**sampling)), answers)


def test_every_method_is_here():
    assert {name.partition(",")[0] for name in NAMES} == set(METHODS)


@pytest.mark.parametrize("name", NAMES)
def test_sampled_answers_follow_the_law(name):
    assert distance(name, 800) < 4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_p": 0.8},
        {"top_k": 2},
        {"top_p": 0.95, "top_k": 3},
        {"repetition_penalty": 1.7, "repetition_context": 2},
    ],
    ids=str,
)
def test_rejection_sampling_follows_the_law_with_every_filter(settings):
    assert distance("dflash, reject", 1500, **settings) < 4


@pytest.mark.parametrize("mistake", ["keeps all", "keeps by p", "draws from p"])
def test_the_law_test_notices_wrong_rejection_rules(monkeypatch, mistake):
    keeps = reject.keeps
    if mistake == "keeps all":
        monkeypatch.setattr(reject, "keeps", lambda p, q, token, u: True)
    elif mistake == "keeps by p":
        ones = mx.ones(VOCABULARY)
        monkeypatch.setattr(reject, "keeps", lambda p, q, token, u: keeps(p, ones, token, u))
    else:
        monkeypatch.setattr(reject, "remainder", lambda p, q: p)
    assert distance("dflash, reject", 800) > 4


def test_the_toy_drafter_stands_for_real_ones():
    assert {"block_size", "target_layer_ids"} <= set(NetworkConfig.__dataclass_fields__)
