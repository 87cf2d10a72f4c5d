"""Gated delta nets whose next pass replays what stays of the last one, by the kernel (emulated)."""

from contextlib import contextmanager
from functools import cache
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.verifier import tape
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.recurrent import RecurrentLayer
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.segments import Segments
from dflash_mlx.verifier.sequence import Rows
from dflash_mlx.verifier.tape import Behind, DeltaKernels, settled
from kernels_metal.dispatch import difference as apart
from kernels_metal.emulator import emulated
from support.decoding import ids_of, path_to, start, tree_of
from support.hybrids import (
    changed_target,
    difference,
    forward,
    fresh,
    oracle,
    plain_answer,
    rounds,
    some_right,
    some_tree,
    tokens_on,
)
from support.kernels import arguments
from support.toys import prompt_of
from support.walks import Walk

TOLERANCE = 1e-4
NETS = 2  # of three layers
HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
HEADS |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
STATE = 2 * 64 * 64 * 4  # bytes
PROMPT = prompt_of(3, 12)


@cache
def made():
    target = changed_target("qwen3_5", 4, **HEADS)
    target.use_kernels("on")
    return target


@pytest.fixture
def target():
    return made()


@contextmanager
def stock(target):
    target.use_kernels("off")
    yield
    target.use_kernels("on")


def off(target, cache, tokens):
    """By how much the state is off, beside one that no kernel has written."""
    with stock(target):
        return difference(target, cache, tokens)


def states_of(cache):
    return [layer.cache[1] for layer in cache.parts[0].parts]


def launches(run):
    return len(run.of("gated_delta"))


def test_a_commit_launches_nothing_and_the_next_pass_replays_what_stays(target):
    tokens = list(PROMPT)
    with emulated() as run:
        cache = fresh(target, tokens)
        for kept in (0, 2, 5, 1, 4):
            rows, before = prompt_of(kept, 5), launches(run)
            mx.eval(forward(target, cache, rows))
            assert launches(run) == before + NETS
            read = [c.buffers["state"].read for c in run.of("gated_delta")[-NETS:]]
            written = [c.buffers["begun"].written for c in run.of("gated_delta")[-NETS:]]
            assert read == written == [STATE] * NETS  # whatever stays
            cache.commit(range(kept))
            tokens += rows[:kept]
            assert all(isinstance(state, Behind) == (kept > 0) for state in states_of(cache))
        assert launches(run) == NETS * 6
        assert off(target, cache, tokens) < TOLERANCE


