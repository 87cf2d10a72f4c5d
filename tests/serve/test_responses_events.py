"""The events of /v1/responses, as the openai package types them, and what clients make of them."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.serve import request_queue, service
from dflash_mlx.serve.openai_requests import Choice, chosen
from dflash_mlx.serve.responses_requests import ResponsesRequest
from support.serving import COUNT, MODEL, TOOL, WORDS, chat_body, serving, speak

RESPONSES = "/v1/responses"
EVENT, ITEM = TypeAdapter(ResponseStreamEvent), TypeAdapter(ResponseItem)
ADD = {"type": "function", "name": "add", "parameters": COUNT}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
GROUP = {"type": "namespace", "name": "mail", "description": "d", "tools": [ADD, PATCH]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
INPUT = 'a\n"b" \U0001f600'


def said(name, arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return f"Look.<tool_call>{call}</tool_call>"


def body(text="hello", **more):
    return {"model": MODEL, "input": text, **more}


def events(server, **more):
    with server.streaming(RESPONSES, body(**more)) as lines:
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def accumulated(found):
    """The items that a client has in the end, put together of nothing but what was added."""
    items = []
    for event in found:
        kind = event["type"].removeprefix("response.")
        place = event.get("output_index")
        if kind == "output_item.added":
            items.append(json.loads(json.dumps(event["item"])))
        elif kind in ("content_part.added", "reasoning_summary_part.added"):
            key = "summary" if "summary_index" in event else "content"
            items[place][key].append(json.loads(json.dumps(event["part"])))
        elif kind.endswith(".delta"):
            item = items[place]
            if item["type"] in ("function_call", "custom_tool_call"):
                item["arguments" if item["type"] == "function_call" else "input"] += event["delta"]
            else:
                part = item["summary" if "summary_index" in event else "content"][0]
                part["text"] += event["delta"]
                part.setdefault("logprobs", []).extend(event.get("logprobs", []))
                if item["type"] == "reasoning":
                    del part["logprobs"]
        elif kind == "output_item.done":
            assert {**items[place], "status": event["item"]["status"]} == event["item"]
            items[place] = event["item"]
    return items


CASES = {
    "words": (speak, {}),
    "cut": (speak, {"max_output_tokens": 4}),
    "thought": (speak, {"text": "think"}),
    "summary": (speak, {"text": "think", "reasoning": {"summary": "auto"}}),
    "logprobs": (speak, {"text": "think", **LOGPROBS}),
    "calls": (speak, {"text": "two", "tools": [ADD], **LOGPROBS}),
    "custom": (lambda _: said("patch", {"input": INPUT}), {"tools": [PATCH]}),
    "group": (lambda _: said("mail__add", {"a": 1}), {"tools": [GROUP]}),
    "custom in a group": (lambda _: said("mail__patch", {"input": INPUT}), {"tools": [GROUP]}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_event_is_one_of_the_published_types_and_the_last_says_what_all_have_said(case):
    act, more = CASES[case]
    with serving(act) as server:
        found = events(server, **more)
        whole = server.post(RESPONSES, body(**more)).json()
    for event in found:
        EVENT.validate_python(event)
        if "response" in event:
            Response.model_validate(event["response"])
    assert [each["sequence_number"] for each in found] == [*range(len(found))]
    last = found[-1]["response"]
    assert accumulated(found) == last["output"]
    new = ("id", "call_id")
    for told, again in zip(last["output"], whole["output"], strict=True):
        assert {**told, **dict.fromkeys(new)} == {**again, **dict.fromkeys(new)}
    closed = [f"response.{last['status']}", "response.output_item.done"]
    assert [each["type"] for each in found[-1:-3:-1]] == closed


def test_a_summary_is_the_thought_where_one_is_asked_for():
    with serving(speak) as server:
        thought, _ = server.post(RESPONSES, body("think", reasoning={"summary": "auto"})).json()[
            "output"
        ]
        assert thought["summary"] == [{"type": "summary_text", "text": "Let me see."}]
        assert "content" not in thought


def test_log_probabilities_are_those_of_the_words():
    with serving(speak) as server:
        for text, words in (("think", "It is blue."), ("hello", WORDS)):
            found = server.post(RESPONSES, body(text, **LOGPROBS)).json()["output"][-1]
            told = found["content"][0]["logprobs"]
            assert "".join(each["token"] for each in told).strip() == words
            assert all(len(each["top_logprobs"]) == 2 for each in told)
        plain = server.post(RESPONSES, body()).json()["output"][0]["content"][0]["logprobs"]
        assert plain == []


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_words_behind_a_long_call_are_those_of_the_words(stream):
    text = said("add", {"a": 1, "note": "D one. " * 60}) + "Done."
    with serving(lambda _: text, usual=DecodeConfig("none", max_tokens=900)) as server:
        asked = body(tools=[ADD], stream=stream, **LOGPROBS)
        found = server.post(RESPONSES, asked)
    found = found.text.rpartition("data: ")[2] if stream else found.text
    output = json.loads(found)["response"]["output"] if stream else json.loads(found)["output"]
    for item, words in ((output[0], "Look."), (output[2], "Done.")):
        told = item["content"][0]["logprobs"]
        assert "".join(each["token"] for each in told) == words
    assert "logprobs" not in output[1]


def test_a_long_text_is_not_read_again_for_each_of_its_tokens(monkeypatch):
    text = '<tool_call>{"nam": "' + "word " * 60 + '"}</tool_call>'  # words, as it is no call
    with serving(lambda _: text, usual=DecodeConfig("none", max_tokens=900)) as server:
        tokenizer, read = server.pair.tokenizer, []
        decode = tokenizer._tokenizer.decode

        def counted(ids, **how):
            if threading.current_thread() is server.thread:  # the model of this test decodes, too
                read.append(len(ids))
            return decode(ids, **how)

        monkeypatch.setattr(tokenizer._tokenizer, "decode", counted)
        asked = body(tools=[ADD], stream=True, **LOGPROBS)
        found = server.post(RESPONSES, asked).text
        assert 1000 < sum(read) < 20000
    told = json.loads(found.rpartition("data: ")[2])["response"]["output"][0]["content"][0]
    assert "".join(each["token"] for each in told["logprobs"]) == text == told["text"]


def test_a_custom_tool_takes_a_text_and_its_calls_go_round():
    seen = []

    def act(prompt):
        seen.append(prompt)
        return "Done." if "[tool]ok" in prompt else said("mail__patch", {"input": INPUT})

    with serving(act) as server:
        first = server.post(RESPONSES, body(tools=[GROUP])).json()
        assert first["dflash"]["ignored"] == []
        call = first["output"][1]
        assert (call["type"], call["name"], call["namespace"]) == (
            "custom_tool_call",
            "patch",
            "mail",
        )
        assert call["input"] == INPUT
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        again = body([*first["output"], output], tools=[GROUP])
        assert server.post(RESPONSES, again).json()["output"][0]["content"][0]["text"] == "Done."
        assert "<tool_call>mail__patch</tool_call>[tool]ok" in seen[-1]
        named = server.post(RESPONSES, body(tools=[PATCH, {"type": "web_search"}])).json()
        assert named["dflash"]["ignored"] == ["tools[0].format", "tools[1]"]


def test_the_grammar_of_a_custom_tool_is_told_to_the_model():
    asked = ResponsesRequest.model_validate(body(tools=[PATCH]))
    function = asked.chat().tools[0]["function"]
    assert function["description"].startswith("Edits.") and "start: /.+/" in str(function)
    assert function["parameters"]["required"] == ["input"]
    call = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": INPUT}
    (told,) = ResponsesRequest.model_validate(body([call])).chat().messages
    assert told["tool_calls"][0]["function"]["arguments"] == {"input": INPUT}


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_only_tools_that_are_allowed_are_told_to_the_model(api):
    seen = []
    other = {**TOOL["function"], "name": "other"}

    def post(mode, name):
        flat = {"type": "function", "name": name}
        tools = [ADD, {"type": "function", **other}]
        choice = {"mode": mode, "tools": [flat]}
        if api == "responses":
            choice |= {"type": "allowed_tools"}
            return server.post(RESPONSES, body(tools=tools, tool_choice=choice))
        nested = [{"type": "function", "function": {"name": name}}]
        choice = {"type": "allowed_tools", "allowed_tools": {**choice, "tools": nested}}
        tools = [TOOL, {"type": "function", "function": other}]
        return server.chat(tools=tools, tool_choice=choice)

    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        assert post("auto", "other").status_code == 200
        assert "[tools]other [" in seen[-1]
        unknown = post("auto", "none").json()["error"]
        assert unknown["param"] == "tool_choice"
    call = '<tool_call>\n{"name": "other", "arguments": {"a": 1}}\n</tool_call>'
    with serving(lambda prompt: call) as server:
        assert '"name":"other"' in post("required", "other").text
        assert "tool_choice" in post("required", "none").text
    asked = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", **other}]}
    tools = [TOOL, {"type": "function", "function": other}]
    assert chosen(Choice.model_validate(asked), tools) == (tools[1:], "")


def test_input_items_and_tokens_are_told():
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    talk = [{"role": "user", "content": "a"}, thought, {"role": "user", "content": "b"}]
    with serving(speak) as server:
        first = server.post(RESPONSES, body(talk)).json()
        assert first["dflash"]["ignored"] == ["input[].encrypted_content"]
        path = f"{RESPONSES}/{first['id']}/input_items"
        page, asc = server.get(path).json(), server.get(path + "?order=asc").json()
        assert page["data"] == asc["data"][::-1] and page["has_more"] is False
        assert (asc["first_id"], asc["last_id"]) == (page["last_id"], page["first_id"])
        for item in page["data"]:
            ITEM.validate_python(item)
        assert asc["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
        again = server.post(RESPONSES, body("c", previous_response_id=first["id"])).json()
        counted = server.post(
            f"{RESPONSES}/input_tokens", body("c", previous_response_id=first["id"])
        ).json()
        assert counted["object"] == "response.input_tokens"
        assert counted["input_tokens"] == again["usage"]["input_tokens"]
        assert server.get(f"{RESPONSES}/resp_none/input_items").status_code == 404


def test_progress_of_the_prompt_is_told_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(service, "_PROGRESS", 0.02)
    monkeypatch.setattr(request_queue, "PING", 600.0)
    said = {}
    with serving(speak) as server:
        for path in ("/v1/chat/completions", RESPONSES, "/v1/messages"):
            asked = body() if path == RESPONSES else chat_body("hello", max_tokens=50)
            server.pair.target.gate.clear()
            with server.streaming(path, {**asked, "return_progress": True}) as lines:
                for line in lines:
                    if "prompt_progress" in line:
                        said[path] = line
                        server.pair.target.gate.set()
    assert len(said) == 3
    for line in said.values():
        event = json.loads(line[6:])
        told = event.get("response", event)["dflash"]["prompt_progress"]
        assert told["cache"] <= told["processed"] < told["total"]


def test_progress_is_over_when_the_prompt_is_read():
    def told(read):
        state = SimpleNamespace(position=read)
        sequence, statistics = SimpleNamespace(state=state), SimpleNamespace(reused_tokens=1)
        reply = SimpleNamespace(sequence=sequence, prompt=(1, 2, 3), statistics=statistics)
        return service.progress(SimpleNamespace(return_progress=True), reply)

    assert told(2)["dflash"]["prompt_progress"] == {"total": 3, "cache": 1, "processed": 2}
    assert told(3) == {}
