"""The openai package's responses against the server."""

from __future__ import annotations

import json

import openai
import pytest

from dflash_mlx.serve import request_queue
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.kept import Kept, Shelf
from support.serving import COUNT, MODEL, ROLE, WORDS, serving, speak

RESPONSES = "/v1/responses"
FUNCTION = {"type": "function", "name": "add", "parameters": COUNT}


def ask(client, text="hello", **more):
    return client.responses.create(model=MODEL, input=text, **more)


def body(said="hello", **more):
    return {"model": MODEL, "input": said, **more}


def events(client, text="hello", **more):
    with client.responses.create(model=MODEL, input=text, stream=True, **more) as stream:
        return list(stream)


def test_an_answer_comes_whole(client):
    answer = ask(client, instructions="be short", metadata={"a": "b"}, max_output_tokens=100)
    assert (answer.output_text, answer.status, answer.error) == (WORDS, "completed", None)
    assert [item.type for item in answer.output] == ["message"]
    usage = answer.usage
    assert usage.input_tokens == len("[system]be short[user]hello" + ROLE)
    assert usage.output_tokens == len(WORDS) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert answer.instructions == "be short" and answer.metadata == {"a": "b"}
    assert answer.max_output_tokens == 100 and answer.model == MODEL
    assert answer.model_extra["dflash"]["rounds"] == len(WORDS)


def test_a_stream_tells_the_same_in_the_published_order(client):
    found = events(client)
    assert [event.sequence_number for event in found] == [*range(len(found))]
    kinds = [event.type.removeprefix("response.") for event in found]
    words = kinds.count("output_text.delta")
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert words > 1 and kinds == [*begin, *["output_text.delta"] * words, *end]
    assert "".join(event.delta for event in found[4:-4]) == found[-4].text == WORDS
    last = found[-1].response
    assert (last.output_text, last.usage.output_tokens) == (WORDS, len(WORDS) + 1)
    with client.responses.stream(model=MODEL, input="hello") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == WORDS


def test_an_answer_that_is_cut_is_incomplete(client):
    whole, streamed = ask(client, max_output_tokens=4), events(client, max_output_tokens=4)[-1]
    assert streamed.type == "response.incomplete"
    for found in (whole, streamed.response):
        assert (found.status, found.output_text) == ("incomplete", "Once")
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.output[0].status == "incomplete"


def test_thoughts_are_items_of_their_own(client):
    found = events(client, "think")
    for answer in (ask(client, "think"), found[-1].response):
        thought, said = answer.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Let me see.")
        assert said.content[0].text == answer.output_text == "It is blue."
        assert answer.usage.output_tokens_details.reasoning_tokens == len("\nLet me see.")
    deltas = [e.delta for e in found if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Let me see."


def test_tools_go_round(client):
    tools = {"tools": [FUNCTION, {"type": "web_search"}]}
    first, streamed = ask(client, "what", **tools), events(client, "what", **tools)
    assert first.model_extra["dflash"]["ignored"] == ["tools[1]"], "it is answered without"
    for answer in (first, streamed[-1].response):
        text, call = answer.output
        assert text.content[0].text == "Let me see."
        assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
        assert json.loads(call.arguments) == {"a": 1, "b": "2"}
    kinds = [event.type for event in streamed]
    at = kinds.index("response.function_call_arguments.done")
    assert kinds[at - 1 : at + 2 : 2] == [
        "response.function_call_arguments.delta",
        "response.output_item.done",
    ]
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "3"}
    asked = {"role": "user", "content": "what"}
    sent = ask(client, [asked, *first.output, result], **tools)
    kept = ask(client, [result], previous_response_id=first.id, **tools)
    assert sent.output_text == kept.output_text == "It is 3."
    assert sent.usage.input_tokens == kept.usage.input_tokens
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    assert ask(client, [asked, *named, result], **tools).output_text == "It is 3."
    with pytest.raises(openai.NotFoundError, match="item 'fc_none'"):
        ask(client, [{"type": "item_reference", "id": "fc_none"}])
    two = ask(client, "two", **tools)
    assert [item.type for item in two.output] == ["message", "function_call", "function_call"]
    one = ask(client, "two", parallel_tool_calls=False, **tools)
    assert [item.type for item in one.output] == ["message", "function_call"]
    assert ask(client, "what", tool_choice="none", **tools).output_text == WORDS


def test_items_reach_the_template_as_its_messages():
    seen = []
    part = {"type": "input_text", "text": "a"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"type": "message", "role": "developer", "content": [{**part, "text": "rules"}]},
        {"role": "user", "content": [part, {**part, "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {**call, "id": "fc_1", "status": "completed"},
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": [part]},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{**part, "text": "c"}, {"type": "input_image", "image_url": "data:"}],
        },
        {"role": "developer", "content": "more"},
    ]
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        assert server.post(RESPONSES, body(items, instructions="be short")).status_code == 200
    calls = "<think>hm</think>" + 2 * "<tool_call>f</tool_call>"
    head = f"[system]be short\n\nrules[user]ab[assistant]{calls}"
    note = "[a picture was here, which this model cannot see]"
    assert seen[0] == head + f"[tool]a[tool]c{note}[system]more"


def test_a_conversation_goes_on_without_being_sent_again_and_instructions_are_not_kept():
    seen = []
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="a", max_retries=0)
        first = ask(client, "a", instructions="x")
        second = ask(client, "b", previous_response_id=first.id, instructions="y")
        streamed = events(client, "c", previous_response_id=second.id)[-1].response
        seen.clear()
        ask(client, "d", previous_response_id=streamed.id)
        client.close()
    assert seen[0] == "[user]a[assistant]so[user]b[assistant]so[user]c[assistant]so[user]d"
    assert streamed.previous_response_id == second.id


