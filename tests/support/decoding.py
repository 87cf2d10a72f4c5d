"""Decoding in tests: these ids with this drafter, and trees written down."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.statistics import Observer
from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.dflash.block_model import Ask
from dflash_mlx.engine.delta import Delta, collect
from dflash_mlx.engine.grammar import Constraint
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.sequence import Rows
from support.toys import Letters, ToyCache


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


def finish(scheduler: Scheduler, look: Callable[[], object] = lambda: None) -> dict[Any, list[Any]]:
    """What each sequence brings until all are over. look: is called after every step."""
    said: dict[Any, list[Any]] = {}
    while len(scheduler):
        for each, delta in scheduler.step():
            said.setdefault(each, []).append(delta)
        look()
    scheduler.keep_finished()
    return said


def said_by(session: Session, prompt: list[int]) -> tuple[list[int], int]:
    """An answer, and how many tokens of its prompt were there already."""
    found = collect(session.stream(prompt))
    return list(found.tokens), found.statistics.reused_tokens


def sequence_of(
    target: Any,
    drafter: Any,
    prompt: Iterable[int],
    config: DecodeConfig,
    state: State | None = None,
    in_company: bool = False,
    kind: type[Sequence] = Sequence,
) -> Any:
    """A sequence made by hand; in the company of others plain decoding has near-ties, too."""
    prompt = Prompt.of(prompt)
    config = replace(config, exact=config.exact if in_company else config.guarded)
    state = state or State(target.new_cache(), drafter.new_context())
    length = max(len(prompt), state.position)
    state.end = min(length - 1 + config.max_tokens, target.context_length - 1)
    return kind(Pair(target, Letters()), state, drafter, prompt, config)


def answer_rounds(
    target: Any,
    drafter: Any,
    prompt: abc.Sequence[int],
    config: DecodeConfig,
    constraint: Constraint | None = None,
) -> Iterator[Delta]:
    """An answer behind `prompt`, with caches of its own."""
    state = State(target.new_cache(), drafter.new_context())
    state.constraint = constraint
    go_on(target, drafter, state, prompt, config)
    yield from decode(target, drafter, state, config)


def decode(
    target: Any, drafter: Any, state: State, config: DecodeConfig, observer: Observer | None = None
) -> Iterator[Delta]:
    """The rounds of an answer behind a prompt that a state holds."""
    sequence = sequence_of(target, drafter, state.tokens[: state.position], config, state)
    for delta in _deltas(scheduler_of(target, observer=observer), sequence):
        begin = time.perf_counter()
        yield delta
        state.paused += time.perf_counter() - begin


def _deltas(scheduler: Scheduler, sequence: Sequence) -> Iterator[Delta]:
    scheduler.observer.start()
    first = sequence.end_prompt(sequence.state.opening)
    assert first is not None
    sequence.rounds.append(first)
    yield (delta := sequence.next_delta())
    if delta.finish_reason is not None:
        sequence.state.trim(sequence.length - 1)
        return
    scheduler.add(sequence)
    while len(scheduler):
        for _, said in scheduler.step():
            if isinstance(said, Exception):
                raise said
            yield said


def answer(
    target: Any,
    drafter: Any,
    prompt: abc.Sequence[int],
    config: DecodeConfig,
    constraint: Constraint | None = None,
) -> list[int]:
    """The tokens behind `prompt`, with caches of their own."""
    return tokens_in(answer_rounds(target, drafter, prompt, config, constraint=constraint))


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
    given: Prompt | abc.Sequence[int],
    config: DecodeConfig | None = None,
) -> int:
    """Bring a state to another prompt; how much of it was there already."""
    prompt = Prompt.of(given)
    reused = state.reuse(prompt)
    sequence = sequence_of(target, drafter, prompt, config or DecodeConfig(), state)
    while sequence.is_reading:
        length = sequence.next_chunk()
        first, last = state.position, state.position + length
        embeddings = target.embed(prompt, first, last) if prompt.pieces else None
        ids, block = mx.array(prompt.tokens[first:last]), Block(length, last_only=True)
        rows = Rows(ids, state.cache, block, embeddings)
        (found,) = target.forward_all([rows], drafter.aux_layers)
        state.commit_prompt(sequence.prompt, length, found[1])
    state.end_prompt(found[0][-1:])
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


def state_with(context: Any) -> State:
    """A state with a drafter's context, and nothing of its target."""
    return State(ToyCache(), context)


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
    return model._linked(asked, states, *model.head.logits(states, asked.context.words))
