"""Log-probabilities of a prompt's tokens: those of one plain pass, however the prompt was read."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import drafting_of
from dflash_mlx.engine.delta import LEAST, collect, logprobs_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from support.decoding import Strict, finish
from support.hybrids import target_of
from support.toys import Letters, prompt_of

PROMPT = prompt_of(3, 140)


def asked(**more) -> DecodeConfig:
    return DecodeConfig("none", **{"max_tokens": 3, "prompt_logprobs": 2, **more})


def check(told, target: Target, prompt=PROMPT) -> None:
    """These are what one pass over the prompt says of its tokens."""
    logits = target.forward(mx.array(prompt), target.new_cache(), Block(len(prompt)))[0]
    rows = np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(mx.float32))
    assert [each.token for each in told] == [*prompt]
    assert (told[0].logprob, told[0].top) == (None, ())
    for each, row in zip(told[1:], rows, strict=False):
        assert each.logprob == pytest.approx(row[each.token], abs=1e-3)
        assert [p for _, p in each.top] == pytest.approx(np.sort(row)[::-1][:2], abs=1e-3)
        assert all(p == pytest.approx(row[token], abs=1e-3) for token, p in each.top)


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "gemma3_text"])
@pytest.mark.parametrize("step", [1, 7, 512])
def test_chunks_of_any_size_say_what_one_pass_says(family, step):
    pair = Pair(target_of(family), Letters())
    first, *rest = Session(pair, asked(prefill_step=step)).stream(PROMPT)
    check(first.prompt_logprobs, pair.target)
    assert not any(delta.prompt_logprobs for delta in rest)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_neighbours_and_prefixes_change_nothing_and_are_not_changed(family, monkeypatch):
    pair = Pair(target_of(family), Letters())
    others = [prompt_of(i, 20) for i in range(2)]
    prefixes = PrefixCache(10**9)
    scheduler = Scheduler(pair, observer=Strict(), prefixes=prefixes)
    scheduler.submit(PROMPT, DecodeConfig("none", max_tokens=2))
    finish(scheduler)
    monkeypatch.setattr(scheduler, "_bearable", lambda *_: 11)
    plain = DecodeConfig("ngram", max_tokens=60)
    beside = [scheduler.submit(prompt, plain) for prompt in others]
    scheduler.step()
    told, alike, also = (
        scheduler.submit(PROMPT, config) for config in (asked(), plain, asked(exact=True))
    )
    said = finish(scheduler)
    for each in (told, also):
        check(said[each][0].prompt_logprobs, pair.target)
        assert each.statistics.reused_tokens == 0
    assert alike.statistics.reused_tokens == len(PROMPT) - 1, "as nobody asked it for them"
    for each, prompt in zip(beside, others, strict=True):
        alone = collect(Session(pair, plain).stream(prompt)).tokens
        assert collect(iter(said[each])).tokens == alone[-len(collect(iter(said[each])).tokens) :]
    usual = replace(told.config, prompt_logprobs=None, reads_only=True)
    assert drafting_of(told.config) == drafting_of(usual), "so they share a drafter"


@pytest.mark.parametrize("steps", [2, 9])
def test_one_that_was_preempted_tells_each_token_once(steps):
    pair = Pair(target_of("llama"), Letters())
    scheduler = Scheduler(pair, observer=Strict(), prefixes=PrefixCache(10**9))
    sequence = scheduler.submit(PROMPT, asked(max_tokens=9, prefill_step=30))
    deltas = [said for _ in range(steps) for _, said in scheduler.step()]
    scheduler.running.remove(sequence)
    sequence.preempt()
    scheduler.waiting.append(sequence)
    deltas += finish(scheduler)[sequence]
    check(deltas[0].prompt_logprobs, pair.target)
    alone = collect(Session(pair, asked(max_tokens=9)).stream(PROMPT))
    assert collect(iter(deltas)).tokens == alone.tokens


def test_no_more_logits_than_a_few_rows_are_made_at_a_time(monkeypatch):
    target, made = target_of("llama"), []
    forward = Target.forward

    def watched(self, *given):
        made.append(forward(self, *given))
        return made[-1]

    monkeypatch.setattr(Target, "forward", watched)
    prompt = prompt_of(4, 700)
    answer = [*Session(Pair(target, Letters()), asked()).stream(prompt)]
    assert len(answer[0].prompt_logprobs) == 700
    assert max(logits.shape[0] for logits, _ in made) == 128
    made.clear()
    collect(Session(Pair(target, Letters()), DecodeConfig("none", max_tokens=3)).stream(prompt))
    assert {logits.shape[0] for logits, _ in made} == {1}


@pytest.mark.parametrize("exact", [False, True])
def test_a_prompt_can_be_read_without_an_answer(exact):
    pair = Pair(target_of("llama"), Letters())
    scheduler = Scheduler(pair, prefixes=PrefixCache(10**9))
    read = scheduler.submit(PROMPT, asked(reads_only=True, exact=exact, logprobs=1))
    (delta,) = finish(scheduler)[read]
    assert (delta.text, delta.tokens, delta.finish_reason) == ("", (), "length")
    assert (delta.logprobs, len(delta.prompt_logprobs)) == ((), len(PROMPT))
    assert read.statistics.generated_tokens == 0 == read.statistics.tokens_per_second
    after = scheduler.submit(PROMPT, DecodeConfig("none", max_tokens=2))
    finish(scheduler)
    assert after.statistics.reused_tokens == (0 if exact else len(PROMPT) - 1)


def test_the_likeliest_come_in_order_and_of_equal_ones_the_first():
    row = mx.array([[0.0, 3.0, 2.0, 3.0, -mx.inf, 1.0]])
    ((one,), (all_of_them,)) = (logprobs_of([4], row, most) for most in (3, 99))
    assert [token for token, _ in one.top] == [1, 3, 2] and one.logprob == LEAST
    assert [token for token, _ in all_of_them.top] == [1, 3, 2, 5, 0, 4]
    assert logprobs_of([], row, 3) == () == logprobs_of([1], None, 3)


def test_wrong_numbers_are_refused():
    for wrong in (-1, 1.0, True):
        with pytest.raises(DFlashError, match="prompt_logprobs"):
            DecodeConfig(prompt_logprobs=wrong)
