"""An answer's text in its parts, however it is cut: nothing is lost, nothing is told twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools, mistral

from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, Part
from dflash_mlx.session.forms import FORMS
from dflash_mlx.session.reading import AnswerReader

TOOLS = [{"type": "function", "function": {"name": "add"}}]
ADD = '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>"}}</tool_call>'

# Arguments in which there is every tag, a quote and a backslash.
TAGS = ADD.replace('"<tool_call>"', r'"</tool_call><think>\"</tool_call>\\"')


def form_of(parser=json_tools):
    """The row of a parser of mlx-lm, the first where it reads several."""
    start, end = parser.tool_call_start, parser.tool_call_end
    form = next(each for each in FORMS if (each.mark, each.end.strip()) == (start, end))
    return replace(form, parse=parser.parse_tool_call)


def read(text: str, sizes, parser=json_tools, cut=False, **more):
    """Thought, words and calls of a text that comes in pieces of these sizes."""
    reader = AnswerReader(object(), form_of(parser), **{"tools": TOOLS, **more})
    parts, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        parts += reader.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    parts += reader.finish(cut)
    thought = "".join(p.text for p in parts if p.kind == THOUGHT)
    words = "".join(p.text for p in parts if p.kind == WORDS)
    return thought, words, [p for p in parts if p.kind == CALL]


OPEN = '<tool_call>{"name": "add", "arguments": {"a": "5}}</tool_call>'
BROKEN = '<tool_call>{"x</tool_call>'
ONE, ALL = {"a": "<tool_call>"}, {"a": '</tool_call><think>"</tool_call>\\'}  # of ADD and of TAGS
NO_END = 'So: [TOOL_CALLS]add[ARGS]{"a": 1}add[ARGS]{"a": 2}'


@pytest.mark.parametrize(
    ("text", "thought", "words", "calls", "more"),
    [
        ("so", "", "so", [], {}),
        (ADD, "", "", [ONE], {}),
        (f"First.\n{ADD}\n{ADD}\nThen.", "", "First.\nThen.", [ONE, ONE], {}),
        (f"<think>\nhm\n</think>\n\nFirst.{ADD}", "hm\n", "First.", [ONE], {}),
        (f"<think>{ADD}</think>so", ADD, "so", [], {}),
        ("<tool_call>nothing</tool_call>", "", "<tool_call>nothing</tool_call>", [], {}),
        ('<tool_call>{"name": 5}</tool_call>', "", '<tool_call>{"name": 5}</tool_call>', [], {}),
        ("<tool_call>[]</tool_call>so", "", "so", [], {}),
        ("a < b <tool", "", "a < b <tool", [], {}),
        ("<tool_call>{", "", "<tool_call>{", [], {}),
        (f"{TAGS}so{TAGS}", "", "so", [ALL, ALL], {}),
        (f"<think>a</think>{TAGS}<think>b</think>c", "ab", "c", [ALL], {}),
        (f"{BROKEN}{ADD}so", "", f"{BROKEN}so", [ONE], {}),
        (f"{BROKEN}{ADD}so", "", BROKEN, [ONE], {"one_call": True}),
        (f'{OPEN}\nThe 5" pipe: {ADD}', "", f'{OPEN}\nThe 5" pipe: ', [ONE], {}),
        (NO_END, "", "So: ", [{"a": 1}, {"a": 2}], {"parser": mistral}),
        (ADD, "", ADD, [], {"tools": ()}),
        ("hm</think>so", "hm", "so", [], {"in_thought": True}),
    ],
)
def test_parts_are_told_apart_however_the_text_is_cut(text, thought, words, calls, more):
    for sizes in ((1,), (2, 5), (3,), (1000,)):
        *said, found = read(text, sizes, **more)
        assert said == [thought, words]
        assert [(each.name, json.loads(each.text)) for each in found] == [("add", c) for c in calls]
        assert len({each.identity for each in found}) == len(calls)


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


LONG = {"a": 'x "quoted" \\ </tool_call> {' * 9, "b": [1, {"c": None}]}


@pytest.mark.parametrize("given", [LONG, {}, ONE, ALL])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_arguments_of_a_call_are_told_as_they_are_made(given, size):
    call = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(given)}}}\n</tool_call>'
    _, words, parts = read(f"So{call}\n{call}", (size,), streams=True)
    names = [*dict.fromkeys(part.identity for part in parts)]
    whole = ["".join(p.text for p in parts if p.identity == name) for name in names]
    assert words == "So" and [json.loads(each) for each in whole] == [given, given]
    if size == 1 and given in (LONG, ONE):
        assert len(parts) > len(given["a"]), "nothing is held back for long"


def test_what_begins_as_no_known_call_is_told_whole_and_a_broken_one_has_no_tag():
    other = ADD.replace("add", "other")
    _, words, parts = read(other, (1,), streams=True)
    assert [json.loads(part.text) for part in parts] == [ONE] and words == ""
    _, words, parts = read(f'{OPEN}\nThe 5" pipe', (1,), streams=True)
    assert "".join(part.text for part in parts) == '{"a": "5}}' and words == '\nThe 5" pipe'[1:]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("length", [2, 6, 20, 45])
def test_half_a_call_that_a_limit_cuts_is_not_told_as_words(length, streams):
    for before, calls in (("So", 0), (f"So{ADD}", 1)):
        _, words, found = read(before + ADD[:length], (4,), cut=True, streams=streams)
        assert words == "So"
        assert streams or len(found) == calls
    _, words, _ = read("a <", (1,), cut=True)
    assert words == "a <"
