"""Structured answers of tiny pairs: every method gives the plain ones, alone and together."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from jsonschema_rs import is_valid

from dflash_mlx.core.config import DecodeConfig, SamplingConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.methods import METHODS
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.exact import first_difference
from dflash_mlx.engine.grammar import FORCED
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.verifier.model import Target
from support.configs import config_with
from support.decoding import Strict, finish
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.grammars import SCHEMA, tiny_tokenizer
from support.models import EOS
from support.pairs import assistant_pair, full_pair
from support.toys import Letters, prompt_of

DATES = 'start: day " " month\nday: /[1-9]/ | "30"\nmonth: "May" | "June" | "July"\n'
STRUCTURES = {
    "schema": StructureConfig(json_schema=json.dumps(SCHEMA)),
    "regex": StructureConfig(regex=r"(yes|no), [a-z]{3,9}\."),
    "grammar": StructureConfig(grammar=DATES),
}
CASES = {
    "ngram": {},
    "dflash": {},
    "dflash, block": {"block_size": 5},
    "ddtree": {},
    "ddtree, budget": {"budget": 12},
    "d2sd": {},
    "d2sd, published": {"growth": "paper"},
    "specdiff": {},
    "specdiff, chain": {"block_size": 5},
    "eagle3": {},
    "eagle3, chain": {"block_size": 5},
    "assistant": {},
    "assistant, chain": {"block_size": 5},
    "mtp": {},
    "mtp, chain": {"block_size": 5},
    "lm": {},
    "lm, chain": {"block_size": 5},
    "resample": {"branches": 3},
    "dflash1": {"block_size": 5},
}
PROMPT = prompt_of(3, 12) * 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    new = tmp_path_factory.mktemp
    target = Target(make_model("llama"), 200, "tiny")
    return full_pair(new("pair"), target, tiny_tokenizer(new("words")))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The target of an assistant, which drafts for no other."""
    new = tmp_path_factory.mktemp
    return assistant_pair(new("gemma"), "dense", tiny_tokenizer(new("words")))


def config_of(method="none", structure="schema", temperature=0.0, **options):
    sampling = SamplingConfig(temperature, seed=options.pop("seed", 7))
    given = {"max_tokens": 120, "sampling": sampling, "structure": STRUCTURES.get(structure)}
    return config_with(method, **{k: v for k, v in {**given, **options}.items() if v is not None})


def said(pair, config, prompt=PROMPT):
    return collect(Session(pair, config).stream(prompt))


def check(structure, text):
    """Fails unless a text is what was asked for."""
    if structure != "schema":
        pattern = {"regex": r"(yes|no), [a-z]{3,9}\.", "grammar": r"([1-9]|30) (May|June|July)"}
        assert re.fullmatch(pattern[structure], text)
        return
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "ok"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 6
    assert 0 <= value["age"] <= 99 and isinstance(value["ok"], bool)
    assert len(value["tags"]) <= 3 and {*value["tags"]} <= {"red", "green"}


def plain_answers(pair):
    """By structure and temperature."""
    keys = [(s, t) for s in STRUCTURES for t in (0.0, 1.0)]
    return {key: said(pair, config_of("none", *key)) for key in keys}


@pytest.fixture(scope="module")
def plain(pair):
    return plain_answers(pair)


@pytest.fixture(scope="module")
def plain_of_gemma(gemma):
    return plain_answers(gemma)


def test_there_is_a_case_for_every_method():
    assert {name.partition(",")[0] for name in CASES} | {"none"} == set(METHODS)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_answers_are_what_was_asked_for_and_end_by_themselves(plain, structure, temperature):
    answer = plain[structure, temperature]
    check(structure, answer.text)
    assert answer.finish_reason == "stop"
    assert answer.statistics.rounds == len(answer.tokens) - 1, "nothing was drafted"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_gives_the_plain_answer_in_fewer_rounds(request, name, temperature):
    fixtures = ("gemma", "plain_of_gemma") if "assistant" in name else ("pair", "plain")
    pair, plain = map(request.getfixturevalue, fixtures)
    for structure in STRUCTURES:
        options = {"temperature": temperature, **CASES[name]}
        answer = said(pair, config_of(name.partition(",")[0], structure, **options))
        expected = plain[structure, temperature]
        assert (answer.tokens, answer.text) == (expected.tokens, expected.text)
        assert answer.finish_reason == "stop"
        assert answer.statistics.rounds < len(answer.tokens) - 1


