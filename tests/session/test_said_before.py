"""Conversations draft from what others said, and answer as they would without."""

from itertools import count

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.block_diffusion import BestFirst
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.continuations.recall import BEFORE
from dflash_mlx.drafters.continuations.store import Store
from dflash_mlx.drafters.ngram import NGram
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session
from dflash_mlx.session.worker import Request, Worker
from dflash_mlx.verifier.pass_times import PassTimes
from support.decoding import scheduler_of, tokens_in
from support.law import LENGTH, VOCABULARY, ToyDrafter, law_distance
from support.stores import held
from support.toys import Letters, ToyTarget

FLAT = PassTimes((1, 4, 16, 64), (1.0, 1.0, 1.0, 1.0))


class Frozen(Store):
    def add(self, tokens, said=0.0):
        pass


def random_store(seed):
    """Texts of the toy's letters, most of them wrong."""
    store, rng = Frozen(), np.random.default_rng(seed)
    for _ in range(40):
        Store.add(store, rng.integers(VOCABULARY, size=12).tolist(), 1.0)
    assert store.wait(60)
    return store


class Told(BatchBudget):
    """Lets every sequence use a store, and counts the nodes that come from it."""

    store, seen = None, 0

    def propose(self, states, budget):
        for state in states:
            state.earlier = self.store
        proposals = super().propose(states, budget)
        self.seen += sum(p.tree.sources.count(BEFORE) for p in proposals)
        return proposals


def told(drafter, store, drafts):
    seconds = count()  # so that it does not depend on the machine how much is verified
    scope = Scope(("first", "lookup", BEFORE), drafts)
    found = Told(drafter, FLAT, scope, lambda: float(next(seconds)))
    found.store = store
    return found


KINDS = {
    "lookups": lambda store: told(NGram(), store, False),
    "beside a draft model": lambda store: told(BestFirst(ToyDrafter(1), None, 6), store, True),
}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_the_law_whatever_was_said_before(kind, temperature):
    target = ToyTarget(VOCABULARY, seed=3)
    drafter = KINDS[kind](random_store(1))
    config = DecodeConfig(sampling=SamplingConfig(temperature=temperature), max_tokens=LENGTH)
    assert law_distance(target, lambda sampling: drafter, 1500, config) < 4
    assert drafter.seen > 1000


def answers(target, drafter, prompts, store, **config):
    scheduler = scheduler_of(target)
    scheduler.drafter = lambda *_: drafter
    scheduler.pair = Pair(target, Letters())
    use = DecodeConfig(method="ngram", max_tokens=24, **config)
    found = []
    for prompt in prompts:
        sequence = scheduler.submit(prompt, use, None, store)
        found.append([d for _ in iter(lambda: len(scheduler), 0) for _, d in scheduler.step()])
        assert sequence.state.earlier is store
        if store is not None:
            assert store.wait(60)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_without_a_store_in_fewer_rounds(kind):
    target = ToyTarget(VOCABULARY, seed=5)
    prompts = [[1, 2, 3], [3, 0, 1], [1, 2, 3], [0, 3, 0, 1]] * 2
    without = answers(target, KINDS[kind](None), prompts, None)
    store = Store()
    drafter = KINDS[kind](store)
    found = answers(target, drafter, prompts, store)
    said = [[d.accepted for d in deltas] for deltas in found]
    usual = [[d.accepted for d in deltas] for deltas in without]
    assert [tokens_in(a) for a in said] == [tokens_in(a) for a in usual]
    assert drafter.seen and len(said[-1]) < len(usual[-1])


def test_what_a_session_said_the_next_one_drafts_and_without_a_store_nothing_is_kept():
    target, store = ToyTarget(30, seed=2), Store()
    pair, config = (
        Pair(target, Letters()),
        DecodeConfig(method="ngram", block_size=8, max_tokens=20),
    )
    first = collect(Session(pair, config, earlier=store).stream([1, 2, 3]))
    assert store.wait(60) and held(store) == 3 + 20
    deltas = [*Session(pair, config, earlier=store).stream([1, 2, 3])]
    again = collect(iter(deltas))
    assert again.tokens == first.tokens
    assert again.statistics.rounds < first.statistics.rounds
    trees = [d.accepted.tree for d in deltas]
    named = [(s, when) for tree in trees for s, when in zip(tree.sources, tree.said, strict=False)]
    assert any(s == BEFORE and when > 1e9 for s, when in named)
    assert collect(Session(pair, config).stream([1, 2, 3])).tokens == first.tokens


def test_requests_of_one_worker_use_their_own_stores():
    stores = [Store(), None, Store()]
    target, news = ToyTarget(30, seed=2), []
    worker = Worker(news.extend)
    pair, config = Pair(target, Letters()), DecodeConfig(method="ngram", block_size=8, max_tokens=9)
    worker.serve(lambda: replace_pair(scheduler_of(target), pair)).result()
    requests = [Request((1, 2, k), config, earlier=s) for k, s in enumerate(stores)]
    for request in requests:
        worker.submit(request)
    while sum(getattr(what, "finish_reason", None) is not None for _, what in [*news]) < 3:
        assert not any(isinstance(what, Exception) for _, what in [*news]), news
    assert worker.close(10)
    assert stores[0].wait(60) and stores[2].wait(60)
    begun = [next(array.texts()).tokens[:3].tolist() for s in stores[::2] for array in s._arrays]
    assert begun == [[1, 2, 0], [1, 2, 2]]


def replace_pair(scheduler, pair):
    scheduler.pair = pair
    return scheduler
