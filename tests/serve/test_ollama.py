"""Ollama's API, as the `ollama` package sends it: chats, prompts, lines, lists, refusals."""

from __future__ import annotations

import json
import time

import pytest

from dflash_mlx.serve import request_queue
from support.serving import (
    CLIENT,
    COUNT,
    MODEL,
    ROLE,
    TEMPLATE,
    TOOL,
    WORDS,
    actor_pair,
    serving,
    speak,
    user,
)

CHAT, GENERATE = "/api/chat", "/api/generate"
SMALL = {"num_ctx": 2048, "num_predict": -1, "temperature": 0.0, "seed": -1, "top_k": -1}


def body(text="hello", **more):
    return {"model": MODEL, "messages": user(text), **more}


def whole(server, path=CHAT, asked=None, **more):
    found = server.post(path, {"stream": False, **(asked or body(**more))})
    assert found.status_code == 200, found.text
    return found.json()


def lines(server, path, asked):
    with CLIENT.stream("POST", server.url + path, json=asked) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def error(server, path=CHAT, **more):
    found = server.post(path, body(**more))
    assert found.status_code == 400 and [*found.json()] == ["error"], found.text
    return found.json()["error"]


def test_an_answer_comes_whole_where_it_is_not_to_stream_with_tokens_and_nanoseconds(server):
    began = time.monotonic_ns()
    answer = whole(server)
    took = time.monotonic_ns() - began
    assert answer["message"] == {"role": "assistant", "content": WORDS}
    assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "stop", MODEL)
    assert answer["prompt_eval_count"] == len("[user]hello" + ROLE)
    assert answer["eval_count"] == len(WORDS) + 1
    parts = [answer[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert min(parts) > 0 and max(parts) < answer["total_duration"] < took
    assert answer["dflash"]["rounds"] == len(WORDS)


def test_answers_stream_as_lines_unless_they_are_not_to(server):
    for asked in ({}, {"stream": None}, {"stream": True}):
        *parts, last = lines(server, CHAT, body(**asked))
        assert "".join(part["message"]["content"] for part in parts) == WORDS
        assert len(parts) > 1 and not any(part["done"] for part in parts)
        assert (last["done"], last["eval_count"]) == (True, len(WORDS) + 1)
    *parts, last = lines(server, GENERATE, {"model": MODEL, "prompt": "hello"})
    assert "".join(part["response"] for part in parts) == WORDS and last["done"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_is_json_whatever_it_says_it_is_as_curl_sends_it(server, kind):
    sent = json.dumps(body(stream=False)).encode()
    found = server.post(CHAT, sent, headers={"Content-Type": kind})
    assert found.json()["message"]["content"] == WORDS
    found = server.post("/v1/chat/completions", sent, headers={"Content-Type": kind})
    assert found.status_code == (400 if kind == "text/plain" else 200)
    page = {"Content-Type": kind, "Origin": "http://evil.example"}
    assert server.post(CHAT, sent, headers=page).status_code == 403


def test_a_prompt_is_a_message_or_raw_and_without_one_the_model_is_there():
    seen = []
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        asked = {"model": MODEL, "prompt": "a", "system": "be short"}
        assert whole(server, GENERATE, asked)["response"] == "so"
        raw = {"model": MODEL, "prompt": "a" + ROLE, "raw": True}
        assert whole(server, GENERATE, raw)["response"] == "so"
        assert {*seen} == {"[system]be short[user]a", "a"}
        for path, none in ((GENERATE, {"model": MODEL}), (CHAT, {"model": MODEL, "messages": []})):
            assert whole(server, path, none)["done_reason"] == "load"
        for own in ({"format": "json"}, {"think": True}):
            assert [*own][0] in server.post(GENERATE, {**raw, **own}).json()["error"]
        found = server.post(GENERATE, {**raw, "system": "be short"})
    assert found.status_code == 400 and found.json()["error"].startswith("system")


def test_options_say_how_tokens_are_drawn_and_those_that_change_nothing_are_named(server):
    assert whole(server, options={"stop": ["time"]})["message"]["content"] == "Once upon a "
    for asked in ({"stop": "time", "num_predict": 4}, {"num_predict": 4, "repeat_last_n": -1}):
        cut = whole(server, options=asked)
        assert (cut["message"]["content"], cut["done_reason"]) == ("Once", "length")
    usual = whole(server, options={**SMALL, "num_thread": 4}, keep_alive="5m")
    assert usual["message"]["content"] == WORDS
    named = ["options.num_ctx", "options.num_thread", "keep_alive"]
    assert sorted(usual["dflash"]["ignored"]) == sorted(named)
    config = []
    opened = server.queue.open
    server.queue.open = lambda replies: config.append(replies[0].config) or opened(replies)
    drawn = {"temperature": 0.5, "min_p": 0.1, "repeat_penalty": 1.5, "seed": 3}
    whole(server, options={**drawn, "presence_penalty": 0.5, "frequency_penalty": 0.1})
    del server.queue.open
    asked = config[0].sampling
    assert (asked.temperature, asked.min_p, asked.seed) == (0.5, 0.1, 3)
    assert (asked.repetition_penalty, asked.presence_penalty) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("options.temperature", {"options": {"temperature": -1}}),
        ("options.mirostat", {"options": {"mirostat": 2}}),
        *(("template", {"template": "{{ .Prompt }}"}), ("context", {"context": [1]})),
        *(("suffix", {"suffix": "x"}), ("format", {"format": "yaml"})),
        ("messages[0].images", {"messages": [{**user("a")[0], "images": ["AA=="]}]}),
        ("messages[0].role", {"messages": [{"role": "boss", "content": "a"}]}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(server, name, fields):
    assert error(server, **fields).startswith(name)


def test_thoughts_are_told_apart_and_turned_on_through_the_template(server):
    for found in (
        whole(server, text="think"),
        whole(server, GENERATE, {"model": MODEL, "prompt": "think"}),
    ):
        told = found.get("message", found)
        assert told["thinking"] == "Let me see."
        assert told.get("content", told.get("response")) == "It is blue."
    assert "thinking" in whole(server, think=True)["message"]
    assert whole(server, think=False)["message"]["content"] == WORDS
    assert whole(server, think="high")["dflash"]["ignored"] == ["think"]
    seen = []
    reads = actor_pair(
        lambda prompt: seen.append(prompt) or "so", "{{ reasoning_effort }}" + TEMPLATE
    )
    with serving(reads) as other:
        assert whole(other, think="high")["dflash"]["ignored"] == []
    assert seen[0] == "high[user]hello"


def test_tools_go_round_with_arguments_as_objects_and_a_stream_has_calls_whole(server):
    tools = {"tools": [TOOL]}
    first = whole(server, text="what", **tools)
    assert first["done_reason"] == "stop"
    *parts, _ = lines(server, CHAT, body("what", **tools))
    streamed = [call for part in parts for call in part["message"].get("tool_calls", [])]
    for (call,) in (first["message"]["tool_calls"], streamed):
        assert call["function"] == {"name": "add", "arguments": {"a": 1, "b": "2"}}
    answered = {"role": "tool", "content": "3", "tool_name": "add"}
    talk = [*user("what"), first["message"], answered]
    assert whole(server, messages=talk, **tools)["message"]["content"] == "It is 3."


def test_messages_reach_the_template_and_earlier_pictures_become_notes():
    seen = []
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    said = {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]}
    talk = [
        {**user("a")[0], "images": ["AA=="]},
        said,
        {"role": "tool", "content": "b"},
        *user("c"),
    ]
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        found = whole(server, messages=talk)
        whole(server, messages=[*user("a"), {"role": "assistant", "content": "s"}])
    note = "[a picture was here, which this model cannot see]"
    assert (
        seen[0]
        == f"[user]{note}a[assistant]<think>hm</think><tool_call>f</tool_call>[tool]b[user]c"
    )
    assert found["dflash"]["ignored"] == ["messages[].images"]
    assert seen[-1] == "[user]a", "the beginning of an answer is gone on with"


def test_a_format_is_followed(server):
    for form in ("json", COUNT):
        text = whole(server, format=form, options={"num_predict": 150})["message"]["content"]
        assert text.startswith("{")
    assert whole(server, format="")["message"]["content"] == WORDS


def test_models_are_listed_and_described_as_programs_read_them(server):
    for path in ("/api/tags", "/api/ps"):
        names = [each["model"] for each in server.get(path).json()["models"]]
        assert names == [MODEL, "alias"]
    shown = server.post("/api/show", {"model": "alias"}).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 4000
    assert shown["capabilities"] == ["completion", "tools"]
    version = server.get("/api/version").json()["version"].split(".")
    assert [*map(int, version)] >= [0, 6, 4], "which VS Code wants"
    (studio, _) = server.get("/api/v0/models").json()["data"]
    assert (studio["type"], studio["state"], studio["max_context_length"]) == (
        "llm",
        "loaded",
        4000,
    )
    assert studio["capabilities"] == ["tool_use"]


def test_a_stream_that_waits_says_so_in_lines_that_add_nothing(server, monkeypatch):
    monkeypatch.setattr(request_queue, "PING", 0.01)
    server.pair.target.gate.clear()
    with server.streaming(CHAT, body()) as found:
        first = json.loads(next(found))
        server.pair.target.gate.set()
        text = "".join(json.loads(line)["message"]["content"] for line in found)
    assert first["message"] == {"role": "assistant", "content": ""} and text == WORDS


def test_strict_refuses_what_is_not_known():
    with serving(speak, strict=True) as server:
        assert "keep_alive" in error(server, keep_alive="5m")
        assert server.post(CHAT, body(model="other")).status_code == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        *(("/models", "/v1/models"), ("//v1/models", "/v1/models"), ("/v1/models/", "/v1/models")),
        *(("/v1/v1/models", "/v1/models"), ("/v1/models/alias/", "/v1/models/alias")),
        *(("/models/alias/", "/v1/models/alias"), ("/v1/api/tags", "/api/tags")),
        *(("//health", "/health"), ("/v1/health/", "/health"), ("/api/tags/", "/api/tags")),
    ],
)
def test_a_base_url_with_a_part_too_many_or_too_few_is_understood(server, path, meant):
    found, wanted = server.get(path), server.get(meant)
    assert (found.status_code, found.json()) == (200, wanted.json())


def test_every_api_is_found_without_its_prefix_and_refuses_in_its_own_words(server):
    chat = {"model": MODEL, "messages": user("hello")}
    for path in ("/chat/completions", "/v1/v1/chat/completions/", "/api/v1/chat/completions"):
        assert server.post(path, chat).json()["object"] == "chat.completion"
    assert server.post("/messages", {**chat, "max_tokens": 9}).json()["type"] == "message"
    assert server.post("/messages", chat).json()["type"] == "error"
    assert server.post("/responses", {"model": MODEL, "input": "a"}).json()["object"] == "response"
    assert server.post("/completions", {"model": MODEL, "prompt": "a"}).status_code == 200


def test_paths_that_are_not_there_say_what_to_do(server):
    def problem(path):
        found = server.post(path, {"model": MODEL})
        assert found.status_code == 404
        return str(found.json()["error"])

    assert "/v1/chat/completions?" in problem("/v1/chat/completion")
    assert "/api/generate?" in problem("/api/generat")
    assert "embeddings" in problem("/v1/embeddings") and "embeddings" in problem("/api/embed")
    assert "--model" in problem("/api/pull")
    assert "GET / lists them" in problem("/nothing/of/this")
