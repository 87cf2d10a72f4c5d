"""Calls of every form: learned of a template, read as they stream, promised by a grammar."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from jinja2 import Environment
from jsonschema_rs import is_valid
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.serve.calls import CALL, WORDS, kinds_of, value_of
from dflash_mlx.serve.chat import Chat
from dflash_mlx.serve.forms import FORMS, PLAIN, form_of
from dflash_mlx.serve.openai_requests import FIELDS
from dflash_mlx.serve.reading import AnswerReader
from dflash_mlx.serve.structure import beyond_tags, grammar_of

TOKENS = SimpleNamespace()  # a tokenizer that is not asked for anything
PROPERTIES = {
    "path": {"type": "string"},
    "line": {"type": "integer"},
    "hard": {"type": "boolean"},
    "edits": {
        "type": "array",
        "items": {"type": "object", "properties": {"old": {"type": "string"}}},
    },
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "mode": {"enum": ["fast", "slow"]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["path", "line"]}
TOOL = {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}
NOTHING = {"type": "function", "function": {"name": "now"}}
TOOLS = [TOOL, NOTHING]
GIVEN = {
    "path": "a \"b\" \\ c,\n  {d}: [e] <f> 'g' é\n",
    "line": -3,
    "hard": True,
    "edits": [{"old": "x, y: {z}"}, {"old": ""}],
    "note": None,
    "mode": "fast",
}


def write(form, name, arguments):
    """A call in a form."""

    def one(key, value):
        is_text = isinstance(value, str)
        text = json.dumps(value, ensure_ascii=False)
        if is_text and (form.quote or form.over):
            text = form.quote + value + form.quote
        return form.key + key + ((not is_text and form.other) or form.value) + text + form.over

    inside = json.dumps(arguments, ensure_ascii=False)
    if form.value:
        inside = form.between.join(one(*each) for each in arguments.items())
    return form.start + form.call + name + form.named + inside + form.done + form.end


EACH = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mark + form.named[:12].strip())


def read(form, text, size=1000, streams=True, tools=TOOLS, **more):
    """Words, and the calls with their arguments as text."""
    reader, cut = AnswerReader(TOKENS, form, tools, streams=streams, **more), False
    parts = [p for i in range(0, len(text), size) for p in reader.feed(text[i : i + size])]
    parts += reader.finish(cut)
    calls = {}
    for part in (p for p in parts if p.kind == CALL):
        name, text = calls.get(part.identity, (part.name, ""))
        calls[part.identity] = (name, text + part.text)
    return "".join(p.text for p in parts if p.kind == WORDS), [*calls.values()], len(parts)


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


def pair_of(template, parser=None):
    """A pair of which only its template is looked at."""

    def render(talk, tokenize, tools=None, **more):
        jinja = Environment(extensions=["jinja2.ext.loopcontrols"])
        return jinja.from_string(template).render(messages=talk, tools=tools, **more)

    marks = {"tool_call_start": None, "tool_call_end": None, "tool_parser": None}
    if parser is not None:
        own = parser.tool_call_start, parser.tool_call_end, parser.parse_tool_call
        marks = dict(zip(marks, own, strict=True))
    more = {"has_tool_calling": parser is not None, "apply_chat_template": render}
    tokenizer = SimpleNamespace(chat_template=template, **marks, **more)
    return SimpleNamespace(tokenizer=tokenizer, template={}, recall=lambda key, learn: learn())


def in_template(call):
    """A template that reads tools and writes calls so."""
    each = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    said = f"[{{{{ m.role }}}}]{{{{ m.content }}}}{each}"
    return f"{{{{ tools }}}}{{% for m in messages %}}{said}{{% endfor %}}"


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


MARKS = r"<\|[^<>]*?\|>|<｜[^<>]*?｜>|<escape>|\[[A-Z_]+\]|</?arg_\w+>|</?tool_call>"


@cache
def tokenizer_of(form):
    """Bytes, and the marks of a form as tokens that no text can spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = write(form, "edit", {"a": "", "b": 1}) + (
        "<|end|><|start|>" if form.has_channels else ""
    )
    marks = re.findall(
        r"<\|[^<>]*?\|>|<｜[^<>]*?｜>|<escape>|\[[A-Z_]+\]|</?arg_\w+>|</?tool_call>", text
    )
    tokenizer.add_special_tokens([*dict.fromkeys([*marks, "</s>"])])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    ends = {
        fast.convert_tokens_to_ids(each)
        for each in ("</s>", "<|call|>")
        if each in [*marks, "</s>"]
    }
    return fast, ends


def said_by_chance(form, grammar, rng, most=900, begin=""):
    """What a model whose tokens are all as likely says in a grammar, an end rather than not."""
    tokenizer, ends = tokenizer_of(form)
    library = from_tokenizer(tokenizer, eos_token=sorted(ends))
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    said = tokenizer.encode(begin)
    assert matcher.try_consume_tokens(said) == len(said)
    while not matcher.is_stopped() and len(said) < most:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(tokenizer)])
        assert not matcher.is_error(), (matcher.get_error(), tokenizer.decode(said))
        likely = [t for t in allowed if t in ends or tokenizer.decode([t]) in '}])"<>' or t > 255]
        token = int(rng.choice(likely if likely and rng.random() < 0.6 else [*allowed]))
        assert matcher.try_consume_tokens([token])
        said += [] if token in ends else [token]
    return tokenizer.decode(said), matcher.is_stopped()


TIGHT = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 6},
        "line": {"type": "integer", "minimum": 0, "maximum": 99},
        "mode": {"enum": ["fast", "slow"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "at": {"$ref": "#/$defs/P"},
    },
    "required": ["line", "mode"],
    "additionalProperties": False,
    "$defs": {"P": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                    "additionalProperties": False}},
}  # fmt: skip
HELD = {"edit": TIGHT, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
HELD_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in HELD.items()
]


def grammar_for(form, tools=HELD, **more):
    tokenizer, ends = tokenizer_of(form)
    wrapped = SimpleNamespace(eos_token_ids=ends, get_added_vocab=tokenizer.get_added_vocab)
    return grammar_of(form, Chat(FIELDS, [], **more), tools, wrapped)


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


def mutated(text, rng):
    """With some of it gone, twice there, or in another place."""
    for _ in range(rng.randint(1, 3)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in "ab")
        b = min(b, a + rng.randint(1, 9))
        kept = text[a:b]
        text = (
            text[:a] + rng.choice(["", kept * 2, kept[::-1], rng.choice('<>{}"\\\n[')]) + text[b:]
        )
        text = text or "<"
    return text


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