def test_waiting_for_a_state_replays_nothing(target, monkeypatch):
    """As behind each prompt and in watched rounds, whose next passes are to be like all others."""
    rows = prompt_of(4, 5)
    with emulated() as run:
        cache = fresh(target, PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(tape, "replayed", None)
            for kept in (5, 2):
                mx.eval(forward(target, cache, rows))
                cache.commit(range(kept))
                before = launches(run)
                mx.eval(cache.arrays)
                assert launches(run) == before
                assert all(isinstance(state, Behind) for state in states_of(cache))
        assert off(target, cache, [*PROMPT, *rows, *rows[:2]]) < TOLERANCE


def test_the_state_that_a_pass_began_with_is_counted_once(target):
    """It is what the pass was given, and what its tape stands behind."""
    with emulated():
        cache = fresh(target, PROMPT)
        forward(target, cache, prompt_of(4, 5))
        cache.commit(range(3))
    assert NETS * STATE < cache.parts[0].nbytes < 2 * NETS * STATE


def test_trees_take_one_launch_and_one_state_and_stay_without_drift(target):
    rng, tokens = np.random.default_rng(1), list(PROMPT)
    with emulated() as run:
        cache = fresh(target, tokens)
        for _ in range(30):
            tree, before = some_tree(rng, int(rng.integers(1, 9))), launches(run)
            logits, _ = target.forward(ids_of(tree), cache, Block.of(tree))
            mx.eval(logits)
            assert launches(run) == before + NETS
            path = path_to(tree, int(rng.integers(len(tree))))
            found = logits[path[-1]]
            cache.commit(path)
            tokens += tokens_on(tree, path)
        assert off(target, cache, tokens) < TOLERANCE
    with stock(target):
        alone = forward(target, target.new_cache(), tokens)[-1]
    assert mx.abs(alone - found).max().item() < TOLERANCE


def test_answers_are_plain_decodings(target):
    prompt = prompt_of(4, 20)
    with stock(target):
        plain = plain_answer(target, prompt, 80)
    drafter = oracle(prompt, plain, some_right(2))
    with emulated() as run:
        state = start(target, drafter, prompt)
        made = list(islice(rounds(target, drafter, state, 160), 24))
        said = [token for accepted in made for token in accepted.tokens]
        assert said == plain[: len(said)]
        kept = [(len(accepted.path), len(accepted.tree)) for accepted in made[1:]]
        assert any(path < rows for path, rows in kept) and any(path == rows for path, rows in kept)
        assert launches(run) == NETS * len(made)
        assert off(target, state.cache, prompt + said[:-1]) < TOLERANCE


@given(seed=st.integers(0, 10**6))
@settings(max_examples=4)
def test_passes_forks_and_ways_back_in_any_order_leave_the_state_of_the_tokens(seed):
    """Interrupts between a pass and its commit among them."""
    with emulated():
        walk = Walk(made(), seed)
        for _ in range(10):
            walk.step()
        walk.cache.discard()
        assert off(walk.target, walk.cache, walk.tokens) < TOLERANCE


@pytest.mark.parametrize("again", ["off", "on"])
def test_kernels_may_be_switched_between_a_pass_its_commit_and_the_next(target, again):
    rows = prompt_of(4, 5)
    tree = tree_of([1, 2, 3, 4], [-1, 0, 0, 2])
    with emulated():
        for passes in (0, 1):
            cache = fresh(target, PROMPT)
            forward(target, cache, rows)
            if passes:
                cache.commit(range(2))
            target.use_kernels(again)
            if not passes:
                cache.commit(range(2))
            target.forward(ids_of(tree), cache, Block.of(tree))
            target.use_kernels("on")
            cache.commit([0, 2])
            assert off(target, cache, [*PROMPT, *rows[:2], *tokens_on(tree, [0, 2])]) < TOLERANCE


def test_a_pass_of_a_copy_that_fails_behind_its_commit_leaves_the_state_it_began_from(
    target, monkeypatch
):
    """As a prefix that is kept, when the GPU fails in a round that nobody has waited for."""
    follow = RecurrentLayer.follow

    def failing(layer, net, products, left):
        follow(layer, net, products, [*left[:3], left[3] * np.nan, *left[4:]])

    with emulated():
        cache = fresh(target, PROMPT)
        other = cache.fork()
        with monkeypatch.context() as patch:
            patch.setattr(RecurrentLayer, "follow", failing)
            forward(target, other, [5])
            other.commit([0])
        assert off(target, cache, PROMPT) < TOLERANCE
        assert np.isnan(off(target, other, [*PROMPT, 5]))


def restored(target, cache):
    arrays, about = cache.saved()
    other = target.new_cache()
    other.restore((arrays, about))
    return other


def test_what_is_saved_is_the_state_behind_the_replayed_rows(target):
    rows = prompt_of(4, 5)
    with emulated():
        cache = fresh(target, PROMPT)
        forward(target, cache, rows)
        cache.commit(range(3))
        other = restored(target, cache)
        for each in (cache, other):
            assert off(target, each, PROMPT + rows[:3]) < TOLERANCE
            forward(target, each, rows)
            each.commit(range(1))
            assert off(target, each, PROMPT + rows[:3] + rows[:1]) < TOLERANCE


def test_sequences_side_by_side_replay_what_stays_of_their_own(target):
    with emulated() as run:
        assert target.joins
        caches = [fresh(target, prompt) for prompt in (PROMPT, prompt_of(7, 9))]
        said = [list(PROMPT), prompt_of(7, 9)]
        for kept in ((1, 3), (4, 0), (2, 2)):
            blocks = [prompt_of(i, 4) for i in kept]
            given = zip(blocks, caches, strict=True)
            before = launches(run)
            found = target.forward_all([Rows(mx.array(b), c, Block(4)) for b, c in given])
            mx.eval([logits for logits, _ in found])
            assert launches(run) == before + 2 * NETS
            for tokens, cache, block, rows in zip(said, caches, blocks, kept, strict=True):
                cache.commit(range(rows))
                tokens += block[:rows]
        for tokens, cache in zip(said, caches, strict=True):
            assert off(target, cache, tokens) < TOLERANCE


@pytest.mark.parametrize(
    "fault", ["nothing", "one row too many", "another's tape", "saved before", "not put back"]
)
def test_a_wrong_replay_is_noticed(target, fault, monkeypatch):
    after, settled = tape.Rows.after, tape.settled
    rows, others = prompt_of(4, 5), []

    def stays(layers_rows, cache, path):
        window, behind = after(layers_rows, cache, path)
        others.append(behind.tape)
        if fault == "one row too many":
            behind = Behind(behind.state, behind.tape._replace(path=[*path, path[-1] + 1]))
        if fault == "another's tape" and len(others) > NETS:
            behind = Behind(behind.state, others[-1 - NETS]._replace(path=path))
        return [window, behind]

    monkeypatch.setattr(tape.Rows, "after", stays)
    if fault == "saved before":
        early = lambda state: state.state if isinstance(state, Behind) else settled(state)  # noqa: E731
        monkeypatch.setattr("dflash_mlx.verifier.recurrent.settled", early)
    if fault == "not put back":
        put_back = "dflash_mlx.verifier.recurrent.RecurrentStates._put_back"
        monkeypatch.setattr(put_back, lambda states, back: None)
    with emulated():
        other = fresh(target, prompt_of(7, 9))
        forward(target, other, rows[::-1])
        other.commit(range(3))
        cache = fresh(target, PROMPT)
        said = list(PROMPT)
        for block in (rows, rows[::-1]):
            forward(target, cache, block)
            cache.discard()
            forward(target, cache, block)
            cache.commit(range(3))
            said += block[:3]
        saved = restored(target, cache)
        monkeypatch.undo()
        worst = max(off(target, each, said) for each in (cache, saved))
    assert worst < TOLERANCE if fault == "nothing" else worst > 0.01


def test_a_net_takes_two_launches_between_its_products(target, monkeypatch):
    tree = tree_of([1, 2, 3, 4], [-1, 0, 0, 2])
    for block, ids in ((Block(5), mx.arange(5)), (Block.of(tree), ids_of(tree))):
        with emulated() as run:
            cache = fresh(target, PROMPT)
            target.forward(ids, cache, block)  # what is settled at the first pass of a shape
            cache.discard()
            run.counters.clear()
            with monkeypatch.context() as patch:
                patch.setattr(mx, "conv1d", None)
                target.forward(ids, cache, block)
            assert [counters.kernel for counters in run.counters if "delta" in counters.kernel] == [
                "delta_inputs",
                "gated_delta",
            ] * NETS


def replayed_or_not(target, cache, block, tokens, path, monkeypatch, own_calls):
    """Logits of a pass and of the next one, and what is kept, by replayed layers or own calls."""
    with monkeypatch.context() as patch:
        if own_calls:
            patch.setattr(Segments, "begin", lambda segments, caches: None)
        first, _ = target.forward(tokens, cache, block)
        cache.commit(path)
        found = [first, forward(target, cache, [7, 8])]
        cache.commit(range(2))
        cache.rewind(cache.length - 1)
        states = [layer.cache for layer in cache.parts[0].parts]
        found += [array for convolved, state in states for array in (convolved, settled(state))]
        mx.eval(found)
    return found


@pytest.mark.parametrize("tree", [None, tree_of([1, 2, 3, 4], [-1, 0, 0, 2])])
def test_a_net_that_is_replayed_gives_and_leaves_the_bits_of_its_own_call(
    target, tree, monkeypatch
):
    block, tokens = (Block(4), mx.arange(4)) if tree is None else (Block.of(tree), ids_of(tree))
    path = [0, 1] if tree is None else [0, 2, 3]
    how = block, tokens, path, monkeypatch
    with emulated():
        cache = fresh(target, PROMPT)
        replayed_or_not(target, cache.fork(), *how, own_calls=False)  # what is settled first
        own = replayed_or_not(target, cache.fork(), *how, own_calls=True)
        with monkeypatch.context() as patch:
            patch.setattr(DeltaKernels, "__call__", None)
            ours = replayed_or_not(target, cache.fork(), *how, own_calls=False)
    assert [mx.array_equal(*pair).item() for pair in zip(ours, own, strict=True)] == [True] * 6


def test_heads_of_two_widths_are_left_to_mlx_lm():
    """Also where the mean of these is one that the kernels take."""
    two = {"linear_key_head_dim": 32, "linear_value_head_dim": 96}
    target = changed_target("qwen3_5", None, **{**HEADS, **two})
    target.use_kernels("on")
    with emulated() as run:
        cache = fresh(target, PROMPT)
        assert launches(run) == 0
        assert off(target, cache, PROMPT) < TOLERANCE


def test_a_net_whose_kernels_are_refused_keeps_its_products_once(target, monkeypatch):
    rows, chosen = prompt_of(4, 5), Kernels.chosen

    def others(kernels, operation, *given):
        return None if operation.name == "delta_net" else chosen(kernels, operation, *given)

    with monkeypatch.context() as patch, emulated() as run:
        patch.setattr(Kernels, "chosen", others)
        target.use_kernels("on")  # which makes the choices again
        cache = fresh(target, PROMPT)
        forward(target, cache, rows)
        kept = [len(ys) for call in cache.parts[0]._running.calls for ys in call.noted.values()]
        assert kept and set(kept) == {1}
        cache.commit(range(3))
        cache.rewind(len(PROMPT) + 2)
        assert launches(run) == 0
        assert off(target, cache, PROMPT + rows[:2]) < TOLERANCE
    target.use_kernels("on")


@pytest.mark.parametrize("rows", [1, 8])
def test_the_kernel_is_raced_with_what_mlx_lm_launches_and_agrees_with_it(rows):
    raced = tape.raced()
    args = arguments(raced, rows=rows, dim=64)
    with emulated():
        ours = raced.compared(raced.kernel(*args), *args)
    stocks = raced.compared(raced.reference(*args), *args)
    assert [apart(*pair) < 1e-5 for pair in zip(ours, stocks, strict=True)] == [True, True]
