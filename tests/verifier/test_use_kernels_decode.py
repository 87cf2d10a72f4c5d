"""Whole answers through emulated kernels, token by token those of stock MLX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.growth import grow
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.verifier import sequence
from kernels_metal.emulator import Run, emulated
from support.configs import config_with
from support.decoding import rounds, start
from support.drafter_formats import drafter_folder
from support.hybrids import changed_target

HEAD_DIM = 64  # the least that the attention kernel takes
VOCABULARY = 16  # so small that random drafters are often right, and not by their first choice
TOKENS = 32
LAYERS = 2
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
METHODS = {
    "none": DecodeConfig(method="none", max_tokens=TOKENS),
    "dflash": DecodeConfig(method="dflash", block_size=5, max_tokens=TOKENS),
    "d2sd": config_with("d2sd", max_tokens=TOKENS, budget=16, branches=3),
}


SMALL = {"head_dim": HEAD_DIM, "num_attention_heads": 2, "num_key_value_heads": 1}


def make_pair(folder: Path, bits: int | None) -> Pair:
    """A target, quantised with embedding and head if there are bits, and drafters of one layer."""
    more = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "intermediate_size": 64}
    target = changed_target("qwen3", bits, **SMALL, **more)

    def drafter(seed: int, aux_layers: list[int], **changes: Any) -> BlockModel:
        small = {**SMALL, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "block_size": 5}
        return drafter_folder(folder / str(seed), aux_layers, seed, target, **small, **changes)

    window = {"layer_types": ["sliding_attention"], "sliding_window": 12}
    return Pair(target, None, (drafter(1, [0, 1]), drafter(2, [1], **window)), "tiny")


def answer(pair: Pair, config: DecodeConfig) -> tuple[list[int], list[tuple[int, ...]]]:
    """Its tokens, and the path that each round accepted."""
    drafter = make_drafter(pair, config)
    state = start(pair.target, drafter, PROMPT, config)
    found = list(rounds(pair.target, drafter, state, config))
    tokens = [token for accepted in found for token in accepted.tokens]
    return tokens[:TOKENS], [accepted.path for accepted in found]


@contextmanager
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Every kernel is emulated, and what it stands for cannot be called."""

    def stock(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("stock MLX was called")

    with monkeypatch.context() as patch, emulated() as run:
        patch.setattr(mx.fast, "scaled_dot_product_attention", stock)
        patch.setattr(mx, "quantized_matmul", stock)
        patch.setattr(mx.array, "__matmul__", stock)
        patch.setattr(grow, "_rank_on_host", stock)
        patch.setattr(grow, "draft_head_reference", stock)
        patch.setattr(sequence, "accepted_rows_reference", stock)
        yield run


CASES = [("none", None), ("dflash", None), ("d2sd", None), ("dflash", 4), ("d2sd", 4)]


@pytest.mark.parametrize(("method", "bits"), CASES)
def test_answers_through_emulated_kernels_are_those_of_stock_mlx(
    monkeypatch, tmp_path, method, bits
):
    pair, config = make_pair(tmp_path, bits), METHODS[method]
    expected = answer(pair, config)
    pair.target.use_kernels("on")
    with only_kernels(monkeypatch) as run:
        tokens, paths = answer(pair, config)
    assert (tokens, paths) == expected
    assert len(tokens) == TOKENS

    ran = Counter(counters.kernel.removesuffix("_matrix") for counters in run.counters)
    target_passes = len(paths)  # the prompt's gives the first token
    last_is_alone = sum(map(len, paths[:-1])) == TOKENS - 1  # so nothing is drafted
    contexts = {"none": 0, "dflash": 1, "d2sd": 2}[method]
    drafts = contexts * (len(paths) - 1 - last_is_alone)
    moved = [path for path in paths if path != tuple(range(len(path)))]
    # Where they are packed, q, k and v are one, and so are gate and up; the head serves both
    products = (4 if bits else 7) * LAYERS * target_passes + target_passes + drafts
    # A drafter's block has seven; what it makes of features three, for each and for the prompt
    products += 7 * drafts + 3 * (drafts + contexts)
    ranked = drafts if method == "d2sd" else 0
    layers = LAYERS * target_passes + drafts
    expected_launches = {
        "cascade_attention": layers,
        "norm_rope": LAYERS * target_passes,
        "verify_qmm": products,
        "draft_head": ranked,
        "draft_head_merge": ranked,
        "cache_commit": len(moved),
    }
    assert ran == Counter({name: times for name, times in expected_launches.items() if times})
    assert (method == "d2sd") == bool(moved)
    assert all(choice.kernel for choice in pair.target.kernels.choices.values())
