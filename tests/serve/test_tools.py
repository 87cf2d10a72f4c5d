"""Tools, round trip: the model is told of them, calls one, and hears what it answered."""

from __future__ import annotations

import json

from support.models import TEMPLATE as PLAIN_TEMPLATE
from support.serving import MODEL, WORDS, actor_pair, serving, speak, user

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "adds", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": ADD}


def ask(client, messages, **more):
    if isinstance(messages, str):
        messages = user(messages)
    return client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], **more)


def test_a_call_and_its_result_go_round(client):
    choice = ask(client, "what is 1 + 2").choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": "2"}
    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    again = ask(client, [*user("what is 1 + 2"), said, result]).choices[0]
    assert (again.finish_reason, again.message.content) == ("stop", "It is 3.")


def test_a_stream_has_calls_whole_and_by_number(client):
    chunks = [*ask(client, "two", stream=True)]
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "add")]
    assert calls[0].id != calls[1].id
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "First.\n"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_ends_the_answer_where_one_is_wanted_and_none_comes_of_tools_not_to_use(client):
    choice = ask(client, "two", parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    choice = ask(client, "what is 1 + 2", tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (WORDS, "stop")


def test_a_model_whose_template_knows_no_tools_refuses_them():
    with serving(actor_pair(speak, PLAIN_TEMPLATE)) as server:
        found = server.chat("a", tools=[TOOL])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tools")


def test_tools_go_round_in_the_other_api(other):
    tool = {"name": "add", "input_schema": PARAMETERS}
    usual = {"model": MODEL, "max_tokens": 200, "tools": [tool]}
    first = other.messages.create(messages=user("what is 1 + 2"), **usual)
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert (text.text, call.name, call.input) == ("Let me see.", "add", {"a": 1, "b": "2"})
    said = {"role": "assistant", "content": first.content}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    talk = [*user("what is 1 + 2"), said, {"role": "user", "content": [result]}]
    assert other.messages.create(messages=talk, **usual).content[0].text == "It is 3."
    one = {"type": "auto", "disable_parallel_tool_use": True}
    alone = other.messages.create(messages=user("two"), tool_choice=one, **usual)
    assert [block.type for block in alone.content] == ["text", "tool_use"]
    with other.messages.stream(messages=user("two"), **usual) as stream:
        last = stream.get_final_message()
    assert [block.type for block in last.content] == ["text", "tool_use", "tool_use"]
    assert last.content[2].input == {"a": 1, "b": "2"}