@pytest.mark.parametrize("name", ["dflash", "specdiff", "eagle3", "assistant", "lm"])
def test_rejection_gives_what_was_asked_for(request, name):
    pair = request.getfixturevalue("gemma" if name == "assistant" else "pair")
    for seed in range(3):
        for structure in STRUCTURES:
            options = {"acceptance": "reject", "temperature": 1.0, "seed": seed, "block_size": 5}
            check(structure, said(pair, config_of(name, structure, **options)).text)


def test_what_is_forced_is_drafted_and_accepted_whole(pair):
    forced = 0
    for delta in Session(pair, config_of("ddtree")).stream(PROMPT):
        tree, path = delta.accepted.tree, delta.accepted.path
        if FORCED in tree.sources:
            assert set(tree.sources[1:]) == {FORCED}
            assert len(path) == len(tree), "each of them was accepted"
            assert "grammar" in delta.proposal.reason
            forced += len(tree) - 1
    assert forced > 20


def test_an_answer_that_is_cut_says_so(pair):
    answer = said(pair, config_of("dflash", max_tokens=9))
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 9)
    assert answer.text == '{"name": '


def test_a_grammar_that_may_go_on_is_ended_by_the_end_token(pair):
    structure = StructureConfig(regex="(ab?)*")
    for seed in range(4):
        config = replace(config_of("dflash", temperature=1.5, seed=seed), structure=structure)
        answer = said(pair, config)
        assert re.fullmatch("(ab?)*", answer.text)
        assert answer.tokens[-1] == EOS and answer.finish_reason == "stop"


def test_stop_texts_hold_as_well(pair, plain):
    whole = plain["schema", 0.0].text
    answer = said(pair, config_of("ddtree", stop=('"age"',)))
    assert answer.text == whole[: whole.index('"age"')] and answer.finish_reason == "stop"


def test_turns_of_one_session_have_grammars_of_their_own(pair, plain):
    """Each behind the caches of the one before, which are kept."""
    session = Session(pair, config_of("ddtree", "schema"))
    first = collect(session.stream(PROMPT))
    session.config = replace(session.config, structure=StructureConfig())
    free = collect(session.stream([*PROMPT, *first.tokens, 5]))
    session.config = replace(session.config, structure=STRUCTURES["regex"])
    assert collect(session.stream(PROMPT)).tokens == plain["regex", 0.0].tokens
    assert first.tokens == plain["schema", 0.0].tokens
    assert free.tokens == said(pair, config_of("none", ""), [*PROMPT, *first.tokens, 5]).tokens


def test_answers_with_and_without_grammars_draft_with_one_drafter(pair):
    scheduler = Scheduler(pair)
    for structure in (*STRUCTURES, ""):
        scheduler.submit(PROMPT, config_of("ddtree", structure))
    assert len({id(each.drafter) for each in scheduler.waiting}) == 1
    assert isinstance(scheduler.waiting[0].drafter, BatchBudget)


KINDS = [("dflash", "schema"), ("none", "regex"), ("ddtree", ""), ("ngram", "grammar")]
KINDS += [("ddtree", "schema"), ("ddtree", "regex")]


def everyone(pair):
    """Prompts, settings, and what each is answered with alone."""
    asked = []
    for i, (method, structure) in enumerate(KINDS):
        heat = 1.0 if i % 2 else 0.0
        config = config_of(method, structure, heat, seed=i, max_tokens=50)
        prompt = prompt_of(i, 5 + 7 * i)
        asked.append((prompt, config, said(pair, config, prompt)))
    return asked


@pytest.mark.parametrize("drops", [False, True])
def test_several_at_once_read_as_alone_whatever_is_dropped(pair, drops):
    rng, asked, dropped = np.random.default_rng(5), everyone(pair), 0
    scheduler = Scheduler(pair, observer=Strict())
    answers = [scheduler.submit(prompt, config) for prompt, config, _ in asked]

    def drop():
        nonlocal dropped
        running = [each for each in scheduler.running if each.state.has_begun]
        if drops and running and rng.random() < 0.4:
            chosen = running[int(rng.integers(len(running)))]
            scheduler.cancel(chosen)
            chosen.preempt()
            scheduler.waiting.append(chosen)
            dropped += 1

    said = finish(scheduler, drop)
    for answering, (_, _, alone) in zip(answers, asked, strict=True):
        together = collect(iter(said[answering]))
        assert (together.tokens, together.text) == (alone.tokens, alone.text)
        assert together.finish_reason == alone.finish_reason
    assert bool(dropped) == drops


