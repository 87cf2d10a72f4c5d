"""Behind so many tokens of thought only its end may follow, and draws under that keep the law."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BestFirst, BlockDiffusion, DrawnBlock
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.grammar import FORCED, Constraint
from dflash_mlx.engine.sequence import constraint_of
from dflash_mlx.engine.thoughts import ThoughtLimit, Thoughts
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.model import Target
from support.decoding import Strict, finish
from support.families import make_model
from support.grammars import tiny_tokenizer
from support.law import PROMPT, VOCABULARY, ToyDrafter, answers_of, chi_square, enumerated_law
from support.pairs import full_pair
from support.toys import Scripted, ToyTarget, prompt_of, random_tree

BEGIN, END = 2, 3  # among the tokens of the toys, whose prompt ends with the first
FIRST = ToyDrafter(1)


class Marks:
    """A tokenizer of two letters and the two marks of a thought."""

    texts = ("a", "b", "<think>", "</think>")
    tool_call_start, tool_call_end = "", ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.texts.index(text)]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.texts[token] for token in tokens)


def limited(most, drafts=True):
    return Constraint(ThoughtLimit(Marks(), most, True), len(PROMPT), drafts)


def allowed(most):
    """What may follow an answer, by the definition."""

    def tokens(answer):
        in_thought, spent = True, 0
        for token in answer:
            spent += in_thought and token != END
            in_thought = token != END if in_thought else token == BEGIN
        return {END} if in_thought and spent >= most else {0, 1, BEGIN, END}

    return tokens


MADE = {
    "none": lambda sampling: NoDraft(),
    "trees": lambda sampling: trees(sampling.seed),
    "dflash": lambda sampling: BlockDiffusion(FIRST),
    "ddtree": lambda sampling: BestFirst(FIRST, None, 6),
}


def trees(seed):
    rng = np.random.default_rng(seed)
    return Scripted(lambda tokens, remaining: random_tree(rng, min(6, remaining - 1), VOCABULARY))


def use(temperature, acceptance="match", **filters):
    return DecodeConfig(
        "dflash", acceptance=acceptance, sampling=SamplingConfig(temperature, **filters)
    )


def distance(made, most, config, constraint=limited, draws=200):
    target = ToyTarget(VOCABULARY)
    law = enumerated_law(target, config.sampling, allowed(most))
    assert sum(law.values()) == pytest.approx(1)
    answers = answers_of(target, made, draws, config, lambda: constraint(most))
    assert set(answers) <= set(law)
    return chi_square(law, answers)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("most", [0, 1])
def test_plain_answers_follow_the_law_that_is_enumerated(most, temperature):
    assert distance(MADE["none"], most, use(temperature)) < 4


@cache
def answers(name, most, temperature):
    config = use(temperature, repetition_penalty=1.3)
    return answers_of(ToyTarget(VOCABULARY), MADE[name], 6, config, lambda: limited(most))


@pytest.mark.parametrize("name", [name for name in MADE if name != "none"])
@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafted_answers_are_the_plain_ones_of_their_seeds(name, most, temperature):
    assert answers(name, most, temperature) == answers("none", most, temperature)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rejection_follows_the_law(temperature):
    config = use(temperature, "reject")
    assert distance(lambda s: DrawnBlock(FIRST, None, s), 1, config) < 4


def test_the_law_test_notices_a_limit_that_is_off_by_one():
    with pytest.raises(AssertionError):
        assert distance(MADE["none"], 1, use(1.0), lambda most: limited(most + 1)) < 4


def test_the_end_of_a_thought_is_a_certain_draft():
    known = limited(1)
    tree = known.forced_tree([*PROMPT, 0], 9)
    assert tree.drafted == (END,) and tree.sources[1] == FORCED
    assert known.forced_tree([*PROMPT, 0, END], 9) is None
    assert limited(1, drafts=False).forced_tree([*PROMPT, 0], 9) is None


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Its tokens are characters, so that marks are of several."""
    new = tmp_path_factory.mktemp
    return full_pair(
        new("pair"), Target(make_model("llama"), 200, "tiny"), tiny_tokenizer(new("w"))
    )


def opened(pair, seed):
    return [*prompt_of(seed, 9), *pair.tokenizer.encode("<think>", add_special_tokens=False)]


