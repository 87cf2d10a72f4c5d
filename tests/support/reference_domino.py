"""A Domino drafter in straight NumPy float64, to test the real one against.

Written from arXiv 2605.29707 and the shapes of the published tensors: DFlash's block, whose logits
a GRU over the block's tokens corrects, one position and one token after the other. Imports no mlx.
"""

from typing import Any

import numpy as np

from support.reference_dflash import (
    Array,
    Config,
    LinkedBlock,
    Tensors,
    hidden_states,
    random_drafter,
    tiny_drafter_config,
)

STATE, NARROW, VOCABULARY, WIDTH = 12, 10, 97, 64


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return a small config in the layout of SpecForge and of the published checkpoints."""
    method = {
        "emb_dim": NARROW,
        "gru_hidden_dim": STATE,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
        **changes.pop("dflash_config", {}),
    }
    kind = {"architectures": ["DominoDraftModel"], "block_size": 5, "emb_dim": method["emb_dim"]}
    return tiny_drafter_config(**{**kind, **changes}, dflash_config=method)


def random_tensors(config: Config, seed: int = 0) -> dict[str, Array]:
    """Draw float32 weights of the network and of the head, large enough to matter."""
    rng, tensors = np.random.default_rng(seed + 11), dict(random_drafter(config, seed))
    shapes = {
        "prefix_gru.weight_ih_l0": (3 * STATE, WIDTH),
        "prefix_gru.weight_hh_l0": (3 * STATE, STATE),
        "embed_proj.0.weight": (NARROW, WIDTH + STATE),
        "embed_proj.2.weight": (VOCABULARY, NARROW),
    }
    for name, shape in shapes.items():
        scale = 2.0 if name.endswith("2.weight") else 2 / np.sqrt(shape[1])
        tensors[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    tensors["embed_proj.0.weight"][:, :WIDTH] /= 4  # so that what was read tells most
    tensors["embed_proj.0.weight"][:, WIDTH:] *= 4
    return tensors


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def gru(tensors: Tensors, x: Array, state: Array) -> Array:
    """One step of PyTorch's cell, whose gates stand in the order reset, update, new."""
    given = tensors["prefix_gru.weight_ih_l0"] @ x
    kept = tensors["prefix_gru.weight_hh_l0"] @ state
    r, z, n = (slice(i * STATE, (i + 1) * STATE) for i in range(3))
    reset, update = sigmoid(given[r] + kept[r]), sigmoid(given[z] + kept[z])
    new = np.tanh(given[n] + reset * kept[n])
    return np.asarray((1 - update) * new + update * state)


class Block(LinkedBlock):
    """One block behind its context: what the drafter says of its rows - 1 drafted positions.

    features [T, m*d], the anchor at position T; prefix: drafted tokens that it shows. tables: the
    target's embedding and head.
    """

    def __init__(
        self,
        config: Config,
        tensors: Tensors,
        tables: tuple[Array, Array],
        features: Array,
        anchor: int,
        rows: int,
        prefix: tuple[int, ...] = (),
    ) -> None:
        self.tensors = {name: np.asarray(t, np.float64) for name, t in tensors.items()}
        method = config["dflash_config"]
        first = 0 if method.get("shift_label") else 1
        masks = [method["mask_token_id"]] * (rows - 2 + first - len(prefix))
        self.embedding = np.asarray(tables[0], np.float64)
        x = self.embedding[[anchor, *prefix, *masks]]
        states = hidden_states(self.tensors, config, x, features)
        self.states = states[first + len(prefix) :]
        self.shown = (anchor, *prefix)
        self.logits = self.states @ np.asarray(tables[1], np.float64).T
        self.pure = method.get("pure_draft_prefix_len", 0) - len(prefix)

    def row(self, path: tuple[int, ...], reads: int = 99) -> Array:
        """The logits [V] behind drafted tokens of this block, after those that it shows.

        reads: how many of the last of all these tokens the GRU sees.
        """
        t, state = len(path), np.zeros(STATE)
        for token in (*self.shown, *path)[-reads:]:
            state = gru(self.tensors, self.embedding[token], state)
        if t < self.pure:
            return np.asarray(self.logits[t])
        y = self.tensors["embed_proj.0.weight"] @ np.concatenate([self.states[t], state])
        return np.asarray(self.logits[t] + self.tensors["embed_proj.2.weight"] @ (y * sigmoid(y)))

    def after(self, path: tuple[int, ...], temperature: float = 1.0, reads: int = 99) -> Array:
        """The probability [V] of every token behind drafted ones."""
        scores = self.row(path, reads) / temperature
        weights = np.exp(scores - scores.max())
        return np.asarray(weights / weights.sum())

    def greedy(self) -> list[int]:
        path: tuple[int, ...] = ()
        for _ in self.states:
            path = (*path, int(self.row(path).argmax()))
        return list(path)
