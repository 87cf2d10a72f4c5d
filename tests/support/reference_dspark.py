"""A DSpark drafter in straight NumPy float64, to test the real one against.

Written from the published equations and the names and shapes of the published checkpoints; one
position and one token after the other. Letters as in `reference_dflash.py`, r the rank.
"""

import itertools
from typing import Any

import numpy as np

from support import reference_gemma
from support.reference_dflash import (
    Array,
    Config,
    Given,
    LinkedBlock,
    Tensors,
    capped,
    hidden_states,
    random_drafter,
    tiny_drafter_config,
)

RANK = 8


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return a small config in DeepSeek's layout: everything beside each other."""
    method = {
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "layer_types": ["full_attention"] * 2,
        "markov_head_type": "vanilla",
        "markov_rank": RANK,
        "num_anchors": 512,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    config = tiny_drafter_config(architectures=["Qwen3DSparkModel"], block_size=5)
    method |= config.pop("dflash_config")
    del config["rope_scaling"], config["rope_theta"]
    return {**config, **method, **changes}


def heads(config: Config, drafted: int = 0, seed: int = 0) -> dict[str, Array]:
    """Draw both heads, large enough to matter. drafted: tokens of a draft vocabulary."""
    rng = np.random.default_rng(seed + 7)
    rank, d, vocabulary = field(config, "markov_rank"), 64, 97
    reads = field(config, "confidence_head_with_markov", True) * rank
    shapes = {
        "markov_head.markov_w1.weight": (vocabulary, rank),
        "markov_head.markov_w2.weight": (drafted or vocabulary, rank),
        "confidence_head.proj.weight": (1, d + reads),
        "confidence_head.proj.bias": (1,),
    }
    if not field(config, "enable_confidence_head", True):
        shapes = dict(itertools.islice(shapes.items(), 2))
    scales = {"confidence_head.proj.weight": 1 / np.sqrt(d)}
    return {
        name: (rng.standard_normal(shape) * scales.get(name, 1.0)).astype(np.float32)
        for name, shape in shapes.items()
    }


def random_tensors(config: Config, drafted: int = 0, seed: int = 0) -> dict[str, Array]:
    """Draw float32 weights of the network and of the heads that it has."""
    as_dflash = {**layers_of(config), "dflash_config": {"target_layer_ids": [0, 2]}}
    draw = reference_gemma.random_tensors if reference_gemma.is_gemma(config) else random_drafter
    tensors: dict[str, Array] = dict(draw(as_dflash, seed))
    return tensors | (heads(config, drafted, seed) if field(config, "markov_rank", 0) else {})


def layers_of(config: Config) -> Config:
    """The fields of the network, in either layout."""
    inner: Config = config.get("transformer_layer_config", config)
    return inner


def field(config: Config, name: str, default: Any = None) -> Any:
    """A field of the method, wherever it is."""
    return {**config, **config.get("dflash_config", {})}.get(name, default)


class Block(LinkedBlock):
    """One block behind its context: what the drafter says of its rows - 1 drafted positions.

    tables: the target's embedding and head, for drafters that have none. ids: [v] tokens of the
    head.
    """

    def __init__(
        self, config: Config, tensors: Tensors, tables: tuple[Array, Array], given: Given
    ) -> None:
        features, anchor, rows, prefix = given
        assert rows is not None
        offset = config.get("model_type") == "qwen3_5"  # of norms
        self.tensors = {
            name: np.asarray(t, np.float64) + (offset and "norm" in name)
            for name, t in tensors.items()
        }
        first = 0 if field(config, "sample_from_anchor", True) else 1
        masks = [field(config, "mask_token_id")] * (rows - 2 + first - len(prefix))
        embedding = np.asarray(self.tensors.get("embed_tokens.weight", tables[0]), np.float64)
        x = embedding[[anchor, *prefix, *masks]]
        is_gemma = reference_gemma.is_gemma(config)
        x = x * np.sqrt(x.shape[-1]) if is_gemma else x
        run = reference_gemma.hidden_states if is_gemma else hidden_states
        states = run(self.tensors, layers_of(config), x, features)
        self.states = states[first + len(prefix) :]
        self.before = prefix[-1] if prefix else anchor
        head = np.asarray(self.tensors.get("lm_head.weight", tables[1]), np.float64)
        self.logits = capped(self.states @ head.T, config)
        self.ids = np.arange(len(head))
        if "d2t" in tensors:
            self.ids = self.ids + np.asarray(tensors["d2t"])

    def row(self, t: int, before: int) -> Array:
        """The logits [v] at position t after a token."""
        if "markov_head.markov_w1.weight" not in self.tensors:
            return np.asarray(self.logits[t])
        w1 = self.tensors["markov_head.markov_w1.weight"]
        w2 = self.tensors["markov_head.markov_w2.weight"]
        bias = [float(w1[before] @ row) for row in w2]
        return np.asarray(self.logits[t] + bias)

    def scores(self, t: int, before: int) -> dict[int, float]:
        return dict(zip(self.ids.tolist(), self.row(t, before).tolist(), strict=True))

    def confidence(self, t: int, before: int) -> float:
        """How likely position t is to be accepted after a token."""
        weight, bias = (self.tensors[f"confidence_head.proj.{n}"] for n in ("weight", "bias"))
        given = self.states[t]
        if weight.shape[1] > len(given):
            given = np.concatenate([given, self.tensors["markov_head.markov_w1.weight"][before]])
        return float(1 / (1 + np.exp(-(weight[0] @ given + bias[0]))))
