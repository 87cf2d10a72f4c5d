"""The worker's side of the chat on a tiny pair: sessions, reuse, races, refusals, memory."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from dflash_chat import memory
from dflash_chat.backend import Backend, Lane, verdict
from dflash_chat.engine import Cancelled, Engine, Question
from dflash_chat.messages import Answered, Failed, Loaded, Prefilled, RaceStep, RoundDone, Verdict
from dflash_chat.tree_view import FIRST, TARGET
from dflash_mlx import DecodeConfig, DFlashError, PairConfig, SamplingConfig, load
from dflash_mlx.engine.parity import Difference
from support.models import TEMPLATE, write_drafter, write_model

THINKING = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
CONFIG = DecodeConfig(max_tokens=12, method="dflash")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return {
        "model": str(write_model(root / "model", max_position_embeddings=400)),
        "thinking": str(write_model(root / "thinking", template=THINKING)),
        "drafter": str(write_drafter(root / "drafter")),
        "wide": str(write_drafter(root / "wide", hidden_size=128)),
    }


@pytest.fixture(scope="module")
def pair_config(folders):
    return PairConfig(folders["model"], folders["drafter"])


@pytest.fixture
def backend(pair_config):
    result = Backend()
    result.load(pair_config)
    return result


def question(*texts, config=CONFIG, system=None):
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    return Question(messages, system, config)


def answer(backend, asked):
    """All rounds of an answer and its text."""
    rounds = list(backend.answer(asked, lambda tokens, total: None))
    return rounds, "".join(done.text for done in rounds)


def test_an_answer_equals_plain_decoding_and_its_pieces_are_its_text(backend, pair_config):
    rounds, text = answer(backend, question("hello"))
    pair = load(pair_config.model)
    plain = Backend()
    plain._pair = pair
    _, expected = answer(plain, question("hello", config=replace(CONFIG, method="none")))
    assert text == expected
    pieces = [piece for done in rounds for piece in done.pieces]
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) == rounds[-1].figures.generated_tokens
    assert rounds[-1].finish_reason == "length"
    for done in rounds:
        assert done.pieces[-1].origin in (TARGET, FIRST)
        assert len(done.tree.texts) == len(done.tree.parents)
        accepted = [done.tree.texts[node] for node in done.tree.path[1:]]
        assert [p.text for p in done.pieces if p.origin == FIRST] == accepted[: len(done.pieces)]


def test_a_second_turn_computes_only_its_own_tokens_and_is_answered_as_without_reuse(backend):
    first, text = answer(backend, question("hello"))
    follow_up = question("hello", text, "and you?")
    second, again = answer(backend, follow_up)
    figures = second[-1].figures
    assert figures.reused_tokens >= first[-1].figures.prompt_tokens
    assert figures.new_tokens < figures.prompt_tokens / 2
    fresh = Backend()
    fresh._pair = backend._pair
    assert answer(fresh, follow_up)[1] == again


def test_other_sampling_keeps_the_caches_and_another_method_does_not(backend):
    _, text = answer(backend, question("hello"))
    warm = replace(CONFIG, max_tokens=5, sampling=SamplingConfig(temperature=0.5, seed=1))
    rounds, _ = answer(backend, question("hello", text, "on", config=warm))
    assert rounds[-1].figures.reused_tokens > 0
    assert rounds[-1].figures.generated_tokens == 5
    ngram = replace(CONFIG, method="ngram")
    rounds, _ = answer(backend, question("hello", text, "on", config=ngram))
    assert rounds[-1].figures.reused_tokens == 0


def test_an_answer_that_is_left_half_way_keeps_the_caches_usable(backend):
    with closing(backend.answer(question("hello"), lambda *_: None)) as rounds:
        partial = next(rounds).text + next(rounds).text
    rounds, text = answer(backend, question("hello", partial, "and you?"))
    assert rounds[-1].figures.reused_tokens > 0
    fresh = Backend()
    fresh._pair = backend._pair
    assert answer(fresh, question("hello", partial, "and you?"))[1] == text


def test_a_prefill_that_is_cancelled_keeps_what_it_has(backend):
    asked = question("x" * 200, config=replace(CONFIG, prefill_step=64))

    def stop(tokens, total):
        if tokens >= 128:
            raise Cancelled

    with pytest.raises(Cancelled):
        list(backend.answer(asked, stop))
    rounds, text = answer(backend, asked)
    assert rounds[-1].figures.reused_tokens == 128
    fresh = Backend()
    fresh._pair = backend._pair
    assert answer(fresh, asked)[1] == text


def test_a_thought_that_the_template_opens_is_opened_in_the_text(folders):
    backend = Backend()
    backend.load(PairConfig(folders["thinking"], folders["drafter"]))
    _, text = answer(backend, question("hello"))
    assert text.startswith("<think>")
    assert not text[7:].startswith("<think>")


@pytest.mark.parametrize(
    ("config", "asked", "sentence"),
    [
        (CONFIG, question("x" * 500), "but .* can hold 400 with the answer; shorten the prompt"),
        (CONFIG, question("hello", config=DecodeConfig(block_size=99)), "block_size is 99"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence_and_the_session_goes_on(
    backend, config, asked, sentence
):
    _, before = answer(backend, question("hello", config=config))
    with pytest.raises(DFlashError, match=sentence):
        answer(backend, asked)
    assert answer(backend, question("hello", config=config))[1] == before


def test_without_a_model_there_is_a_next_step():
    with pytest.raises(DFlashError, match="no model is loaded; choose one with /model"):
        answer(Backend(), question("hello"))


def test_a_drafter_that_does_not_fit_leaves_the_old_pair(backend, folders):
    _, before = answer(backend, question("hello"))
    with pytest.raises(DFlashError, match="was made for a target with hidden_size 128"):
        backend.load(PairConfig(folders["model"], folders["wide"]))
    assert answer(backend, question("hello"))[1] == before


def test_a_model_larger_than_memory_is_refused_before_it_is_read(backend, folders, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(DFlashError, match=r"needs about .* GB of memory, and 0.00 GB are there"):
        backend.load(PairConfig(folders["model"]))


def test_drafters_count_as_memory_that_is_needed(backend, folders, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: memory.needed(Path(folders["model"])))
    assert backend.load(PairConfig(folders["model"])).means.drafters == 0
    with pytest.raises(DFlashError, match=r"needs about .* GB of memory"):
        backend.load(PairConfig(folders["model"], folders["drafter"]))


def test_a_race_decodes_both_ways_and_compares_every_token(backend):
    steps = list(backend.race(question("hello")))
    ends = {step.side: step for step in steps if isinstance(step, RaceStep) and step.finished}
    assert ends["plain"].tokens == ends["drafted"].tokens == 12
    assert all(step.seconds > 0 for step in ends.values())
    assert isinstance(steps[-1], Verdict)
    assert steps[-1].equal
    assert steps[-1].text.startswith("All 12 tokens are the same. ")
    texts = {
        side: "".join(s.text for s in steps if isinstance(s, RaceStep) and s.side == side)
        for side in ends
    }
    assert texts["plain"] == texts["drafted"] == answer(backend, question("hello"))[1]


def test_a_sampled_race_draws_both_sides_from_one_seed(backend):
    sampled = replace(CONFIG, sampling=SamplingConfig(temperature=0.9))
    *_, last = backend.race(question("hello", config=sampled))
    assert isinstance(last, Verdict)
    assert last.equal


def test_a_session_that_draws_its_drafts_is_made_anew_for_other_sampling(backend):
    for temperature, reused in ((0.5, False), (0.5, True), (0.9, False)):
        sampling = SamplingConfig(temperature=temperature)
        rounds, _ = answer(backend, question("hello", config=replace(CONFIG, sampling=sampling)))
        assert (rounds[-1].figures.reused_tokens > 0) == reused


def test_a_race_by_rejection_is_refused_because_nothing_could_be_compared(backend):
    sampling = SamplingConfig(temperature=0.9)
    drawn = replace(CONFIG, sampling=sampling, acceptance="reject")
    with pytest.raises(DFlashError, match="set acceptance to match in /settings"):
        list(backend.race(question("hello", config=drawn)))


def test_a_race_of_plain_against_plain_is_refused(backend):
    with pytest.raises(DFlashError, match="choose another /method"):
        list(backend.race(question("hello", config=replace(CONFIG, method="none"))))


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        (None, "All 10 tokens are the same. 2.00 times as fast"),
        (Difference(3, 1e-5), "up to token 3, where two tokens are all but tied (logits 1.0e-05"),
        (Difference(3, 0.7), "with logits 0.70 apart, which is no tie: please report it"),
        (Difference(3, None), "one answer ends there"),
    ],
)
def test_a_verdict_says_what_is_the_same_and_what_is_not(difference, sentence):
    plain = Lane("plain", iter(()), list(range(10)), 2.0, True)
    drafted = Lane("drafted", iter(()), list(range(10)), 1.0, True)
    result = verdict(plain, drafted, difference)
    assert sentence in result.text
    assert result.equal == (difference is None)


def test_plain_decoding_is_measured_once_and_remembered(backend, monkeypatch):
    calls = []

    def times(target):
        calls.append(target)
        return SimpleNamespace(of=lambda rows: mx.array(0.25))

    monkeypatch.setattr("dflash_chat.backend.stored_times", times)
    assert backend.plain_seconds() == 0.25
    assert backend.plain_seconds() == 0.25
    assert len(calls) == 1


def test_a_model_whose_passes_cannot_be_timed_has_no_ratio(backend, monkeypatch):
    def refuse(target):
        raise DFlashError("it computes with one position", "use chains")

    monkeypatch.setattr("dflash_chat.backend.stored_times", refuse)
    assert backend.plain_seconds() is None


def test_the_engine_tells_everything_in_order_and_ends(pair_config):
    said = []
    engine = Engine(Backend(), said.append)
    engine.load(pair_config)
    job = engine.ask(question("hello"))
    engine.ask(question("x" * 500))
    assert engine.close(60)
    kinds = [type(message) for message in said]
    assert kinds[:2] == [Loaded, Prefilled]
    assert kinds[-2:] == [Answered, Failed]
    assert RoundDone in kinds
    assert all(m.job == job.number for m in said if isinstance(m, RoundDone | Answered))
    assert said[-2].ending == "length"
    assert "shorten the prompt" in said[-1].problem


def test_a_job_cancelled_before_it_starts_ends_in_its_first_pass(pair_config):
    said = []
    engine = Engine(Backend(), said.append)
    engine.load(pair_config)
    engine.ask(question("hello")).cancelled.set()
    assert engine.close(60)
    assert not any(isinstance(message, RoundDone) for message in said)
    assert said[-1].ending == "stopped"
