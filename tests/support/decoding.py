"""Decoding in tests: these ids with this drafter, and trees written down."""

from __future__ import annotations

import sys
import time
from collections import abc
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.dflash.block_model import Ask
from dflash_mlx.engine.acceptance import AcceptanceRule
from dflash_mlx.engine.constraint import Constraint
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.session.scheduler import Scheduler, make_rule
from support.toys import ToyCache


class Strict(Observer):
    """Nothing that is done for several sequences at once may fail there and be done one by one."""

    def fell_back(self, error: Exception) -> None:
        raise AssertionError("sequences could not step together") from error


def tokens_in(rounds: Iterable[Any]) -> list[int]:
    """What all these rounds accepted, one after the other."""
    return [token for accepted in rounds for token in accepted.tokens]


def scheduler_of(target: Any, *settings: Any, fair: bool = True, **more: Any) -> Scheduler:
    """A scheduler for sequences that are made by hand."""
    scheduler = Scheduler(Pair(target, None), *settings, **more)
    scheduler.fair = fair
    return scheduler


def rule_of(
    target: Any, state: State, sampler: Sampler, config: DecodeConfig, in_company: bool = False
) -> AcceptanceRule:
    """The rule of an answer; in the company of others plain decoding has near-ties, too."""
    exact = config.exact if in_company else config.guarded
    return make_rule(target, state, sampler, config, exact)


def sequence_of(
    state: State,
    drafter: Any,
    prompt: Iterable[int] = (),
    chunk: int = sys.maxsize,
    rule: Any = None,
    exact: bool = False,
) -> Sequence:
    """A sequence made by hand. rule: an acceptance rule, or what makes it behind the prompt."""
    return Sequence(state, drafter, Prompt.of(prompt), prefill_step=chunk, rule=rule, exact=exact)


def answer_rounds(
    target: Any,
    drafter: Any,
    prompt: abc.Sequence[int],
    config: DecodeConfig,
    observer: Observer | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Delta]:
    """An answer behind `prompt`, with caches of its own."""
    state = State(target.new_cache(), drafter.new_context())
    state.constraint = constraint
    go_on(target, drafter, state, prompt, config, observer)
    yield from decode(target, drafter, state, config, observer)


def decode(
    target: Any, drafter: Any, state: State, config: DecodeConfig, observer: Observer | None = None
) -> Iterator[Delta]:
    """The rounds of an answer behind a prompt that a state holds."""
    sampler = Sampler(config.sampling)
    state.end = min(state.next_position - 1 + config.max_tokens, target.context_length - 1)
    rule = rule_of(target, state, sampler, config)
    scheduler = scheduler_of(target, observer=observer)
    scheduler.add(sequence_of(state, drafter, state.tokens[: state.position], rule=rule))
    scheduler.observer.start()
    while len(scheduler):
        for _, said in scheduler.step():
            if isinstance(said, Exception):
                raise said
            begin = time.perf_counter()
            yield said
            state.paused += time.perf_counter() - begin


def answer(
    target: Any,
    drafter: Any,
    prompt: abc.Sequence[int],
    config: DecodeConfig,
    constraint: Constraint | None = None,
) -> list[int]:
    """The tokens behind `prompt`, with caches of their own."""
    found = answer_rounds(target, drafter, prompt, config, constraint=constraint)
    return tokens_in(delta.accepted for delta in found)


def start(
    target: Any, drafter: Any, prompt: abc.Sequence[int], config: DecodeConfig | None = None
) -> State:
    """A state that holds a prompt."""
    state = State(target.new_cache(), drafter.new_context())
    go_on(target, drafter, state, prompt, config)
    return state


def go_on(
    target: Any,
    drafter: Any,
    state: State,
    prompt: abc.Sequence[int],
    config: DecodeConfig | None = None,
    observer: Observer | None = None,
) -> int:
    """Bring a state to another prompt; how much of it was there already."""
    reused, config = state.reuse(Prompt.of(prompt)), config or DecodeConfig()
    sequence = sequence_of(state, drafter, prompt, config.prefill_step)
    sequence.has_looked = True
    scheduler = scheduler_of(target, observer=observer or Observer())
    scheduler.add(sequence)
    while sequence.is_reading:
        for _, error in scheduler.step():
            raise error
    return reused


def rounds(
    target: Any, drafter: Any, state: State, config: DecodeConfig, observer: Observer | None = None
) -> Iterator[Accepted]:
    """What the rounds of an answer accept, as they happen."""
    return (delta.accepted for delta in decode(target, drafter, state, config, observer))


def run(target: Any, drafter: Any, state: State, config: DecodeConfig) -> list[int]:
    """The tokens of an answer."""
    return tokens_in(rounds(target, drafter, state, config))


def feed(context: Any, features: Any) -> None:
    """Tell a drafter's context of tokens that it does not read, and of their features."""
    context.append(mx.zeros(len(features), mx.int32), mx.array(features))


def open_with(state: State, anchor: int) -> None:
    """Let an answer begin with this token."""
    state.begin(Accepted(Tree.chain(), (0,), anchor))


def behind(drafter: Any, anchor: int, *features: Any) -> State:
    """A state for drafts behind an anchor; the drafter took these features in, part by part."""
    state = State(ToyCache(), drafter.new_context())
    for part in features:
        feed(state.context, part)
    open_with(state, anchor)
    return state


def tree_of(tokens: abc.Sequence[int], parents: abc.Sequence[int], **more: Any) -> Tree:
    """A tree of these tokens, the anchor's first, which the tree does not keep."""
    return Tree(tuple(tokens[1:]), tuple(parents), **more)


def path_to(tree: Tree, node: int) -> list[int]:
    """Node ids from the root to `node`, both included."""
    path = [node]
    while (parent := tree.parents[path[0]]) >= 0:
        path.insert(0, parent)
    return path


def paths_of(tree: Any) -> list[tuple[int, ...]]:
    """The drafted tokens from the root to each node, which no two nodes share."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.drafted, tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths), "two siblings carry one token"
    return paths


def ids_of(tree: Tree) -> mx.array:
    """The tokens [N] of a pass over a tree, behind an anchor that is always the same."""
    return tree.ids(mx.array([7]))


def linked_of(model: Any, *ask: Any) -> Any:
    """What a DFlash model with a linking head finds behind each prefix of an `Ask`."""
    asked = Ask(*ask)
    states = model._states(asked)
    return model._linked(asked, states, *model._head.logits(states, asked.context.words))
