"""Thoughts before answers of a schema and before calls that must come."""

from __future__ import annotations

import json

import pytest
from jsonschema_rs import is_valid

from support.serving import TEMPLATE, actor_pair, said, serving
from support.structured import ADD, CALLS, COUNT, NOTE, STRICT, TOOLS, USUAL, WORDS, act, form


def test_a_template_that_may_think_does_not_where_a_form_is_given():
    may = CALLS.replace("{% if enable_thinking %}", "{% if enable_thinking != false %}")
    with serving(actor_pair(act, may), USUAL) as server:
        found = server.chat(response_format=form(COUNT))
    assert "reasoning_content" not in found.text and is_valid(COUNT, json.loads(said(found)))


MUST = CALLS.replace("{% if enable_thinking %}<think>{% endif %}", "<think>")
CALLED = '<tool_call>\n{"name": "add", "arguments": {"count": 3}}\n</tool_call>'
GIVEN = {
    "required": ({"tools": TOOLS, "tool_choice": "required"}, CALLED),
    "strict": ({"tools": STRICT}, CALLED),
    "schema": ({"response_format": form(COUNT)}, '{"count": 3}'),
    "any object": ({"response_format": {"type": "json_object"}}, '{"a": "</think>"}'),
    "marks in a schema": ({"response_format": form(NOTE)}, '{"note": "a <think> b"}'),
    "marks beside tools": (
        {"response_format": form(NOTE), "tools": STRICT},
        '{"note": "<think> <tool_call>"}',
    ),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("template", [MUST, CALLS])
def test_a_thought_comes_before_what_is_given_where_it_has_to_or_is_asked_for(given, template):
    more, words = GIVEN[given]
    asked = {**more, "enable_thinking": True} if template is CALLS else more
    answer = f"<think>Let me see.</think>\n\n{words}"
    with serving(actor_pair(lambda prompt: answer, template), USUAL) as server:
        whole = server.chat(**asked).json()["choices"][0]["message"]
        text = server.chat(**asked, stream=True).text
    assert whole["reasoning_content"] == "Let me see." and "reasoning_content" in text
    if words != CALLED:
        assert whole["content"] == words
    else:
        assert [json.loads(c["function"]["arguments"]) for c in whole["tool_calls"]] == [
            {"count": 3}
        ]


def test_behind_its_thought_a_model_that_would_rather_talk_has_to_call():
    answer = f"<think>Hm.</think>\n\n{WORDS}"
    asked = {"tools": TOOLS, "tool_choice": ADD, "temperature": 1.0, "seed": 3}
    with serving(actor_pair(lambda prompt: answer, MUST), USUAL) as server:
        whole = server.chat(**asked).json()["choices"][0]["message"]
        budget = server.chat(**asked, thinking_budget=1)
        assert budget.json()["dflash"]["ignored"] == ["thinking_budget"]
    assert (whole["reasoning_content"], whole["content"]) == ("Hm.", None)
    assert is_valid(COUNT, json.loads(whole["tool_calls"][0]["function"]["arguments"]))


CHANNELS = TEMPLATE.replace(
    "<tool_call>{{ (tool_call.function or tool_call.name).name }}</tool_call>",
    "<|channel|>commentary to=functions.{{ (tool_call.function or tool_call.name).name }} "
    "<|constrain|>json<|message|>{{ tool_call.function.arguments | tojson }}<|call|>",
)
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("thought", ["", ANALYSIS])
def test_an_answer_of_a_schema_is_in_the_final_channel_of_a_model_that_has_channels(thought):
    words = '{"note": "<|end|> <think>"}'
    answer = f"{thought}<|channel|>final<|message|>{words}"
    with serving(actor_pair(lambda prompt: answer, CHANNELS), USUAL) as server:
        message = server.chat(response_format=form(NOTE)).json()["choices"][0]["message"]
    assert message["content"] == words
    assert message.get("reasoning_content", "") == ("Hm." if thought else "")


def test_effort_which_programs_send_unasked_is_named_only_where_a_form_is_given():
    high = {"reasoning_effort": "high"}
    with serving(actor_pair(act, CALLS + "{{ reasoning_effort }}"), USUAL) as server:
        form_of = {"response_format": form(COUNT)}
        assert server.chat(**form_of, chat_template_kwargs=high).status_code == 200
        assert server.chat(**form_of, **high).json()["dflash"]["ignored"] == ["reasoning_effort"]
