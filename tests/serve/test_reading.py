"""An answer's text in its parts, however it is cut: nothing is lost, nothing is told twice."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools, mistral

from dflash_mlx.serve.reading import CALL, THOUGHT, WORDS, AnswerReader, Part

TOOLS = [{"type": "function", "function": {"name": "add"}}]
ADD = '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>"}}</tool_call>'

# Arguments in which there is every tag, a quote and a backslash.
TAGS = ADD.replace('"<tool_call>"', r'"</tool_call><think>\"</tool_call>\\"')


def tokenizer(parser=json_tools):
    return SimpleNamespace(
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
    )


def read(text: str, sizes=(3,), parser=json_tools, **more):
    """Thought, words and calls of a text that comes in pieces of these sizes."""
    reader = AnswerReader(tokenizer(parser), **{"tools": TOOLS, **more})
    parts, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        parts += reader.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    parts += reader.finish()
    thought = "".join(p.text for p in parts if p.kind == THOUGHT)
    words = "".join(p.text for p in parts if p.kind == WORDS)
    return thought, words, [p for p in parts if p.kind == CALL]


@pytest.mark.parametrize(
    ("text", "thought", "words", "calls"),
    [
        ("so", "", "so", 0),
        (ADD, "", "", 1),
        (f"First.\n{ADD}\n{ADD}\nThen.", "", "First.\nThen.", 2),
        (f"<think>\nhm\n</think>\n\nFirst.{ADD}", "hm\n", "First.", 1),
        (f"<think>{ADD}</think>so", ADD, "so", 0),
        ("<tool_call>nothing</tool_call>", "", "<tool_call>nothing</tool_call>", 0),
        ('<tool_call>{"name": 5}</tool_call>', "", '<tool_call>{"name": 5}</tool_call>', 0),
        ("<tool_call>[]</tool_call>so", "", "so", 0),
        ("a < b <tool", "", "a < b <tool", 0),
        ("<tool_call>{", "", "<tool_call>{", 0),
        (f"{TAGS}so{TAGS}", "", "so", 2),
        (f"<think>a</think>{TAGS}<think>b</think>c", "ab", "c", 1),
        (f'<tool_call>{{"x</tool_call>{ADD}so', "", '<tool_call>{"x</tool_call>so', 1),
    ],
)
def test_parts_are_told_apart_however_the_text_is_cut(text, thought, words, calls):
    for sizes in ((1,), (2, 5), (1000,)):
        found = read(text, sizes)
        assert found[:2] == (thought, words)
        assert len(found[2]) == calls


def test_a_call_has_a_name_arguments_and_an_identity_of_its_own():
    first, second = read(ADD + ADD)[2]
    assert (first.name, json.loads(first.text)) == ("add", {"a": "<tool_call>"})
    assert first.identity != second.identity


def test_tags_in_arguments_are_text():
    (call,) = read(TAGS)[2]
    assert json.loads(call.text) == {"a": '</tool_call><think>"</tool_call>\\'}


OPEN = '<tool_call>{"name": "add", "arguments": {"a": "5}}</tool_call>'


@pytest.mark.parametrize("sizes", [(1,), (3,), (1000,)])
def test_a_string_without_an_end_takes_no_later_call_with_it(sizes):
    _, words, calls = read(f'{OPEN}\nThe 5" pipe: {ADD}', sizes)
    assert words == f'{OPEN}\nThe 5" pipe: ' and [each.name for each in calls] == ["add"]


def test_nothing_is_said_behind_the_one_call_of_an_answer():
    text = f'<tool_call>{{"x</tool_call>{ADD}so'
    words, calls = read(text, one_call=True)[1:]
    assert len(calls) == 1 and words == '<tool_call>{"x</tool_call>'


def test_a_form_without_an_end_is_read_at_the_end():
    text = 'So: [TOOL_CALLS]add[ARGS]{"a": 1}add[ARGS]{"a": 2}'
    _, words, calls = read(text, parser=mistral)
    assert words == "So: " and [json.loads(c.text)["a"] for c in calls] == [1, 2]


def test_without_tools_nothing_is_a_call():
    assert read(ADD, tools=()) == ("", ADD, [])


def test_a_thought_may_have_begun_in_the_prompt():
    assert read("hm</think>so", in_thought=True) == ("hm", "so", [])


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"', "a", "<", "\n"])),
       st.lists(st.integers(1, 7), min_size=1))  # fmt: skip
def test_no_word_is_lost_where_nothing_is_a_call(parts, sizes):
    text = "".join(parts)
    _, words, calls = read(text, sizes)
    assert calls == [] and words == text


def test_a_text_is_words_alone():
    reader = AnswerReader()
    parts = [*reader.feed("<think>a"), *reader.feed(""), *reader.finish()]
    assert parts == [Part(WORDS, "<think>a")]