def config_of(method, seed=0, most=5, temperature=1.0):
    sampling = SamplingConfig(temperature, seed=seed)
    return DecodeConfig(method, max_tokens=24, thought_tokens=most, sampling=sampling)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_methods_end_the_thought_as_plain_decoding_does(pair, temperature):
    config, prompt = partial(config_of, most=5, temperature=temperature), opened(pair, 1)
    plain = collect(Session(pair, config("none")).stream(prompt))
    assert plain.text.find("</think>") == 5
    for method in ("dflash", "ddtree", "eagle3"):
        drafted = collect(Session(pair, config(method)).stream(prompt))
        assert plain.tokens == drafted.tokens
        assert drafted.statistics.rounds < plain.statistics.rounds


def test_answers_before_the_limit_are_those_without_one(pair):
    prompt = opened(pair, 3)
    free = collect(Session(pair, config_of("none", 3, None)).stream(prompt))
    for most in (3, 17):
        found = collect(Session(pair, config_of("ddtree", 3, most)).stream(prompt))
        assert found.tokens[:most] == free.tokens[:most]
    assert collect(Session(pair, config_of("ddtree", 3, 99)).stream(prompt)).text == free.text


def test_several_at_once_and_preempted_think_as_alone(pair):
    kinds = [("dflash", 4), ("none", 7), ("ddtree", None), ("ddtree", 0), ("ngram", 9)]
    asked = [(opened(pair, i), config_of(*kind[:1], i, kind[1])) for i, kind in enumerate(kinds)]
    alone = [collect(Session(pair, config).stream(prompt)) for prompt, config in asked]
    scheduler, rng = Scheduler(pair, observer=Strict()), np.random.default_rng(1)
    answers = [scheduler.submit(*each) for each in asked]

    def preempt():
        running = [each for each in scheduler.running if each.state.has_begun]
        if running and rng.random() < 0.3:
            chosen = running[int(rng.integers(len(running)))]
            scheduler.cancel(chosen)
            chosen.preempt()
            scheduler.waiting.append(chosen)

    said = finish(scheduler, preempt)
    for each, expected in zip(answers, alone, strict=True):
        assert collect(iter(said[each])).tokens == expected.tokens


def read(pair, text, in_thought=False):
    tokenizer = pair.tokenizer
    found = Thoughts.begun(in_thought)
    for token in tokenizer.encode(text, add_special_tokens=False):
        found = found.after(token, tokenizer)
    return found


def test_tokens_of_thoughts_are_counted_without_their_marks(pair):
    assert read(pair, "<think>abc</think>de<think>f</think>g").tokens == 4
    assert read(pair, "abc</think>d", True).tokens == 3
    assert read(pair, "<think>a<b</th ink").tokens == 11
    assert read(pair, "no thought</think>").tokens == 0


def test_a_mark_in_the_text_of_a_call_begins_no_thought(pair, monkeypatch):
    monkeypatch.setattr(type(pair.tokenizer), "tool_call_start", "[call]")
    monkeypatch.setattr(type(pair.tokenizer), "tool_call_end", "[/call]")
    assert read(pair, "[call]<think>abc[/call]de").tokens == 0
    assert read(pair, "[call]<think>abc[/call]<think>de").tokens == 2


def test_a_mark_that_was_begun_is_ended_and_not_begun_again(pair):
    known = constraint_of(pair, config_of("none", most=3), opened(pair, 0))
    start = opened(pair, 0)

    def forced(text):
        tokens = pair.tokenizer.encode(text, add_special_tokens=False)
        return pair.tokenizer.decode(known.forced_tokens([*start, *tokens]))

    assert [forced(text) for text in ("ab", "abc", "a</", "ab<", "abc</thi")] == [
        *("", "</think>", "think>", "/think>"),
        "nk>",
    ]
    assert forced("a</think>bcdef") == "" and forced("a</think><think>bc") == "</think>"


def test_a_limit_has_to_be_a_number():
    with pytest.raises(DFlashError, match="thought_tokens"):
        DecodeConfig(thought_tokens=-1)


def test_answers_with_and_without_a_limit_draft_with_one_drafter(pair):
    scheduler = Scheduler(pair)
    for most in (None, 3, 5):
        scheduler.submit(opened(pair, 0), config_of("ddtree", 0, most))
    assert len({id(each.drafter) for each in scheduler.waiting}) == 1
