"""Calls in every form: written, read, and made of grammars by a model that chooses by chance."""

from __future__ import annotations

import json
import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from jinja2 import Environment
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.serve.chat import Chat
from dflash_mlx.serve.openai_requests import FIELDS
from dflash_mlx.serve.structure import grammar_of
from dflash_mlx.session.calls import CALL, WORDS
from dflash_mlx.session.forms import FORMS
from dflash_mlx.session.reading import AnswerReader

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
