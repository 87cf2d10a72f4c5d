"""Decoding in tests: these ids with this drafter, and trees written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine import decode as engine
from dflash_mlx.engine.state import State


def answer(target: Any, drafter: Any, prompt: Sequence[int], config: DecodeConfig) -> list[int]:
    """The tokens behind `prompt`, with caches of their own."""
    rounds = engine.answer(target, drafter, prompt, config)
    return [token for round_ in rounds for token in round_.accepted.tokens]


def start(
    target: Any, drafter: Any, prompt: Sequence[int], config: DecodeConfig | None = None
) -> State:
    """A state whose anchor is the prompt's last token."""
    state = State(target.new_cache(), drafter.new_context())
    go_on(target, drafter, state, prompt, config)
    return state


def go_on(
    target: Any,
    drafter: Any,
    state: State,
    prompt: Sequence[int],
    config: DecodeConfig | None = None,
) -> int:
    """Bring a state to another prompt; how much of it was there already."""
    config = config or DecodeConfig()
    return engine.prefill(target, drafter, state, list(prompt), config, Observer())


def rounds(
    target: Any, drafter: Any, state: State, config: DecodeConfig, observer: Observer | None = None
) -> Iterator[Accepted]:
    """What the rounds of an answer accept, as they happen."""
    running = engine.decode(target, drafter, state, config, observer or Observer())
    return (round_.accepted for round_ in running)


def run(target: Any, drafter: Any, state: State, config: DecodeConfig) -> list[int]:
    """The tokens of an answer."""
    found = rounds(target, drafter, state, config)
    return [token for accepted in found for token in accepted.tokens]


def feed(context: Any, features: Any) -> None:
    """Tell a drafter's context of tokens that it does not read, and of their features."""
    context.append(mx.zeros(len(features), mx.int32), mx.array(features))


def tree_of(tokens: Sequence[int], parents: Sequence[int], **more: Any) -> Tree:
    """A tree of these tokens, the anchor's first, which the tree does not keep."""
    return Tree(tuple(tokens[1:]), tuple(parents), **more)


def path_to(tree: Tree, node: int) -> list[int]:
    """Node ids from the root to `node`, both included."""
    path = [node]
    while (parent := tree.parents[path[0]]) >= 0:
        path.insert(0, parent)
    return path


def ids_of(tree: Tree) -> mx.array:
    """The tokens [N] of a pass over a tree, behind an anchor that is always the same."""
    return tree.ids(mx.array([7]))
