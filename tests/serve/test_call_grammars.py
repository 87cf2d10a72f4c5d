"""What the grammars of all forms of calls promise, kept by a model that chooses by chance."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from types import SimpleNamespace

import pytest
from jsonschema_rs import is_valid
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from dflash_mlx.serve.chat import Chat
from dflash_mlx.serve.openai_requests import FIELDS
from dflash_mlx.serve.structure import grammar_of
from dflash_mlx.session.call_grammar import beyond_tags
from support.call_forms import (
    EACH,
    HELD,
    HELD_TOOLS,
    SCHEMA,
    TIGHT,
    grammar_for,
    read,
    said_by_chance,
    tokenizer_of,
    write,
)


@EACH
def test_a_call_that_must_come_comes_in_its_form_and_follows_its_schema(form):
    rng, seen = random.Random(5), set()
    for turn in range(4):
        grammar = grammar_for(form, required="", one_call=turn % 2 == 0)
        text, is_over = said_by_chance(form, grammar, rng)
        words, calls, _ = read(form, text, 3, tools=HELD_TOOLS)
        calls = calls if is_over else calls[:-1]
        assert not words and (calls or not is_over), text
        for name, told in calls:
            assert is_valid(HELD[name], json.loads(told)), (text, told)
            seen.add(name)
        assert len(calls) == 1 or turn % 2 or not is_over
    assert seen == {*HELD}


@EACH
def test_a_strict_tool_is_called_as_its_schema_says_or_words_come(form):
    rng, grammar = random.Random(3), grammar_for(form, one_call=True)
    for begin in (form.start + form.call if form.has_channels else form.mark, "So"):
        begin = "<|channel|>final<|message|>So" if begin == "So" and form.has_channels else begin
        text, is_over = said_by_chance(form, grammar, rng, 900 if begin != "So" else 40, begin)
        words, calls, _ = read(form, text, tools=HELD_TOOLS)
        assert "So" not in begin or words.startswith("So")
        assert "So" in begin or calls
        assert all(is_valid(HELD[name], json.loads(told)) for name, told in calls[:is_over])


@EACH
def test_a_raw_text_in_a_grammar_never_spells_its_end(form):
    if not form.over and not form.quote:
        return
    tokenizer, ends = tokenizer_of(form)
    library = from_tokenizer(tokenizer, eos_token=sorted(ends))
    grammar = grammar_for(form, {"edit": SCHEMA}, required="")
    begin = form.start + form.call + "edit" + form.named + form.key + "path" + form.value
    tokens = tokenizer.encode(begin + form.quote + "ab")
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    more = [tokenizer.encode(c)[0] for c in (form.quote or form.over) + "cd"]
    assert matcher.validate_tokens(more) < len(more)


LOOSE = {"edit": {"type": "object"}}


@EACH
def test_arguments_of_any_names_may_come_where_a_schema_names_none(form):
    rng = random.Random(1)
    for _ in range(2):
        grammar = grammar_for(form, LOOSE, required="", one_call=True)
        text, is_over = said_by_chance(form, grammar, rng, 200)
        calls = read(form, text, tools=[{"function": {"name": "edit"}}])[1]
        assert calls or not is_over
        assert all(
            isinstance(json.loads(told), dict) for _, told in calls[: None if is_over else -1]
        )


def test_what_no_grammar_of_separate_arguments_can_keep_is_named():
    text = {"type": "string", "pattern": "a+"}
    assert beyond_tags({**TIGHT, "anyOf": [], "title": "x"}) == ["anyOf"]
    assert beyond_tags({"type": "object", "properties": {"a": text, "b": {"$ref": "#/a"}}}) == [
        "pattern"
    ]
    assert beyond_tags(TIGHT) == []


@EACH
@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")], ids=["text", "tokens"])
def test_a_call_has_to_come_behind_a_thought_that_the_prompt_begins(form, marks):
    known, ends = tokenizer_of(form)
    tokenizer = deepcopy(known)
    tokenizer.add_tokens([*marks], special_tokens=True)
    wrapped = SimpleNamespace(eos_token_ids=ends, get_added_vocab=tokenizer.get_added_vocab)
    chat = Chat(FIELDS, [], required="", opened=not form.has_channels)
    grammar = grammar_of(form, chat, HELD, wrapped)
    library = from_tokenizer(tokenizer, eos_token=sorted(ends))
    begin, end = "", "</think>\n\n"
    if form.has_channels:
        begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    call = write(form, "edit", {"line": 3, "mode": "fast"})
    for text, fits in ((f"Hm. <b>{end}{call}", True), (f"Hm.{end}No.", False)):
        matcher = LLMatcher(library, LLMatcher.grammar_from_lark(grammar), log_level=0)
        tokens = tokenizer.encode(begin + text)
        assert (matcher.validate_tokens(tokens) == len(tokens)) is fits, text
