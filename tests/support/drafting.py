"""Tiny draft models of every family, and what NumPy says of what they draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.engine.state import State
from dflash_mlx.verifier.model import Target
from support import (
    masked_formats,
    published_heads,
    reference_eagle3,
    reference_mtp,
    reference_peagle,
)
from support.decoding import open_with, state_with
from support.drafter_formats import (
    FORMATS,
    WINDOWS,
    expected_logits,
    reference_block,
    written,
)
from support.families import VOCAB_SIZE, make_model
from support.reference_dflash import Array, Config
from support.toys import ToyCache

TOLERANCE = 1e-4
Text = tuple[list[int], Array]  # tokens, and the features of as many


def cut(text: Text, start: int | None, end: int | None) -> Text:
    """A part of a text."""
    return text[0][start:end], text[1][start:end]


def joined(text: Text, more: Text) -> Text:
    """One text after the other."""
    return [*text[0], *more[0]], np.concatenate([text[1], more[1]])


def grow(context: Any, text: Text, *sizes: int) -> None:
    """Tell a drafter's context of a text, in parts of these lengths."""
    start = 0
    for size in sizes or (len(text[0]),):
        tokens, features = cut(text, start, start + size)
        if tokens:
            context.append(mx.array(tokens), mx.array(features))
        start += size
    assert start == len(text[0])


def difference(a: Array, b: Array) -> float:
    """The largest, where both are finite; they must be so in the same places."""
    assert a.shape == b.shape
    assert np.array_equal(np.isfinite(a), np.isfinite(b))
    return float(np.abs(np.where(np.isfinite(a), a, 0) - np.where(np.isfinite(b), b, 0)).max())


class Drafting:
    """A drafter folder, and the model of it for a tiny target.

    A draft has an anchor and up to `rows` tokens with it, of which it is shown a prefix.
    """

    def __init__(
        self,
        folder: Path,
        raw: Config,
        tensors: Mapping[str, Array],
        target: Target | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.raw, self.tensors = folder, raw, tensors
        self.target = target or Target(make_model("llama"), 512, "llama")
        self.model = written(folder, raw, tensors, self.target, **settings)
        embedding, head = self.target.embedding(), getattr(self.target.model, "lm_head", None)
        self.tables = np.array(embedding.weight), np.array((head or embedding).weight)

    def text(self, length: int, seed: int = 0) -> Text:
        """A random one."""
        rng, width = np.random.default_rng(seed), 64 * len(self.model.aux_layers)
        features = rng.normal(size=(length, width)).astype(np.float32)
        return rng.integers(VOCAB_SIZE, size=length).tolist(), features

    def context(self, text: Text, *sizes: int) -> Any:
        """A context that took the text in, in parts of these lengths."""
        context = self.model.new_context()
        grow(context, text, *sizes)
        return context

    def state(self, anchor: int, text: Text, *sizes: int) -> State:
        """A state behind the text."""
        state = State(ToyCache(), self.context(text, *sizes))
        open_with(state, anchor)
        return state

    def behind(self, seed: int, anchor: int) -> State:
        """A state behind nine random tokens."""
        return self.state(anchor, self.text(9, seed))

    @abstractmethod
    def found(self, context: Any, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        """The logits [n, V] of a draft."""

    @abstractmethod
    def expected(self, text: Text, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        """These, in NumPy, which computes everything at once."""

    def error(self, context: Any, text: Text, *draft: Any) -> float:
        """How far the logits of a draft behind a context are from the reference."""
        return difference(self.found(context, *draft), self.expected(text, *draft))


class Blocks(Drafting):
    """DFlash, DFlash 2 and DSpark: a block of masks behind the prefix, in one pass."""

    def found(self, context: Any, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        return np.array(self.model.logits(context, mx.array([anchor]), rows, (prefix,)))

    def expected(self, text: Text, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        block = text[1], anchor, rows, prefix
        return expected_logits(self.raw, self.tensors, self.tables, *block)

    def block(self, seed: int, anchor: int, rows: int = 0, prefix: tuple[int, ...] = ()) -> Any:
        """The reference of a linked drafter behind nine features."""
        block = self.text(9, seed)[1], anchor, rows or self.model.block_size, prefix
        return reference_block(self.raw, self.tensors, self.tables, *block)


class Steps(Drafting):
    """EAGLE-3: token by token, of which there are as many as rows."""

    def path(self, anchor: int, rows: int, prefix: tuple[int, ...]) -> list[int]:
        known = [anchor, *prefix]
        return [*known, *[(anchor + 31 * i) % VOCAB_SIZE for i in range(len(known), rows)]]

    def found(self, context: Any, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        draft = self.model.begin(state_with(context))
        path = self.path(anchor, rows, prefix)
        return np.stack([draft.logits(mx.array([t]), [i - 1])[0] for i, t in enumerate(path)])

    def expected(self, text: Text, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        path = self.path(anchor, rows, prefix)
        return np.stack([self.after(text, path[: i + 1]) for i in range(rows)])

    def after(self, text: Text, path: list[int]) -> Array:
        """[V] for what follows a path."""
        return reference_eagle3.logits(self.tensors, self.raw, self.tables, *text, path)


class Parallel(Steps):
    """P-EAGLE: all rows in one pass, whatever tokens led to them."""

    def after(self, text: Text, path: list[int]) -> Array:
        given = self.tensors, self.raw, self.tables, *text, path[0], len(path)
        return np.asarray(reference_peagle.logits(*given)[-1])


class Heads(Steps):
    """Heads for multi-token prediction, which read the outputs of the target's last layer."""

    def after(self, text: Text, path: list[int]) -> Array:
        tables = (*self.tables, last_norm(self.target))
        return reference_mtp.logits(self.tensors, self.raw, tables, *text, path)


class PublishedHeads(Steps):
    """Those of other publishers."""

    def after(self, text: Text, path: list[int]) -> Array:
        head = published_heads.head_of(self.raw, self.tensors)
        return head.logits((*self.tables, last_norm(self.target)), *text, path)


def last_norm(target: Target) -> Array:
    """The weight of the norm behind a tiny target's last layer."""
    model = getattr(target.model, "language_model", target.model)
    return np.array(model.model.norm.weight)


class Masks(Drafting):
    """SpecDiff: a block of masks, all of whose places have logits."""

    def block(self, anchor: int, rows: int, prefix: tuple[int, ...]) -> list[int]:
        return [anchor, *prefix, *[masked_formats.MASK] * (rows - 1 - len(prefix))]

    def found(self, context: Any, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        block = mx.array(self.block(anchor, rows, prefix))
        return np.array(self.model.logits(context, block, range(1, rows)))

    def expected(self, text: Text, anchor: int, rows: int, prefix: tuple[int, ...] = ()) -> Array:
        block = self.block(anchor, rows, prefix)
        return masked_formats.logits(self.raw, self.tensors, self.tables, text[0], block)


CASES: dict[str, tuple[type[Drafting], Any]] = {
    **{name: (Blocks, case) for name, case in {**FORMATS, **WINDOWS}.items()},
    **{f"eagle3, {name}": (Steps, case) for name, case in reference_eagle3.FORMATS.items()},
    **{f"eagle3, parallel, {n}": (Parallel, c) for n, c in reference_peagle.FORMATS.items()},
    **{f"mtp, {name}": (Heads, case) for name, case in reference_mtp.FORMATS.items()},
    **{f"mtp of {name}": (PublishedHeads, case) for name, case in published_heads.FORMATS.items()},
    **{f"specdiff, {name}": (Masks, case) for name, case in masked_formats.FORMATS.items()},
}
