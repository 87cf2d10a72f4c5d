"""Answers of a schema and calls that must come, through both clients; what cannot be is refused."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from jsonschema_rs import is_valid

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.engine.sequence import constraint_of
from dflash_mlx.serve.chat import Chat
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.openai_requests import FIELDS
from dflash_mlx.serve.structure import _tools, structure_of
from dflash_mlx.session.forms import FORMS
from support.serving import MODEL, TEMPLATE, actor_pair, ask, said, serving, user
from support.structured import (
    ADD,
    BAD,
    CALLS,
    COLOUR,
    COUNT,
    NAME,
    ODD,
    SCHEMAS,
    STRICT,
    TOOLS,
    USUAL,
    WORDS,
    act,
    form,
    schema_of,
    tool,
)


@pytest.fixture(scope="module")
def server():
    with serving(actor_pair(act, CALLS), USUAL) as server:
        yield server


def calls_of(answer, stream):
    """Text, calls and finish reason of a whole answer, or of one that comes in chunks."""
    if not stream:
        (choice,) = answer.choices
        return choice.message.content or "", choice.message.tool_calls or [], choice.finish_reason
    chunks = [chunk.choices[0] for chunk in answer]
    calls = []
    for part in (part for chunk in chunks for part in chunk.delta.tool_calls or []):
        if part.id:
            calls.append(part)
        else:
            calls[part.index].function.arguments += part.function.arguments
    return "".join(c.delta.content or "" for c in chunks), calls, chunks[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("schema", "strict"), [(COUNT, True), (COLOUR, False), (NAME, None)])
def test_an_answer_follows_its_schema_strict_or_not(client, schema, strict, stream):
    more = {"response_format": form(schema, strict=strict), "temperature": 1.0}
    text, calls, reason = calls_of(ask(client, stream=stream, **more), stream)
    assert is_valid(schema, json.loads(text)) and (calls, reason) == ([], "stop")


def test_several_answers_at_once_each_have_their_own_schema_or_are_any_object(client):
    content = ask(client, response_format={"type": "json_object"}, max_tokens=40).choices[0]
    assert content.message.content.startswith("{")

    def one(i):
        schema = SCHEMAS[i % 3]
        if i % 4 == 3:
            return ask(client).choices[0].message.content == WORDS
        answer = ask(client, response_format=form(schema), temperature=1.0, seed=i, n=2)
        return all(is_valid(schema, json.loads(c.message.content)) for c in answer.choices)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(12)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", ADD])
def test_a_call_that_must_come_comes_and_follows_its_parameters(client, choice, stream):
    more = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": 3}
    answer = ask(client, parallel_tool_calls=False, stream=stream, **more)
    content, (call,), reason = calls_of(answer, stream)
    assert (content, reason) == ("", "tool_calls")
    assert call.function.name == "add" or choice == "required"
    assert is_right(call)


def is_right(call):
    parameters = {"add": COUNT, "pick": COLOUR}[call.function.name]
    return is_valid(parameters, json.loads(call.function.arguments))


def test_several_calls_may_come_where_one_must_and_a_tool_may_have_no_parameters(client):
    """Ends and next calls are equally likely to the toy where a call is over."""
    numbers = set()
    for seed in range(8):
        more = {"tools": TOOLS, "tool_choice": "required", "temperature": 2.0, "seed": seed}
        message = ask(client, "long", max_tokens=2000, **more).choices[0].message
        assert not message.content
        numbers.add(len(message.tool_calls))
    assert max(numbers) > 1
    nothing = {"type": "function", "function": {"name": "now"}}
    message = ask(client, tools=[nothing], tool_choice="required", parallel_tool_calls=False)
    (call,) = message.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_half_a_required_call_is_neither_words_nor_a_call(client):
    for most in (3, 14, 40):
        more = {"tools": TOOLS, "tool_choice": "required", "max_tokens": most}
        (choice,) = ask(client, "long", **more).choices
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert not choice.message.tool_calls


def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(client):
    assert ask(client, tools=STRICT).choices[0].message.content == WORDS
    free = ask(client, "call", tools=TOOLS).choices[0].message
    assert json.loads(free.tool_calls[0].function.arguments) == {"colour": "blue"}
    held = ask(client, "call", tools=STRICT, parallel_tool_calls=False).choices[0].message
    assert held.content == "Well. "
    assert [is_right(call) for call in held.tool_calls] == [True]


def test_with_tools_and_a_schema_an_answer_is_a_call_or_follows_the_schema(client):
    kinds = set()
    for seed in range(12):
        more = {"tools": STRICT, "response_format": form(COUNT), "parallel_tool_calls": False}
        message = ask(client, temperature=2.0, seed=seed, **more).choices[0].message
        kinds.add(bool(message.tool_calls))
        assert bool(message.tool_calls) != bool(message.content)
        if message.content:
            assert is_valid(COUNT, json.loads(message.content))
    assert kinds == {True, False}


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_api_has_schemas_and_forced_tools_too(other, stream):
    def ask(**more):
        asked = {"model": MODEL, "max_tokens": 300, "messages": user("hello"), **more}
        asked["extra_body"] = {"seed": 3, "temperature": 1.0}
        if not stream:
            return other.messages.create(**asked)
        with other.messages.stream(**asked) as events:
            return events.get_final_message()

    answer = ask(output_config=format_of(NAME))
    assert is_valid(NAME, json.loads(answer.content[0].text))
    assert answer.stop_reason == "end_turn"
    tools = [{"name": "add", "input_schema": COUNT}, {"name": "pick", "input_schema": COLOUR}]
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (any_one, {"type": "tool", "name": "add"}):
        answer = ask(tools=tools, tool_choice=choice)
        (call,) = answer.content
        assert (call.type, answer.stop_reason) == ("tool_use", "tool_use")
        assert call.name == "add" or choice is any_one
        assert is_valid({"add": COUNT, "pick": COLOUR}[call.name], call.input)


def test_drafts_and_grammars_go_together_in_both_apis():
    """Lookups draft what the conversation says; behind it the grammar draws the line."""
    name = '{"name": "abcde", "ok": true}'
    last = '{"count": 30}'  # whose end is forced
    pair = actor_pair(lambda prompt: name if name in prompt else last, CALLS)
    asked, tools = f"say {name}", [{"name": "pick", "input_schema": COLOUR}]
    with serving(pair, DecodeConfig("auto", max_tokens=300)) as server:
        whole = server.chat(asked, response_format=form(NAME))
        free, ends = server.chat(asked), server.chat(response_format=form(COUNT))
        other = server.message(asked, output_config=format_of(NAME))
        call = server.message(asked, tools=tools, tool_choice={"type": "any"})
    assert said(whole) == said(free) == other.json()["content"][0]["text"] == name
    assert said(ends) == last
    assert is_valid(COLOUR, call.json()["content"][0]["input"])
    for answer in (whole, free, other, call, ends):
        metrics = answer.json()["dflash"]
        assert (metrics["method"], metrics["acceptance_length"] > 1) == ("ngram", True)
        assert "no choice" not in (metrics["parked"] or "")  # what is forced was not parked


def format_of(schema):
    return {"format": {"type": "json_schema", "schema": schema}}


SCHEMA, TOOL = "response_format.json_schema.schema", "tools[{}].function.parameters"
NAMED = {"type": "function", "function": {"name": "no"}}
CHAT_REFUSED = [  # the field, what is said of it, and the request
    (SCHEMA, "numbre", {"response_format": form(BAD)}),
    (SCHEMA, "dict", {"response_format": form(5)}),
    (SCHEMA, "", {"response_format": form({"const": "\ud800"})}),
    ("response_format.json_schema.schema", "missing", {"response_format": {"type": "json_schema"}}),
    (TOOL.format(1), "numbre", {"tools": [TOOLS[0], tool("b", BAD)], "tool_choice": "required"}),
    (TOOL.format(0), "string", {"tools": [tool("b", {"type": "string"}, strict=True)]}),
    (TOOL.format(0), "numbre", {"tools": [tool("b", BAD, strict=True)]}),
    ("tool_choice", "'no'", {"tools": TOOLS, "tool_choice": NAMED}),
    ("tool_choice", "without tools", {"tool_choice": "required"}),
]
SAID = [*user("a"), {"role": "assistant", "content": "b"}]
WRONG, RIGHT = ({"name": "a", "input_schema": schema} for schema in (BAD, COUNT))
MESSAGE_REFUSED = [
    ("output_config.format.schema", "", {"output_config": format_of(BAD)}),
    ("tools[0].input_schema", "", {"tools": [WRONG], "tool_choice": {"type": "any"}}),
    ("tool_choice", "", {"tools": [RIGHT], "tool_choice": {"type": "tool"}}),
    ("tool_choice", "without tools", {"tool_choice": {"type": "any"}}),
    ("messages", "", {"output_config": format_of(COUNT), "messages": SAID}),
]
REFUSED = [("chat", *c) for c in CHAT_REFUSED] + [("message", *c) for c in MESSAGE_REFUSED]


@pytest.mark.parametrize(("api", "field", "told", "more"), REFUSED)
def test_what_is_no_schema_is_refused_by_its_field_in_both_apis(server, api, field, told, more):
    found = getattr(server, api)(**more)
    error = found.json()["error"]
    assert found.status_code == 400 and error.get("param", field) == field, error
    assert error["message"].startswith(field) and told in error["message"]
    assert len(error["message"]) < 700


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    any_object, call = {"type": "json_object"}, {"tools": TOOLS, "tool_choice": "required"}
    with serving(actor_pair(act, CALLS)) as server:  # where no grammar was compiled before
        for found in (server.chat(response_format=any_object), server.chat(**call)):
            assert found.status_code == 400
            assert "llguidance" in found.text and "`structured`" in found.text
        told = server.chat(response_format=any_object).json()["error"]
        assert told["param"] == "response_format"
        assert server.chat().status_code == 200


# As Qwen3-Coder's template has it: arguments as tags around raw text.
TAGS = TEMPLATE.replace(
    "<tool_call>{{ (tool_call.function or tool_call.name).name }}</tool_call>",
    "<tool_call>\n<function={{ (tool_call.function or tool_call.name).name }}>\n"
    "{% for k, v in tool_call.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
LIKE = {"type": "string", "pattern": "a+"}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_tags_come_as_json_that_follows_the_tools_schema(stream):
    import openai

    free = "<tool_call>\n<function=pick>\n<parameter=colour>\nblue\n</parameter>\n</function>"
    tools = [tool("add", COUNT), tool("pick", COLOUR), tool("name", NAME)]
    schemas = {"add": COUNT, "pick": COLOUR, "name": NAME}
    act = lambda prompt: f"Well. {free}\n</tool_call>" if prompt.endswith("call") else WORDS  # noqa: E731
    with serving(actor_pair(act, TAGS), USUAL) as server:
        more = {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0}
        with openai.OpenAI(**more) as client:
            text, (call,), _ = calls_of(ask(client, "call", tools=tools, stream=stream), stream)
            assert (text, json.loads(call.function.arguments)) == ("Well. ", {"colour": "blue"})
            for seed in range(4):
                asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
                answer = ask(client, "long", **asked, temperature=1.0, seed=seed, stream=stream)
                text, (call,), _ = calls_of(answer, stream)
                schema = schemas[call.function.name]
                assert not text and is_valid(schema, json.loads(call.function.arguments))


def test_what_tags_cannot_promise_of_a_schema_is_named_and_refused_where_it_is_strict():
    with serving(actor_pair(act, TAGS), USUAL) as server:
        asked = {"tool_choice": "required", "max_tokens": 5}
        found = server.chat(tools=[tool("f", schema_of(a=LIKE))], **asked)
        assert [each for each in found.json()["dflash"]["ignored"] if "has pattern" in each]
        found = server.chat(tools=[tool("f", schema_of(a=LIKE), strict=True)])
        assert (found.status_code, found.json()["error"]["param"]) == (400, TOOL.format(0))
        loop = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "array", "items": {"$ref": "#/$defs/A"}}]}
        loop = {**schema_of(a={"$ref": "#/$defs/A"}), "$defs": {"A": loop}}
        assert server.chat(tools=[tool("f", loop)], **asked).status_code < 500


def test_calls_of_an_unknown_form_are_refused_where_they_must_come():
    asked = [("tool_choice", "required"), ("tool_choice", ADD), ("response_format", form(COUNT))]
    with serving(actor_pair(act, TEMPLATE + ODD)) as server:
        for field, value in asked:
            found = server.chat(tools=TOOLS, **{field: value})
            assert (found.status_code, found.json()["error"]["param"]) == (400, field)
            assert "not known" in found.text


def test_a_model_is_not_told_that_a_tool_is_strict():
    shown = CALLS.replace("{{ t.function.name }}", "{{ t | tojson }}")
    act = lambda prompt: "so" if "strict" in prompt else "not so"  # noqa: E731
    with serving(actor_pair(act, shown)) as server:
        assert said(server.chat(tools=STRICT)) == "not so"
        other = server.message(tools=[{**RIGHT, "strict": True}])
    assert other.json()["content"][0]["text"] == "not so"


def test_a_grammar_is_ready_before_the_thread_that_decodes_asks_for_it(monkeypatch):
    pair = actor_pair(act, CALLS)
    structure = structure_of(pair, Chat(FIELDS, [], schema=COUNT))
    monkeypatch.setitem(sys.modules, "llguidance", None)  # nothing can be compiled any more
    assert constraint_of(pair, DecodeConfig(structure=structure), ()) is not None


SET = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
PATH = {"type": "string", "format": "path", "maxLength": 3}


@pytest.mark.parametrize("schema", [schema_of(s=SET), schema_of(p=PATH)])
def test_what_the_library_lacks_of_a_schema_is_left_out_and_named_unless_it_is_strict(
    server, schema
):
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    found = server.chat("long", response_format=given, temperature=1.0, seed=1)
    (named,) = found.json()["dflash"]["ignored"]
    assert "uniqueItems" in named or "path" in named
    assert json.loads(said(found)).keys() == schema["properties"].keys()
    given["json_schema"]["strict"] = True
    assert server.chat("long", response_format=given).status_code == 400
    given = {"type": "json_schema", "schema": schema, "strict": True}
    found = server.post("/v1/responses", {"model": MODEL, "input": "a", "text": {"format": given}})
    assert found.status_code == 400 and found.json()["error"]["param"] == "text.format.schema"
    required = {"tools": [tool("f", schema)], "tool_choice": "required"}
    assert server.chat("long", **required).status_code == 200


MANY = {f"p{i}": {"type": "string"} for i in range(5000)}


def test_more_arguments_than_the_stack_of_the_grammar_bears_are_refused():
    """They ended the process, where arguments stand one by one."""
    form = next(each for each in FORMS if each.value and each.over)
    chat = Chat(FIELDS, [], [tool("f", {"type": "object", "properties": MANY})], "")
    with pytest.raises(ApiError):
        _tools(chat, form)
