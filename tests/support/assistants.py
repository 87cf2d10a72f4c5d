"""Tiny assistants with their targets in MLX, and what transformers drafts with them.

`scripts/assistant_oracle.py` writes these numbers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from dflash_mlx.engine.state import State
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from support.assistant_formats import CASES, WINDOW, text_of, weight
from support.decoding import open_with
from support.drafter_formats import written
from support.family_configs import sliding
from support.reference_dflash import Array

ORACLE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/assistants.json").read_text("utf-8")
)


def tensors(name: str, vocabulary: int = 0, centroids: int = 0) -> dict[str, Array]:
    """Of the assistant, by the names and shapes that transformers has; or for other tokens."""
    shapes = {each: tuple(shape) for each, shape in ORACLE[name]["tensors"].items()}
    if vocabulary:
        for each, shape in shapes.items():
            if each.endswith(("embed_tokens.weight", "token_ordering")):
                shapes[each] = (vocabulary, *shape[1:])
            elif each.endswith("centroids.weight"):
                shapes[each] = (centroids, *shape[1:])
    return {each: weight(each, shape, 1) for each, shape in shapes.items()}


def make_target(name: str, context_length: int = 512, **changes: Any) -> Target:
    """The assistant's. changes: of its config.json."""
    raw = {**CASES[name][1], **changes}
    kind, arguments = _get_classes(dict(raw))
    model = kind(arguments.from_dict(json.loads(json.dumps(raw))))
    ours: Any = tree_flatten(model.parameters())
    filled = [
        (own, mx.array(weight(own.removeprefix("language_model."), array.shape, 2)))
        for own, array in ours
    ]
    model.update(tree_unflatten(filled))
    model.eval()
    mx.eval(model.parameters())
    return Target(model, context_length, name)


def few_tokens(folder: Path, name: str) -> Any:
    """A smaller target of a case with four tokens, and its assistant, which chooses two of them."""
    raw, theirs = CASES[name]
    pattern = "SFSF" if theirs.get("num_kv_shared_layers") else "SF"
    sizes = {**sliding(pattern, WINDOW), "vocab_size": 4, "vocab_size_per_layer_input": 4}
    text = {**raw["text_config"], "vocab_size": 4}
    few = {"num_centroids": 2, "centroid_intermediate_top_k": 1, "text_config": text}
    target = make_target(name, **sizes)
    return target, written(folder, {**raw, **few}, tensors(name, 4, 2), target)


@cache
def target_of(name: str) -> Target:
    """The same one for all tests."""
    return make_target(name)


def assistant(folder: Path, name: str, target: Target | None = None, **settings: Any) -> Any:
    """The draft model of a case, in a folder that is written. settings: of loading it."""
    raw = CASES[name][0]
    return written(folder, raw, tensors(name), target or target_of(name), **settings)


def state_of(model: Any, target: Target, tokens: list[int], *sizes: int) -> State:
    """A state behind all but the last token, which is the anchor; read in parts of these sizes."""
    state, start = State(target.new_cache(), model.new_context()), 0
    for size in sizes or (len(tokens) - 1,):
        ids = mx.array(tokens[start : start + size])
        _, features = target.forward(ids, state.cache, Block(size), model.aux_layers)
        state.cache.commit(range(size))
        state.context.append(ids, features)
        state._tokens.extend(ids.tolist())
        start += size
    assert start == len(tokens) - 1
    open_with(state, tokens[-1])
    return state


def logits_along(model: Any, state: State, path: list[int]) -> Array:
    """[n, V] for what follows each token of a path, drafted one after the other."""
    draft = model.begin(state)
    return np.stack([draft.logits(mx.array([t]), [i - 1])[0] for i, t in enumerate(path)])


def error(model: Any, target: Target, name: str, *sizes: int) -> float:
    """How far drafts are from transformers', relative to its largest logit; inf for other tokens.

    sizes: in which the longest text is read.
    """
    worst = 0.0
    for told in ORACLE[name]["drafts"]:
        tokens = text_of(told["length"])
        parts = sizes if sum(sizes) == told["length"] else ()
        state = state_of(model, target, tokens, *parts)
        found = logits_along(model, state, [tokens[-1], *told["drafted"][:-1]])
        expected = np.array(told["logits"])
        if model.config.centroids is not None:  # to the others it gives one less than the least
            expected[expected == expected.min(axis=-1, keepdims=True)] = -np.inf
        if not np.array_equal(np.isfinite(found), np.isfinite(expected)):
            return float("inf")
        known = np.isfinite(expected)
        found, expected = found[known], expected[known]
        worst = max(worst, float(np.abs(found - expected).max() / np.abs(expected).max()))
    return worst
