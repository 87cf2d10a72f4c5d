"""What a leader does with a model and its caches, followers do again from what they are told."""

from __future__ import annotations

import gc
import json
import signal
from collections import deque

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.tree import Tree
from dflash_mlx.ranks import RanksLost
from dflash_mlx.ranks.group import END, Ranks
from dflash_mlx.ranks.target import Follower, Leader, LedCache
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import Rows, SequenceCache
from support.families import VOCAB_SIZE, make_model

TREE = Tree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1, 2))


class Line(Ranks):
    """Ranks of which one tells and another hears, in one process. fails: how many others did."""

    def __init__(self, rank: int, told: deque[str]) -> None:
        super().__init__(mx.distributed.init())
        self.rank, self.told, self.fails = rank, told, 0

    def share(self, value=None, root=0):
        if self.rank == root:
            self.told.append(json.dumps(value))
            return value
        return json.loads(self.told.popleft()) if self.told else [[END]]

    def _total(self, number):
        return number + self.fails


def pair_of(family: str) -> tuple[Leader, Line, Follower]:
    lines = [Line(rank, told) for told in (deque(),) for rank in range(2)]
    leader = Leader(make_model(family), 200, family, lines[0])
    return leader, lines[0], Follower(Target(make_model(family), 200, family), lines[1])


def work(leader: Leader, seed: int) -> list[LedCache]:
    """Passes, trees, forests, forks, ways back: whatever is done with caches, in random order."""
    rng = np.random.default_rng(seed)
    caches = []
    for _ in range(30):
        deed = rng.integers(6)
        if deed == 0 or not caches:
            caches.append(cache := leader.new_cache())
            read(leader, cache, rng)
        cache = caches[rng.integers(len(caches))]
        if deed == 1:
            trees = leader.takes_trees
            block = Block.of(TREE if trees else Tree.chain(range(5, 10)))
            leader.forward(mx.array(rng.integers(VOCAB_SIZE, size=6)), cache, block)
            cache.commit([0, 2, 5] if trees else [0, 1])
        elif deed == 2:
            caches.append(cache.fork())
        elif deed == 3:
            cache.rewind(cache.nearest(int(rng.integers(cache.length + 1))))
            read(leader, cache, rng)
        elif deed == 4 and len(caches) > 1:
            some = {id(c): c for c in (caches[0], caches[-1])}.values()
            rows = [Rows(mx.array([3, 4]), each, Block(2)) for each in some]
            leader.forward_all(rows)
            for each in rows:
                each.cache.commit([0])
        elif deed == 5:
            leader.forward(mx.array([1, 2, 3]), cache, Block(3))
            cache.discard()
    return caches


def read(leader: Leader, cache: LedCache, rng: np.random.Generator) -> None:
    rows = int(rng.integers(1, 12))
    tokens = mx.array(rng.integers(VOCAB_SIZE, size=rows))
    leader.forward(tokens, cache, Block(rows, last_only=True))
    cache.commit(range(rows))
    cache.mark_chunk()
    cache.mark(cache.length - 1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("seed", range(3))
def test_caches_of_followers_hold_what_the_leader_s_hold(family, seed):
    leader, line, follower = pair_of(family)
    caches = work(leader, seed)
    leader.forward(mx.array([5]), leader.new_cache(), Block(1))  # with it the last orders travel
    follower.replay()
    assert len(caches) > 3
    for cache in caches:
        other = follower.caches[cache.number]
        assert other.length == cache.length
        (own, about), (its, its_about) = (SequenceCache.saved(each) for each in (cache, other))
        assert (about, len(own)) == (its_about, len(its))
        for one, two in zip(own, its, strict=True):
            np.testing.assert_allclose(one, two, atol=2e-5)


def test_a_commit_travels_with_the_next_pass_and_a_dropped_cache_is_dropped():
    leader, line, follower = pair_of("llama")
    cache = leader.new_cache()
    leader.forward(mx.array([1, 2]), cache, Block(2))
    told = len(line.told)
    cache.commit([0, 1])
    leader.forward(mx.array([3]), cache, Block(1))
    assert len(line.told) == told + 1
    del cache
    gc.collect()
    leader.forward(mx.array([3]), leader.new_cache(), Block(1))
    assert ["drop", 1] in json.loads(line.told[-1])  # 0 was made to see what kind they are
    follower.replay()


def test_a_pass_that_fails_on_both_is_taken_back():
    leader, _, follower = pair_of("ministral3")
    cache = leader.new_cache()
    for _ in range(2):
        with pytest.raises(Exception, match="mismatching"):
            leader.forward(mx.array([1] * 6), cache, Block.of(TREE))
    leader.forward(mx.array([1]), cache, Block(1))
    follower.replay()
    assert follower.caches[cache.number].arrays


def test_a_pass_that_fails_once_begun_or_on_one_rank_alone_is_the_end_of_both(monkeypatch):
    leader, line, follower = pair_of("llama")

    def broken(*given):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="several machines"):
        leader.new_cache().saved()
    with monkeypatch.context() as patch, pytest.raises(RanksLost, match="rank 0: out of memory"):
        patch.setattr(mx, "async_eval", broken)
        leader.forward(mx.array([1]), leader.new_cache(), Block(1))
    leader, line, follower = pair_of("llama")
    leader.forward(mx.array([1]), leader.new_cache(), Block(1))
    follower.ranks.size = line.size = 2
    monkeypatch.setattr(follower.target, "forward", broken)
    with pytest.raises(RanksLost, match="out of memory"):
        follower.replay()
    line.fails = 1
    with pytest.raises(RanksLost, match="failed on some"):
        leader.forward(mx.array([1]), leader.new_cache(), Block(1))


def test_an_interrupt_waits_until_a_pass_has_begun_on_all_ranks():
    ranks, handler = Line(0, deque()), signal.getsignal(signal.SIGINT)

    def prepare():
        signal.raise_signal(signal.SIGINT)
        return [(mx.array(1), None)]

    with pytest.raises(KeyboardInterrupt):
        ranks.run_pass(list, prepare)
    assert ranks._last[0].item() == 1, "the others wait for its sums"
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_goes_wrong_in_a_pass_is_told_though_it_was_interrupted():
    ranks, handler = Line(0, deque()), signal.getsignal(signal.SIGINT)

    def prepare():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        ranks.run_pass(list, prepare)
    assert signal.getsignal(signal.SIGINT) is handler