@pytest.mark.parametrize(
    ("family", "methods"),
    [("qwen3_5", ("dflash", "ngram", "ddtree")), ("gemma3_text", ("dflash", "ddtree"))],
)
def test_targets_of_other_families_give_their_plain_answers(family, methods, tmp_path_factory):
    target = Target(make_model(family), 200, family)
    model = drafter_folder(tmp_path_factory.mktemp("drafter"), [0, 1], 1, target)
    pair = Pair(target, tiny_tokenizer(tmp_path_factory.mktemp("words")), (model,), "tiny")
    plain = said(pair, config_of("none"))
    check("schema", plain.text)
    for method in methods:
        assert said(pair, config_of(method)).tokens == plain.tokens


def refused(pair, **structure):
    with pytest.raises(DFlashError) as raised:
        Session(pair, DecodeConfig("none", structure=StructureConfig(**structure)))
    return str(raised.value)


def test_a_tokenizer_that_cannot_be_used_is_named(pair, monkeypatch):
    other = replace(pair, tokenizer=Letters(), learned={})
    assert "tokenizer of tiny (it is not of" in refused(other, json_object=True)
    monkeypatch.setattr(pair.tokenizer, "eos_token_ids", {9999})
    said = refused(replace(pair, learned={}), json_object=True)
    assert "no token that ends an answer" in said


def test_a_grammar_with_a_token_that_the_model_lacks_is_refused(pair):
    assert "<|none|>" in refused(pair, grammar='start: "a" <|none|>')


def test_compiled_grammars_are_kept_but_not_without_end(pair):
    pair = replace(pair, learned={})
    for i in range(40):
        Session(pair, DecodeConfig("none", structure=StructureConfig(regex=f"a{{{i + 1}}}")))
    (grammars,) = [v for k, v in pair.learned.items() if k == ("grammars",)]
    assert 20 < grammars.compiled.cache_info().currsize < 40


# The default pair is weak; under a schema its answers are valid all the same, with drafts.


def text(most):
    return {"type": "string", "maxLength": most}


def number(least, most):
    return {"type": "integer", "minimum": least, "maximum": most}


def some(items, most, least=1):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def objects(**properties):
    known = {"type": "object", "properties": properties, "required": [*properties]}
    return {**known, "additionalProperties": False}


ASKED = [
    (
        "Describe a person as JSON: name, age, email, hobbies.",
        objects(
            name=text(30),
            age=number(0, 120),
            email={"type": "string", "pattern": r"^[a-z]{1,12}@[a-z]{1,12}\.(com|org)$"},
            hobbies=some(text(20), 3, 3),
        ),
    ),
    (
        "Rate this film review as JSON: 'A slow start, but what an ending!'",
        objects(
            sentiment={"enum": ["positive", "negative", "mixed"]},
            score=number(1, 10),
            reasons=some(text(60), 3),
            recommended={"type": "boolean"},
        ),
    ),
    (
        "Extract the order as JSON: two pizzas and a cola to 5 Main Street, today at 19:30.",
        objects(
            items=some(
                objects(name=text(20), count=number(1, 20), size={"enum": ["S", "M", "L"]}), 3
            ),
            address=objects(street=text(30), day={"enum": ["today", "tomorrow"]}),
            time={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
            note={"anyOf": [text(20), {"type": "null"}]},
        ),
    ),
]


@pytest.fixture(scope="module")
def default_pair():
    return load()


def asked(pair, i, method="auto", temperature=1.0):
    """The tokens and settings of a question, by number."""
    question, schema = ASKED[i]
    structure = StructureConfig(json_schema=json.dumps(schema))
    config = config_of(method, "", temperature, seed=i, max_tokens=400)
    return prompt_tokens(pair.tokenizer, question), replace(config, structure=structure)


@pytest.mark.real
def test_every_answer_follows_its_schema_at_temperature_1(default_pair):
    scheduler = Scheduler(default_pair)
    answers = [scheduler.submit(*asked(default_pair, i)) for i in range(len(ASKED))]
    said = finish(scheduler)
    for each, (_, schema) in zip(answers, ASKED, strict=True):
        answer = collect(iter(said[each]))
        assert answer.finish_reason == "stop" and is_valid(schema, json.loads(answer.text))
    kept = [len(delta.accepted.path) - 1 for deltas in said.values() for delta in deltas]
    assert sum(kept) > len(ASKED), "drafts were accepted"


@pytest.mark.real
def test_a_greedy_answer_is_the_plain_one_up_to_near_ties_in_fewer_rounds(default_pair):
    tokens, config = asked(default_pair, 0, "none", 0.0)
    plain = said(default_pair, config, tokens)
    drafted = said(default_pair, replace(config, method="auto"), tokens)
    difference = first_difference(default_pair.target, tokens, plain.tokens, drafted.tokens)
    assert difference is None or difference.is_near_tie
    assert drafted.statistics.rounds < plain.statistics.rounds
