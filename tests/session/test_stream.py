"""Text, stops and turns, on a tokenizer whose tokens are bytes and words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

from dflash_mlx.client import SplitText, split_thinking
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import drafting_of
from dflash_mlx.engine.delta import StopText, collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session
from support.toys import Scripted, ToyTarget

WORDS = ["<end>", "a", "b", "ab", "abc", " ", "\n", "é", "sto", "p", "stop"]


class ByteTokenizer:
    """Words, then the three bytes of the euro sign and a comma; 0 ends the answer."""

    eos_token_ids = {0}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [14 if c == "," else WORDS.index(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        known = [word.encode() for word in WORDS] + [b"\xe2", b"\x82", b"\xac", b","]
        return b"".join(known[i] for i in ids).decode("utf-8", "replace")

    @property
    def detokenizer(self) -> NaiveStreamingDetokenizer:
        return NaiveStreamingDetokenizer(self)


def read(rounds, stops=()):
    """Text per round and the tokens kept, as `Session.stream` does it."""
    text, pieces, kept = StopText(ByteTokenizer(), stops), [], []
    for i, tokens in enumerate(rounds):
        kept += text.take(tokens)
        last = text.stopped or i == len(rounds) - 1
        pieces.append(text.read(last))
        if last:
            break
    return pieces, kept, text.stopped


@pytest.mark.parametrize(
    ("rounds", "stops", "pieces", "kept", "stopped"),
    [
        ([[1, 2], [3]], (), ["ab", "ab"], [1, 2, 3], False),
        ([[1, 0, 2], [3]], (), ["a"], [1, 0], True),
        ([[0]], (), [""], [0], True),
        ([[1, 8], [9, 2]], ("stop",), ["a", ""], [1, 8, 9], True),
        ([[1, 8], [2, 2]], ("stop",), ["a", "stobb"], [1, 8, 2, 2], False),
        ([[1, 8]], ("stop",), ["asto"], [1, 8], False),
        ([[1, 10, 2]], ("stop",), ["a"], [1, 10], True),
        ([[4, 2]], ("b", "c"), ["a"], [4], True),
        ([[1], [2], [4]], ("bab",), ["a", "", ""], [1, 2, 4], True),
        ([[3, 3]], ("ba", "abab"), [""], [3, 3], True),
        ([[11], [12], [13, 1]], (), ["", "", "€a"], [11, 12, 13, 1], False),
        ([[11], [12, 13]], ("€",), ["", ""], [11, 12, 13], True),
        ([[11, 12]], (), ["\ufffd"], [11, 12], False),
    ],
)
def test_text_comes_out_as_soon_as_it_is_certain_and_stops_are_cut(
    rounds, stops, pieces, kept, stopped
):
    assert read(rounds, stops) == (pieces, kept, stopped)


tokens_and_cuts = st.lists(st.tuples(st.integers(1, 13), st.booleans()), min_size=1, max_size=25)


@given(tokens_and_cuts, st.lists(st.sampled_from(["ab", "stop", "b ", "€", "ba"]), max_size=2))
def test_rounds_of_any_size_give_the_text_of_one_token_at_a_time(tokens, stops):
    rounds = [[]]
    for token, cut in tokens:
        rounds[-1].append(token)
        if cut:
            rounds.append([])
    whole, kept, stopped = read(rounds, stops)
    single, single_kept, single_stopped = read([[token] for token, _ in tokens], stops)
    assert "".join(whole) == "".join(single)
    assert (kept, stopped) == (single_kept, single_stopped)
    full = ByteTokenizer().decode([token for token, _ in tokens])
    found = [full.find(stop) for stop in stops if stop in full]
    assert "".join(whole) == (full[: min(found)] if found else full)


def toy_session(config, drafted=()):
    """A session on the toy target whose drafter proposes `drafted` as far as there is room."""
    pair = Pair(ToyTarget(14), ByteTokenizer())
    session = Session(pair, DecodeConfig(method="none", **config))
    if drafted:
        session.drafters[drafting_of(session.config)] = Scripted(
            lambda tokens, remaining: (
                list(drafted)[: remaining - 1],
                list(range(len(drafted)))[: remaining - 1],
            )
        )
    return session


def test_the_last_delta_alone_carries_the_reason_and_the_deltas_make_the_answer():
    deltas = list(toy_session({"max_tokens": 9}).stream([1, 2]))
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    answer = collect(iter(deltas))
    assert answer.finish_reason in ("length", "stop")
    assert answer.text == "".join(d.text for d in deltas)
    assert answer.statistics.generated_tokens == len(answer.tokens)


@pytest.mark.parametrize("stop", ["a", "b", "ab", "stop", "é"])
def test_a_stop_text_ends_drafted_and_plain_answers_at_the_same_token(stop):
    plain = collect(toy_session({"max_tokens": 40}).stream([1, 2]))
    cut = collect(toy_session({"max_tokens": 40, "stop": (stop,)}).stream([1, 2]))
    for drafted in [plain.tokens[:7], (1, 2, 3)]:
        session = toy_session({"max_tokens": 40, "stop": (stop,)}, drafted)
        other = collect(session.stream([1, 2]))
        assert (other.text, other.tokens) == (cut.text, cut.tokens)
        assert other.finish_reason == cut.finish_reason
        assert session.state.tokens == [1, 2, *other.tokens][:-1], "the caches hold no more"
    if stop in plain.text:
        assert cut.text == plain.text[: plain.text.index(stop)]
        assert cut.finish_reason == "stop"


def test_time_that_the_caller_takes_is_not_decoding_time(monkeypatch):
    clock = iter(range(10**6))
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0] + 1e-9 * next(clock))
    statistics = None
    for delta in toy_session({"max_tokens": 9}).stream([1, 2]):
        statistics = delta.statistics
        now[0] += 5.0
    assert statistics.decode_seconds < 1
    assert statistics.time_to_first_token < 1


@pytest.mark.parametrize(("tokens", "what"), [([], "empty"), ([1] * 64, "64 tokens")])
def test_a_prompt_that_cannot_be_answered_is_refused_before_any_work(tokens, what):
    session = toy_session({})
    with pytest.raises(DFlashError, match=what):
        next(session.stream(tokens))
    assert session.state.position == 0


@pytest.mark.parametrize(("length", "most", "reason"), [(63, 9, "context"), (1, 1, "length")])
def test_an_answer_of_one_token_takes_no_round(length, most, reason):
    session = toy_session({"max_tokens": most}, drafted=(9, 1, 1))
    session.pair.tokenizer.eos_token_ids = set()
    (only,) = session.stream([1] * length)
    assert (only.finish_reason, len(only.tokens)) == (reason, 1)
    assert (only.statistics.rounds, only.statistics.acceptance_length) == (0, 0.0)
    assert only.statistics.time_to_first_token > 0
    assert session.state.position == length


def test_statistics_count_rounds_and_positions():
    session = toy_session({"max_tokens": 6}, drafted=(9, 1, 1))
    session.pair.tokenizer.eos_token_ids = set()
    deltas = list(session.stream([1, 2]))
    rounds, statistics = [delta.accepted for delta in deltas], deltas[-1].statistics
    assert statistics.accepted.total() == sum(len(r.path) - 1 for r in rounds) > 0
    assert statistics.rounds == len(rounds) - 1  # the first token came with the prompt's pass
    assert statistics.drafted[1] == sum(len(r.tree) > 1 for r in rounds)
    assert statistics.mean_accepted == 5 / statistics.rounds


# Thoughts are told from the answer, however their text arrives.


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("plain", "", "plain"),
        ("<think>why</think>so", "why", "so"),
        ("a<think>b</think>c<think>d</think>e", "bd", "ace"),
        ("<think>never closed", "never closed", ""),
        ("opened before</think>so", "opened before", "so"),
        ("1 < 2 <thin> air", "", "1 < 2 <thin> air"),
        ("ends with <thi", "", "ends with <thi"),
    ],
)
def test_thoughts_are_told_from_the_answer(text, thought, answer):
    assert split_thinking(text) == SplitText(thought, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "a", "</"])))
def test_the_parts_of_a_growing_text_only_grow(parts):
    text, before = "".join(parts), SplitText()
    for end in range(len(text) + 1):
        for ended in (False, end == len(text)):
            now = split_thinking(text[:end], inside=False, ended=ended)
            assert now.thought.startswith(before.thought)
            assert now.answer.startswith(before.answer)
            before = now
