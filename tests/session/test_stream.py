"""Text, stops and turns, on a tokenizer whose tokens are bytes and words."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer

from dflash_mlx.client import SplitText, split_thinking
from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.statistics import Observer
from dflash_mlx.drafters.methods import drafting_of
from dflash_mlx.engine.delta import StopText, collect, opens_thought
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.verifier.model import Target
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.models import write_tokenizer
from support.toys import Letters, Scripted, ToyTarget, prompt_of

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


def read(rounds, stops=(), ends=(0,), least=0):
    """Text per round and the tokens kept, as `Session.stream` does it."""
    text, pieces, kept = StopText(ByteTokenizer(), stops, ends, least), [], []
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


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("tokens", "least", "said", "kept"),
    [
        ([10, 2, 10, 2], 0, "", 1),
        ([10, 2, 10, 2], 1, "stopb", 3),
        ([10, 2, 10, 2], 2, "stopb", 3),
        ([10, 2, 10, 2], 3, "stopbstopb", 4),
        ([8, 9, 2, 10], 1, "", 2),  # it began early, and ends in time
        ([8, 9, 2, 10], 2, "stopb", 4),
        ([1, 8, 2, 8, 9], 4, "astob", 5),
    ],
)
def test_a_stop_text_among_the_least_tokens_ends_nothing(tokens, least, said, kept, size):
    rounds = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    pieces, found, _ = read(rounds, ("stop",), least=least)
    assert ("".join(pieces), len(found)) == (said, kept)


def test_other_tokens_may_end_an_answer_and_an_end_that_is_ignored_is_not_told():
    assert read([[1, 0, 2]], ends=()) == (["ab"], [1, 0, 2], False)
    assert read([[1, 0, 2, 1]], ends=(2,)) == (["a"], [1, 0, 2], True)
    sampling = SamplingConfig(stop_token_ids=(5, 6))
    assert sampling.ends({0}) == {0, 5, 6}
    assert replace(sampling, ignore_eos=True).ends({0}) == {5, 6}


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
        session.drafters[session.pair.target, drafting_of(session.config)] = Scripted(
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
    statistics, session, taken = None, toy_session({"max_tokens": 9}), 0.0
    for delta in session.stream([1, 2]):
        statistics = delta.statistics
        now[0] += 5.0
        taken += 5.0
    assert statistics.decode_seconds < 1
    assert statistics.time_to_first_token < 1
    assert taken <= session.state.paused < taken + 1, "which drafters do not count either"


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


# Prompts as small templates of the two usual shapes render them.

TURNS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.split('</think>')[-1] }}{% if not loop.last %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
)
SHAPES = {  # what stands after the last turn when thinking is on, off and left to the template
    "thinks on its own": (
        TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
        "<think></think>{% endif %}{% endif %}",
        {True: "", False: "<think></think>", None: ""},
    ),
    "opens the thought": (
        TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
        "<think></think>{% else %}<think>{% endif %}{% endif %}",
        {True: "<think>", False: "<think></think>", None: "<think>"},
    ),
}


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_ends_as_the_template_argument_asks(tmp_path, shape, thinking):
    template, endings = SHAPES[shape]
    write_tokenizer(tmp_path, template)
    file = str(tmp_path / "tokenizer.json")
    tokens = Tokenizer.from_file(file)
    tokens.add_tokens(["<think>", "</think>"])  # without them mlx-lm turns thinking off
    tokens.save(file)
    tokenizer = load_tokenizer(tmp_path)
    said = [("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d")]
    messages = [{"role": role, "content": content} for role, content in said]
    arguments = None if thinking is None else {"enable_thinking": thinking}
    prompt, ending = prompt_tokens(tokenizer, messages, template=arguments), endings[thinking]
    assert tokenizer.decode(prompt) == f"[user]a [assistant]c [user]d[assistant]{ending}"
    assert opens_thought(tokenizer, prompt) == (ending == "<think>")


# The drafter's context stays in step with the target's cache, whatever happens to an answer.
#
# Emitted tokens are the target's own, so a wrong context would show in none of them; it would only
# be accepted less. So the contexts themselves are compared with fresh ones.


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.fixture(params=["llama", "gemma3_text"])
def target_name(request):
    return request.param


@pytest.fixture(params=[{}, SLIDING], ids=["full", "sliding"])
def pair(request, target_name, tmp_path):
    target = Target(make_model(target_name), 512, target_name)
    model = drafter_folder(tmp_path, [0, 1, 2], 1, target, **request.param)
    return Pair(target, Letters(), (model,), "tiny")


def assert_in_step(session):
    """The context has every committed token and drafts what a fresh one would."""
    state = session.state
    committed = state.tokens[: state.position]
    assert state.context.length == state.position == len(committed)
    fresh = Session(session.pair, session.config)
    anchor = 7
    next(fresh.stream([*committed, anchor], Observer()))
    fresh.state.trim(len(committed))
    for either in (state, fresh.state):
        either.anchor = mx.array([anchor])
    model = session.pair.drafters[0]
    ours = np.array(model.logits(state.context, state.anchor, 8))
    expected = np.array(model.logits(fresh.state.context, fresh.state.anchor, 8))
    assert np.abs(ours - expected).max() < 1e-4


@pytest.mark.parametrize("least", [1, 7])
def test_after_an_abandoned_answer_and_its_continuation(pair, least):
    for method in ("dflash", "none"):
        session = Session(pair, DecodeConfig(method, max_tokens=30))
        prompt, said = prompt_of(0, 25), []
        for delta in session.stream(prompt):
            said += delta.tokens
            if len(said) >= least:
                break
        assert session.state.tokens[: 25 + len(said)] == prompt + said
        if method == "dflash":
            assert_in_step(session)
        more = prompt + said + prompt_of(1, 9)
        plain = Session(pair, DecodeConfig("none", max_tokens=30)).stream(more)
        assert collect(session.stream(more)).tokens == collect(plain).tokens
        if method == "dflash":
            assert_in_step(session)


def test_after_a_stop_token_or_a_stop_text(pair):
    prompt = prompt_of(0, 25)
    whole = collect(Session(pair, DecodeConfig("dflash", max_tokens=30)).stream(prompt)).tokens
    text = pair.tokenizer.decode([whole[9]])
    stopped = Session(pair, DecodeConfig("dflash", max_tokens=30, stop=(text,)))
    list(stopped.stream(prompt))
    assert_in_step(stopped)
    pair.tokenizer.eos_token_ids = {whole[9]}
    ended = Session(pair, DecodeConfig("dflash", max_tokens=30))
    list(ended.stream(prompt))
    assert_in_step(ended)
    at = whole.index(whole[9])
    assert ended.state.position == stopped.state.position == len(prompt) + at


def test_after_a_whole_answer_and_an_edited_conversation(pair):
    session = Session(pair, DecodeConfig("dflash", max_tokens=12))
    prompt = prompt_of(0, 25)
    list(session.stream(prompt))
    assert session.state.position == 25 + 11
    assert_in_step(session)
    edited = [*prompt[:20], *prompt_of(2, 8)]
    (*_, last) = session.stream(edited)
    assert last.statistics.reused_tokens in (0, 20)
    assert_in_step(session)


def test_after_an_interrupt_inside_a_round(pair, monkeypatch):
    session = Session(pair, DecodeConfig("dflash", max_tokens=12))
    deltas = session.stream(prompt_of(0, 25))
    next(deltas)
    monkeypatch.setattr(type(session.state.context), "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(deltas)
    monkeypatch.undo()
    assert session.state.position == 0
    list(session.stream(prompt_of(0, 25)))
    assert_in_step(session)


def interrupt(*_):
    raise KeyboardInterrupt
