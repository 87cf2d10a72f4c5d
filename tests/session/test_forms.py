"""Calls of every form: learned of a template, and read as they stream."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import import_module

import pytest

from dflash_mlx.session.calls import WORDS, kinds_of, value_of
from dflash_mlx.session.forms import FORMS, PLAIN, form_of
from dflash_mlx.session.reading import AnswerReader
from support.call_forms import (
    EACH,
    GIVEN,
    TOKENS,
    TOOLS,
    in_template,
    mutated,
    pair_of,
    read,
    write,
)


@EACH
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_is_read_as_it_was_written(form, streams, size):
    text = write(form, "edit", GIVEN)
    words, ((name, told),), number = read(form, text, size, streams)
    assert (words, name) == ("", "edit")
    assert json.loads(told) == GIVEN
    each = 6 if form.value == "=" else 30  # Python's strings are told when they are whole
    assert number == 1 if not streams else size > 1 or number > each
    assert size < 1000 or number == 1, "what comes together is told together"
    words, ((name, told),), _ = read(form, write(form, "now", {}), size, streams)
    assert (words, name, told) == ("", "now", "{}")


def test_raw_values_become_json_of_the_types_that_a_schema_allows():
    root = {"$defs": {"C": {"enum": ["1", "2"]}, "L": {"$ref": "#/$defs/L"}}}
    root["$defs"]["M"] = {"anyOf": [{"$ref": "#/$defs/M"}, {"type": "integer"}]}
    text, whole = {"type": "string"}, {"type": "integer"}
    for schema, raw, value in [
        (text, "5", "5"),
        (text, "null", "null"),
        ({"$ref": "#/$defs/C"}, "1", "1"),
        ({"$ref": "#/$defs/L"}, "1", 1),
        ({"$ref": "#/$defs/M"}, "1.0", 1),
        (whole, "5.0", 5),
        (whole, "five", "five"),
        (text | {"maxLength": 9}, "'it\n\"is\"'", 'it\n"is"'),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"anyOf": [whole, text]}, "5", 5),
        ({"anyOf": [whole, text]}, "5 apples", "5 apples"),
        ({"anyOf": [whole, {}]}, "[1]", [1]),
        ({"type": "array"}, "['a', True]", ["a", True]),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, "{1}", "{1}"),
        ({}, "[" * 9000, "[" * 9000),
        (True, "x", "x"),
    ]:
        assert value_of(raw, kinds_of(schema, root)) == value
        if kinds_of(schema, root) != {"string"}:
            assert type(value_of(raw, kinds_of(schema, root))) is type(value)


@EACH
def test_the_form_is_the_one_that_the_template_writes_with_its_spacing(form):
    """As the row has it, and with more and less white space between its pieces."""
    if form.has_channels:
        return
    more = [k for k, v in vars(form).items() if isinstance(v, str) and "\n" in v and k != "again"]
    wide = [name for name in more if name not in ("value", "over")]  # which are around raw texts
    for names, line in ((more, "\n"), (more, ""), (wide, "\n ")):
        own = replace(form, **{k: getattr(form, k).replace("\n", line) for k in names})
        pair = pair_of(in_template("{{ write(form, c.function.name, c.function.arguments) }}"))
        pair.template |= {"write": write, "form": own}
        found = form_of(pair)
        assert not found.in_prompt and write(found, "edit", GIVEN) == write(own, "edit", GIVEN)
        assert json.loads(read(found, write(own, "edit", GIVEN))[1][0][1]) == GIVEN


NAME, GIVES = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
EACH_ONE = "{% for k, v in c.function.arguments | items %}"
RAW = "{{ v if v is string else v | tojson }}"
# As templates in the hub write calls, reduced to that, and how they begin.
TEMPLATES = {
    "qwen": (
        f'<tool_call>\n{{"name": "{NAME}", "arguments": {GIVES}}}\n</tool_call>',
        "json_tools",
    ),
    "qwen coder": (
        f"<tool_call>\n<function={NAME}>\n{EACH_ONE}<parameter={{{{ k }}}}>\n{RAW}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>",
        "qwen3_coder",
    ),
    "glm": (
        f"<tool_call>{NAME}{EACH_ONE}<arg_key>{{{{ k }}}}</arg_key><arg_value>{RAW}</arg_value>"
        "{% endfor %}</tool_call>",
        "glm47",
    ),
    "minimax": (
        f'<minimax:tool_call>\n<invoke name="{NAME}">\n{EACH_ONE}<parameter name="{{{{ k }}}}">'
        f"{RAW}</parameter>\n"
        "{% endfor %}</invoke>\n</minimax:tool_call>",
        "minimax_m2",
    ),
    "kimi": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0"
        f"<|tool_call_argument_begin|>{GIVES}<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
    ),
    "mistral": (f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{GIVES}", "mistral"),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{GIVES}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        None,
    ),
    "llama": (f'{{"name": "{NAME}", "parameters": {GIVES}}}', None),
    "gpt-oss": (
        f"<|start|>assistant to=functions.{NAME}<|channel|>commentary json<|message|>{GIVES}"
        "<|call|>",
        None,
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_calls_of_published_templates_are_known_and_read_as_mlx_lms_parsers_read_them(name):
    call, parser = TEMPLATES[name]
    module = parser and import_module(f"mlx_lm.tool_parsers.{parser}")
    form = form_of(pair_of(in_template(call), module))
    assert form.is_known and not form.in_prompt
    text = write(form, "edit", GIVEN)
    ((_, told),) = read(form, text)[1]
    assert json.loads(told) == GIVEN
    if module is not None:
        inside = text.removeprefix(module.tool_call_start).removesuffix(module.tool_call_end)
        theirs = form.parse(inside, TOOLS)
        theirs = theirs[0] if isinstance(theirs, list) else theirs
        strip = name in ("glm", "minimax")  # they take white space off texts
        assert theirs["arguments"] == {
            **GIVEN,
            "path": GIVEN["path"].strip() if strip else GIVEN["path"],
        }


def test_templates_in_python_of_mlx_lm_are_known():
    from mlx_lm.chat_templates import deepseek_v32

    pair = pair_of("")
    pair.tokenizer._chat_template = deepseek_v32.apply_chat_template
    pair.tokenizer.apply_chat_template = lambda talk, tokenize, **more: (
        deepseek_v32.apply_chat_template(talk, **more)
    )
    form = form_of(pair)
    assert form.mark == "<｜DSML｜function_calls>" and form.takes_text


def test_a_template_without_calls_has_the_plain_form():
    assert form_of(pair_of("{{ messages }}")) == PLAIN
    assert form_of(pair_of("{{ messages }}{{ tools }}")) == PLAIN


def test_values_of_gemma_are_read_in_its_own_spelling():
    gemma = next(form for form in FORMS if form.quote == '<|"|>')
    text = (
        '<|tool_call>call:edit{edits:[{old:<|"|>a, {"b": 1<|"|>,new-er:[]}],note:None}<tool_call|>'
    )
    ((_, told),) = read(gemma, text, 3)[1]
    assert json.loads(told) == {"edits": [{"old": 'a, {"b": 1', "new-er": []}], "note": None}


HARMONY = FORMS[-1]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_channels_are_thoughts_words_and_calls(size):
    begin, more = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        '{"path": "a", "line": 1}',
    )
    called = [
        f"<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{more}<|call|>",
        f" to=functions.edit<|channel|>commentary json<|message|>{more}",
    ]
    for each in called:
        preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        words, (call,), _ = read(HARMONY, begin + preamble + each, size)
        assert (words, call) == ("I look.", ("edit", more))
    reader = AnswerReader(TOKENS, HARMONY)
    text = begin + "<|channel|>final<|message|>It is 3."
    parts = [p for i in range(0, len(text), size) for p in reader.feed(text[i : i + size])]
    parts += reader.finish()
    thought = "".join(p.text for p in parts if p.kind != WORDS)
    assert (thought, "".join(p.text for p in parts if p.kind == WORDS)) == ("Hm.", "It is 3.")


@EACH
def test_mutated_calls_are_calls_or_words_and_never_a_fault(form):
    """2,000 in all and more; what is told whole is JSON, and pieces are the same in any cut."""
    rng, calls_found = random.Random(form.mark), 0
    whole = write(form, "edit", GIVEN)
    for turn in range(80):
        text = mutated(whole, rng)
        words, calls, _ = read(form, text, streams=False)
        calls_found += len(calls)
        for _, told in calls:
            assert isinstance(json.loads(told), dict)
        if not calls and not form.has_channels:
            assert words.strip() == text.strip()
        if turn % 5 == 0:
            assert read(form, text, 1)[1] == read(form, text, 5)[1]
    assert 0 < calls_found < 80


@EACH
def test_a_mark_that_texts_have_begins_a_call_only_where_an_answer_begins(form):
    text = write(form, "edit", GIVEN)
    words, calls, _ = read(form, f"So: {text}", 3)
    if form.start.strip("["):
        assert form.has_channels or (words, len(calls)) == ("So: ", 1)
    else:
        assert (words, calls) == (f"So: {text}", [])
