"""Answers of a schema and calls that must come, through both clients; what cannot be is refused."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.engine.grammar import check_structure, constraint_of
from dflash_mlx.serve import call_grammar
from dflash_mlx.serve.call_grammar import CallForm
from dflash_mlx.serve.structure import OPENAI, StructureRequest, structure_of
from support.serving import MODEL, TEMPLATE, actor_pair, chat_body, post, serving, user
from support.structured import conforms

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
WORDS = "Once upon a time."
# As Qwen's template has it: the call as JSON, on a line between the tags.
CALLS = TEMPLATE.replace(
    "<tool_call>{{ (tool_call.function or tool_call.name).name }}</tool_call>",
    '<tool_call>\n{"name": "{{ (tool_call.function or tool_call.name).name }}", '
    '"arguments": {{ tool_call.function.arguments | tojson }}}\n</tool_call>',
)
FREE = '<tool_call>\n{"name": "pick", "arguments": {"colour": "blue"}}\n</tool_call>'


def schema_of(**properties):
    known = {"type": "object", "properties": properties, "required": [*properties]}
    return {**known, "additionalProperties": False}


COUNT = schema_of(count={"type": "integer", "minimum": 1, "maximum": 30})
COLOUR = schema_of(colour={"enum": ["red", "green"]})
NAME = schema_of(name={"type": "string", "maxLength": 5}, ok={"type": "boolean"})
SCHEMAS = [COUNT, COLOUR, NAME]
BAD = {"type": "object", "properties": {"a": {"type": "numbre"}}}


def tool(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("add", COUNT), tool("pick", COLOUR)]
ADD = {"type": "function", "function": {"name": "add"}}


def act(prompt):
    """ "long" has an end token nowhere, so that what is chosen by a grammar is chosen evenly."""
    if prompt.endswith("long"):
        return "x" * 3000
    return f"Well. {FREE} So." if prompt.endswith("call") else WORDS


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pair = actor_pair(tmp_path_factory.mktemp("structured"), act, CALLS)
    usual = DecodeConfig("none", max_tokens=300)
    with serving(pair, usual) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def other(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def form(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def ask(client, text="hello", **more):
    return client.chat.completions.create(model=MODEL, messages=user(text), **more)


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_answer_follows_its_schema_strict_or_not(client, schema, strict):
    choice = ask(client, response_format=form(schema, strict=strict), temperature=1.0).choices[0]
    assert conforms(json.loads(choice.message.content), schema)
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None


def test_a_stream_follows_its_schema(client):
    chunks = [*ask(client, response_format=form(NAME), temperature=1.0, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert conforms(json.loads(text), NAME) and chunks[-1].choices[0].finish_reason == "stop"


def test_an_object_of_any_kind_can_be_asked_for(client):
    content = ask(client, response_format={"type": "json_object"}, max_tokens=40).choices[0]
    assert content.message.content.startswith("{")


def test_several_answers_at_once_each_have_their_own_schema(client):
    def one(i):
        schema = SCHEMAS[i % 3]
        if i % 4 == 3:
            return ask(client).choices[0].message.content == WORDS
        answer = ask(client, response_format=form(schema), temperature=1.0, seed=i, n=2)
        return all(conforms(json.loads(c.message.content), schema) for c in answer.choices)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(12)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", ADD])
def test_a_call_that_must_come_comes_and_follows_its_parameters(client, choice, stream):
    more = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": 3}
    answer = ask(client, parallel_tool_calls=False, stream=stream, **more)
    if stream:
        chunks = [*answer]
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        calls = answer.choices[0].message.tool_calls
        content = answer.choices[0].message.content or ""
        reason = answer.choices[0].finish_reason
    assert (len(calls), content, reason) == (1, "", "tool_calls")
    found = calls[0].function
    assert found.name == "add" or choice == "required"
    assert conforms(json.loads(found.arguments), {"add": COUNT, "pick": COLOUR}[found.name])


def test_several_calls_may_come_where_one_must(client):
    """Ends and next calls are equally likely to the toy where a call is over."""
    numbers = set()
    for seed in range(8):
        more = {"tools": TOOLS, "tool_choice": "required", "temperature": 2.0, "seed": seed}
        message = ask(client, "long", max_tokens=2000, **more).choices[0].message
        assert not message.content
        numbers.add(len(message.tool_calls))
    assert max(numbers) > 1


def test_a_tool_without_parameters_is_called_with_none(client):
    nothing = {"type": "function", "function": {"name": "now"}}
    message = ask(client, tools=[nothing], tool_choice="required", parallel_tool_calls=False)
    (call,) = message.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(client):
    strict = [tool("add", COUNT, strict=True), tool("pick", COLOUR, strict=True)]
    assert ask(client, tools=strict).choices[0].message.content == WORDS
    free = ask(client, "call", tools=TOOLS).choices[0].message
    assert json.loads(free.tool_calls[0].function.arguments) == {"colour": "blue"}
    held = ask(client, "call", tools=strict, parallel_tool_calls=False).choices[0].message
    assert held.content == "Well. "
    (call,) = held.tool_calls
    assert conforms(
        json.loads(call.function.arguments), {"add": COUNT, "pick": COLOUR}[call.function.name]
    )


def test_with_tools_and_a_schema_an_answer_is_a_call_or_follows_the_schema(client):
    kinds = set()
    for seed in range(12):
        strict = [tool("add", COUNT, strict=True), tool("pick", COLOUR, strict=True)]
        more = {"tools": strict, "response_format": form(COUNT), "parallel_tool_calls": False}
        message = ask(client, temperature=2.0, seed=seed, **more).choices[0].message
        kinds.add(bool(message.tool_calls))
        assert bool(message.tool_calls) != bool(message.content)
        if message.content:
            assert conforms(json.loads(message.content), COUNT)
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

    wanted = {"format": {"type": "json_schema", "schema": NAME}}
    answer = ask(output_config=wanted)
    assert conforms(json.loads(answer.content[0].text), NAME)
    assert answer.stop_reason == "end_turn"
    tools = [{"name": "add", "input_schema": COUNT}, {"name": "pick", "input_schema": COLOUR}]
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (any_one, {"type": "tool", "name": "add"}):
        answer = ask(tools=tools, tool_choice=choice)
        (call,) = answer.content
        assert (call.type, answer.stop_reason) == ("tool_use", "tool_use")
        assert call.name == "add" or choice is any_one
        assert conforms(call.input, {"add": COUNT, "pick": COLOUR}[call.name])


def test_drafts_and_grammars_go_together_in_both_apis(tmp_path):
    """Lookups draft what the conversation says; behind it the grammar draws the line."""
    said = '{"name": "abcde", "ok": true}'
    last = '{"count": 30}'  # whose end is forced
    pair = actor_pair(tmp_path, lambda prompt: said if said in prompt else last, CALLS)
    asked, tools = f"say {said}", [{"name": "pick", "input_schema": COLOUR}]
    with serving(pair, DecodeConfig("auto", max_tokens=300)) as server:
        whole = post(server, CHAT, chat_body(asked, response_format=form(NAME))).json()
        free = post(server, CHAT, chat_body(asked)).json()
        ends = post(server, CHAT, chat_body(response_format=form(COUNT))).json()
        body = {"model": MODEL, "max_tokens": 300, "messages": user(asked)}
        wanted = {"format": {"type": "json_schema", "schema": NAME}}
        other = post(server, MESSAGES, {**body, "output_config": wanted}).json()
        call = post(server, MESSAGES, {**body, "tools": tools, "tool_choice": {"type": "any"}})
    assert whole["choices"][0]["message"]["content"] == other["content"][0]["text"] == said
    assert free["choices"][0]["message"]["content"] == said
    assert ends["choices"][0]["message"]["content"] == last
    assert conforms(call.json()["content"][0]["input"], COLOUR)
    for answer in (whole, free, other, call.json(), ends):
        metrics = answer["dflash"]
        assert (metrics["method"], metrics["acceptance_length"] > 1) == ("ngram", True)
        assert "no choice" not in (metrics["parked"] or "")  # what is forced was not parked


CHAT_REFUSED = [
    ({"response_format": form(BAD)}, "response_format.json_schema.schema", "numbre"),
    ({"response_format": form({"type": "array", "uniqueItems": True})},
     "response_format.json_schema.schema", "uniqueItems"),
    ({"response_format": form(5)}, "response_format.json_schema.schema", "dict"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": form(COUNT, colour=1)}, "response_format.json_schema.colour", ""),
    ({"response_format": form({"const": "\ud800"})}, "response_format.json_schema.schema", ""),
    ({"tools": [TOOLS[0], tool("b", BAD)], "tool_choice": "required"},
     "tools[1].function.parameters", "numbre"),
    ({"tools": [tool("b", {"type": "string"})], "tool_choice": "required"},
     "tools[0].function.parameters", "string"),
    ({"tools": [tool("b", BAD, strict=True)]}, "tools[0].function.parameters", "numbre"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
     "tool_choice", "'no'"),
    ({"response_format": form(COUNT), "chat_template_kwargs": {"enable_thinking": True}},
     "chat_template_kwargs.enable_thinking", "thoughts"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "field", "said"), CHAT_REFUSED)
def test_what_is_no_schema_is_refused_by_its_field(server, more, field, said):
    found = post(server, CHAT, chat_body(**more))
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, field), error
    assert field in error["message"] and said in error["message"]
    assert len(error["message"]) < 700


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
         "output_config.format.schema"),
        ({"tools": [{"name": "a", "input_schema": BAD}], "tool_choice": {"type": "any"}},
         "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": COUNT}], "tool_choice": {"type": "tool"}},
         "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": COUNT}},
          "thinking": {"type": "enabled"}}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema", "schema": COUNT}},
          "messages": [*user("a"), {"role": "assistant", "content": "b"}]}, "messages"),
    ],
)  # fmt: skip
def test_the_other_api_refuses_by_its_own_fields(server, more, field):
    body = {"model": MODEL, "max_tokens": 9, "messages": user("a"), **more}
    found = post(server, MESSAGES, body)
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith(field), found.text


@pytest.fixture
def bare(tmp_path):
    """Without a grammar that was compiled before."""
    with serving(actor_pair(tmp_path, act, CALLS)) as server:
        yield server


def test_without_llguidance_the_extra_is_named(bare, monkeypatch):
    server = bare
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for more in ({"response_format": {"type": "json_object"}},
                 {"tools": TOOLS, "tool_choice": "required"}):  # fmt: skip
        found = post(server, CHAT, chat_body(**more))
        assert found.status_code == 400
        assert "llguidance" in found.json()["error"]["message"]
        assert "`structured`" in found.json()["error"]["message"]
    assert post(server, CHAT, chat_body()).status_code == 200


def test_a_template_whose_calls_are_no_json_refuses_those_that_must_come(tmp_path):
    with serving(actor_pair(tmp_path, act, TEMPLATE)) as server:
        for more in ({"tool_choice": "required"}, {"response_format": form(COUNT)}):
            found = post(server, CHAT, chat_body(tools=TOOLS, **more))
            assert (found.status_code, found.json()["error"]["param"]) == (400, *more)
            assert "no plain JSON" in found.json()["error"]["message"]


def test_a_thinking_template_does_not_think_where_a_form_is_given(tmp_path):
    thinks = CALLS.replace("{% if enable_thinking %}", "{% if enable_thinking != false %}")
    with serving(actor_pair(tmp_path, act, thinks), DecodeConfig("none", max_tokens=300)) as server:
        found = post(server, CHAT, chat_body(response_format=form(COUNT)))
        message = found.json()["choices"][0]["message"]
        assert "reasoning_content" not in message
        assert conforms(json.loads(message["content"]), COUNT)


def test_a_template_that_always_opens_a_thought_refuses_forms(tmp_path):
    thinks = CALLS.replace("{% if enable_thinking %}<think>{% endif %}", "<think>")
    with serving(actor_pair(tmp_path, act, thinks)) as server:
        found = post(server, CHAT, chat_body(response_format=form(COUNT)))
    assert found.status_code == 400 and "thinks first" in found.json()["error"]["message"]


def test_effort_is_refused_where_a_form_is_given(tmp_path):
    reads = CALLS + "{{ reasoning_effort }}"
    with serving(actor_pair(tmp_path, act, reads), DecodeConfig("none", max_tokens=300)) as server:
        for more, field in (
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"chat_template_kwargs": {"reasoning_effort": "high"}},
             "chat_template_kwargs.reasoning_effort"),
        ):  # fmt: skip
            found = post(server, CHAT, chat_body(response_format=form(COUNT), **more))
            assert (found.status_code, found.json()["error"]["param"]) == (400, field)
            assert post(server, CHAT, chat_body(**more)).status_code == 200
        none = chat_body(response_format=form(COUNT), reasoning_effort="none")
        assert post(server, CHAT, none).status_code == 200


def test_a_model_is_not_told_that_a_tool_is_strict(tmp_path):
    shown = CALLS.replace("{{ t.function.name }}", "{{ t | tojson }}")
    told = actor_pair(tmp_path, lambda prompt: "so" if "strict" in prompt else "not so", shown)
    with serving(told) as server:
        found = post(server, CHAT, chat_body(tools=[tool("add", COUNT, strict=True)]))
        theirs = [{"name": "add", "input_schema": COUNT, "strict": True}]
        body = {"model": MODEL, "max_tokens": 30, "messages": user("a"), "tools": theirs}
        other = post(server, MESSAGES, body)
    assert found.json()["choices"][0]["message"]["content"] == "not so"
    assert other.json()["content"][0]["text"] == "not so"


def test_tags_that_are_one_token_are_that_token_in_grammars():
    form = CallForm("<[5]>", "<[6]>", "<tool_call>", "\n", "\n", "arguments")
    for make in (call_grammar.calls_only, call_grammar.words_and_calls):
        for one in (True, False):
            check_structure(StructureConfig(grammar=make(form, TOOLS_OF, one)))
    grammar = call_grammar.calls_or_json(form, TOOLS_OF, True, COUNT)
    check_structure(StructureConfig(grammar=grammar))


TOOLS_OF = [each | {"type": "function"} for each in TOOLS]


def test_a_grammar_is_ready_before_the_thread_that_decodes_asks_for_it(bare, monkeypatch):
    structure = structure_of(bare.pair, StructureRequest(COUNT), OPENAI)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)  # nothing can be compiled any more
        assert constraint_of(bare.pair, DecodeConfig(structure=structure), 0) is not None