def test_a_response_is_found_and_forgotten_by_its_own_key_only(client, server):
    answer = ask(client)
    assert client.responses.retrieve(answer.id) == answer
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key="other").responses.retrieve(answer.id)
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as found:
        ask(client, previous_response_id=answer.id)
    assert found.value.param == "previous_response_id"
    before = server.service.shelf.size
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ask(client, store=False).id)
    assert server.service.shelf.size == before


def test_half_a_surrogate_pair_in_an_id_is_kept_as_it_is(server):
    output = {"type": "function_call_output", "call_id": "\ud800", "output": "3"}
    first = server.post(RESPONSES, body([output]))
    assert first.status_code == 200
    again = server.post(RESPONSES, body(previous_response_id=first.json()["id"]))
    assert again.status_code == 200


def test_what_is_kept_is_bounded():
    shelf = Shelf(most=3, size=100)
    for name in "abc":
        shelf.put("me", name, Kept(b"1" * 10, b"2" * 10, [{"id": name}]))
    shelf.get("me", "a")
    shelf.put("me", "d", Kept(b"", b""))
    shelf.put("me", "large", Kept(b"1" * 45, b"2" * 11))
    with pytest.raises(ApiError):
        shelf.get("me", "b")
    with pytest.raises(ApiError):
        shelf.item("me", "b")
    assert shelf.size == 60 and shelf.item("me", "a")
    with pytest.raises(ApiError):
        shelf.item("you", "a")
    shelf.put("me", "e", Kept(b"1" * 50, b""))
    assert shelf.size == 100
    shelf.drop("me", "e")
    assert shelf.size == 0


def test_an_answer_has_the_form_that_is_asked_for():
    schema = {**COUNT, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": schema}
    with serving(lambda prompt: '{"a": 1}') as server:
        found = server.post(RESPONSES, body(text={"format": form})).json()
        assert json.loads(found["output"][0]["content"][0]["text"]) == {"a": 1}
        assert found["text"]["format"] == form
        loose = server.post(RESPONSES, body(text={"format": {"type": "json_object"}})).json()
        assert loose["status"] == "completed"
        bad = {"format": {**form, "schema": {"type": "object", "required": 7}}}
        refused = server.post(RESPONSES, body(text=bad))
        assert refused.json()["error"]["param"] == "text.format.schema"
        missing = server.post(RESPONSES, body(text={"format": {"type": "json_schema"}}))
        assert missing.json()["error"]["param"] == "text.format.schema"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": 7}, "include"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call", "id": "i"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"store": 0}, "store"),
    ],
)
def test_what_is_not_done_is_refused_by_name(server, more, field):
    found = server.post(RESPONSES, {**body(), **more})
    assert found.status_code == 400
    assert found.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "user", "content": "a", "odd": 1}, "odd"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a", "odd": 1}]}, "odd"),
        ({"type": "function_call_output", "call_id": "1", "output": "3", "odd": {}}, "odd"),
        ({"type": "function_call", "call_id": "1", "name": "f", "odd": 1}, "odd"),
        ({"type": "reasoning", "summary": [], "odd": 1}, "odd"),
    ],
)
def test_unknown_fields_of_items_are_named_and_refused_by_a_strict_server(server, item, field):
    (name,) = server.post(RESPONSES, body([item])).json()["dflash"]["ignored"]
    assert name.startswith("input[].") and name.endswith(field)
    with serving(lambda prompt: "so", strict=True) as strict:
        error = strict.post(RESPONSES, body([item])).json()["error"]
        assert error["param"].startswith("input[0].") and error["param"].endswith(field)
        holder = item if "odd" in item else item["content"][0]
        del holder["odd"]
        assert strict.post(RESPONSES, body([item])).status_code == 200


def test_what_a_response_had_is_taken_back_by_a_strict_server():
    with serving(speak, strict=True) as strict:
        for text in ("think", "two"):
            tools = {"tools": [FUNCTION]} if text == "two" else {}
            output = strict.post(RESPONSES, body(text, **tools)).json()["output"]
            found = strict.post(RESPONSES, body([*output, {"role": "user", "content": "b"}]))
            assert found.status_code == 200, found.text


def test_what_codex_sends_is_taken(server):
    """The fields of its requests, as its published code has them."""
    codex = {
        "instructions": "You are Codex.",
        "tools": [{**FUNCTION, "strict": False, "description": "d"}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "client_metadata": {"x": "y"},
    }
    talk = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
    ]
    with server.streaming(RESPONSES, body(talk, **codex)) as lines:
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    done = [each["item"] for each in said if each["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]
    assert said[-1]["response"]["dflash"]["ignored"] == ["include", "reasoning.effort"]


def test_a_stream_says_that_it_is_alive_and_how_it_failed(monkeypatch):
    monkeypatch.setattr(request_queue, "PING", 0.05)
    with serving(lambda prompt: 90 * WORDS, grace=0.1) as server:
        gate = server.pair.target.gate
        with openai.OpenAI(base_url=server.url + "/v1", api_key="a", max_retries=0) as client:
            stream = client.responses.create(
                model=MODEL, input="a", stream=True, max_output_tokens=3000
            )
            begin = [next(stream) for _ in range(2)]
            gate.clear()
            found = [next(stream)]
            while found[-1].type != "response.in_progress":
                found.append(next(stream))
            gate.set()
            server.end()
            found += stream
    every = [*begin, *found]
    assert [event.sequence_number for event in every] == [*range(len(every))]
    kinds = [event.type.removeprefix("response.") for event in every]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "failed"]
    failed = every[-1].response
    assert (failed.status, failed.output[0].status) == ("failed", "incomplete")
    assert "shutting down" in failed.error.message
