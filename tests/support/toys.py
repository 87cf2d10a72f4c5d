"""A target whose law can be enumerated, and drafters that propose whatever a test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.none import NoContext
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.block import Block, Cache
from dflash_mlx.verifier.routing import Kernels
from support.family_configs import VOCAB_SIZE


def prompt_of(seed: int, length: int = 20) -> list[int]:
    """Random tokens for a tiny model."""
    return np.random.default_rng(seed).integers(VOCAB_SIZE, size=length).tolist()


class Letters:
    """A tokenizer with one letter per token, so that any text can stop; no stop token at first."""

    def __init__(self) -> None:
        self.eos_token_ids: set[int] = set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 0x100 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(0x100 + i) for i in ids)

    @property
    def detokenizer(self) -> NaiveStreamingDetokenizer:
        return NaiveStreamingDetokenizer(self)


class ToyCache(Cache):
    """Stores tokens where a model's cache stores keys and values."""

    arrays: list[mx.array] = []
    nbytes, is_recurrent = 0, False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pending: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, path: Sequence[int]) -> None:
        self.tokens += [self.pending[row] for row in path]

    def discard(self) -> None:
        self.pending = []

    def nearest(self, length: int) -> int:
        return min(length, self.length)

    def rewind(self, length: int) -> int:
        del self.tokens[length:]
        return len(self.tokens)

    def fork(self) -> ToyCache:
        other = ToyCache()
        other.tokens = list(self.tokens)
        return other


class ToyTarget:
    """Logits for the next token depend on the last two: `table` [V, V, V]."""

    name = "toy"
    kernels = Kernels("toy", lambda: ())  # off
    takes_trees = True
    sees = is_recurrent = False

    def __init__(self, vocabulary: int, context_length: int = 64, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.table = rng.normal(size=(vocabulary,) * 3).astype(np.float32) * 1.5
        self.context_length = context_length

    def new_cache(self) -> ToyCache:
        return ToyCache()

    def check_trees(self) -> None:
        """It takes them."""

    def forward_all(self, sequences, aux_layers=()):
        return [self.forward(*rows[:3], aux_layers) for rows in sequences]

    def forward(
        self, tokens: mx.array, cache: ToyCache, block: Block, aux_layers: tuple[int, ...] = ()
    ) -> tuple[mx.array, None]:
        cache.pending = tokens.tolist()
        parents = block.tree.parents if block.tree is not None else range(-1, block.rows - 1)
        rows = []
        for token, parent in zip(cache.pending, parents, strict=True):
            before = cache.pending[parent] if parent >= 0 else ([0, *cache.tokens])[-1]
            rows.append(self.table[before, token])
        return mx.array(np.stack(rows)), None


class Scripted(EachAlone):
    """A drafter that proposes what `script(tokens, room)` returns below the anchor.

    script gives tokens and parents of nodes 1..N-1 (parents count the anchor as node 0).
    """

    name = "scripted"
    aux_layers: tuple[int, ...] = ()
    rounds_ahead = 0

    def __init__(self, script: Callable[[list[int], int], tuple[list[int], list[int]]]) -> None:
        self.script = script

    def new_context(self) -> NoContext:
        return NoContext()

    def draft(self, state: State, remaining: int) -> Proposal:
        tokens, parents = self.script(state.tokens, remaining)
        return Proposal(Tree(tuple(tokens), (-1, *parents)))


def random_tree(
    rng: np.random.Generator, nodes: int, vocabulary: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of up to `nodes` drafted nodes; no two siblings carry one token."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(nodes):
        parent, token = int(rng.integers(len(tokens) + 1)), int(rng.integers(vocabulary))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def foretold(
    prompt: Sequence[int], plain: Sequence[int], seed: int = 0, most: int = 6, width: int = 6
) -> Scripted:
    """Trees with a run of the plain answer, of random length, and wrong branches beside it."""
    rng = np.random.default_rng(seed)

    def script(tokens: list[int], remaining: int) -> tuple[list[int], list[int]]:
        run = min(int(rng.integers(1, most + 1)), remaining - 1)
        ahead = plain[len(tokens) - len(prompt) :][:run]
        others, parents = random_tree(rng, min(width, remaining - 1 - len(ahead)), VOCAB_SIZE)
        if ahead and ahead[0] in others:  # keep siblings apart
            others, parents = [], []
        below = [p + len(ahead) if p else 0 for p in parents]
        return [*ahead, *others], [*range(len(ahead)), *below]

    return Scripted(script)
