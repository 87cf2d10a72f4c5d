"""What programs send unasked: taken, and named in the response, where it changes no answer."""

from __future__ import annotations

import pytest

from support.models import TEMPLATE as PLAIN_TEMPLATE
from support.serving import (
    CHAT,
    MESSAGES,
    MODEL,
    TEXTS,
    WORDS,
    actor_pair,
    message_body,
    said,
    serving,
    speak,
    user,
)

KEEP = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # as Claude Code sends it


def ignored(found):
    assert found.status_code == 200, found.text
    return found.json()["dflash"]["ignored"]


def test_a_program_that_sends_context_management_is_answered_and_told_that_it_did_nothing(server):
    beta = {"anthropic-beta": "context-management-2025-06-27,interleaved-thinking-2025-05-14"}
    asked = {"thinking": {"type": "adaptive"}, "context_management": KEEP}
    found = server.post("/v1/messages?beta=true", message_body(**asked), headers=beta)
    assert ignored(found) == []
    clear = {"edits": [*KEEP["edits"], {"type": "clear_tool_uses_20250919", "keep": {"value": 3}}]}
    assert ignored(server.message(context_management=clear)) == ["context_management.edits[1]"]
    body = {"model": MODEL, "messages": user("a"), "context_management": KEEP}
    counting = "/v1/messages/count_tokens"
    assert ignored(server.post(counting, body)) == []
    asked = {"model": MODEL, "messages": user("a"), "context_management": clear, "verbosity": 1}
    told = {"verbosity", "context_management.edits[1]", "reasoning_effort"}
    assert {*ignored(server.post(counting, {**asked, "reasoning_effort": "high"}))} == told
    with serving(speak, strict=True) as strict:
        assert strict.message(context_management=KEEP).status_code == 200
        assert strict.message(context_management=clear).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"verbosity": "low", "prediction": {"type": "content", "content": "x"}},
        {"service_tier": "flex", "store": True, "cache_prompt": True, "keep_alive": -1},
        {"stream_options": {"include_usage": True}},
        {"reasoning_effort": "high"},
        {"provider": {"order": ["a"]}, "transforms": [], "some_new_field": {"a": 1}},
    ],
)
def test_what_changes_no_answer_is_named(server, fields):
    assert set(ignored(server.chat(**fields))) == set(fields)


def test_fields_of_messages_and_parts_are_named_without_their_numbers(server):
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    talk = [{"role": "user", "content": [part, part], "id": "1"}] * 2
    found = server.post(CHAT, {"model": MODEL, "messages": talk})
    assert set(ignored(found)) == {"messages[].id", "messages[].content[].cache_control"}


def test_a_field_of_a_block_is_not_taken_for_the_block_s_text(server):
    """Which is called as its type, so that pydantic's place of a problem names both alike."""
    mark = {"type": "ephemeral", "since": 1}
    blocks = [{"type": "text", "text": "hello", "id": 1, "cache_control": mark}]
    thought = [{"type": "thinking", "thinking": "hm", "id": 1}, {"type": "text", "text": "so"}]
    talk = [{"role": "user", "content": blocks}, {"role": "assistant", "content": thought}]
    found = server.message(messages=[*talk, *user("a")])
    part = "messages[].content[]"
    assert ignored(found) == [f"{part}.id"]
    for block in ({"type": "text"}, {"type": "text", "text": 5}):
        found = server.message(messages=[{"role": "user", "content": [block]}]).json()
        assert found["error"]["message"].startswith("messages[0].content[0].text: ")


def test_a_stream_names_them_with_its_figures(server):
    body = {"model": MODEL, "messages": user("a"), "stream_options": {"continuous_usage_stats": 1}}
    with server.streaming(CHAT, body) as lines:
        assert any('"ignored":["stream_options.continuous_usage_stats"]' in line for line in lines)


@pytest.mark.parametrize(
    "fields",
    [
        *({"top_k": -1}, {"max_tokens": -1}, {"seed": -1}, {"seed": 2**70}, {"seed": -5}),
        *({"stop": ""}, {"functions": []}, {"function_call": "none"}, {"best_of": 1}),
        *({"model": ""}, {"model": None}, {"ignore_eos": False}),
        {"repeat_penalty": 1.1, "repetition_context_size": 5},
        {"repeat_penalty": 1.0, "repetition_penalty": 1},
    ],
)
def test_what_means_the_default_is_taken(server, fields):
    found = server.chat(**fields)
    assert found.status_code == 200, found.text
    assert said(found) == WORDS and found.json()["model"] == MODEL


@pytest.mark.parametrize(
    "fields",
    [
        *({"functions": [{"name": "f"}]}, {"presence_penalty": -3}, {"min_tokens": -1}),
        *({"logit_bias": {"97": 1}}, {"frequency_context_size": 9}, {"grammar": "root"}),
        *({"thread": {"type": "continue"}}, {"temperature": -1}, {"n": -1}, {"best_of": 2}),
        {"repeat_penalty": 1.1, "repetition_penalty": 1.2},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(server, fields):
    error = server.chat(**fields).json()["error"]
    assert error["param"] in fields and error["param"] in error["message"]


def test_other_names_of_a_field_are_honoured(server):
    assert said(server.chat(n_predict=4)) == "Once"
    found = server.post(TEXTS, {"prompt": "[user]a[assistant]", "n_predict": 4})
    assert (found.json()["choices"][0]["text"], found.json()["model"]) == ("Once", MODEL)


def test_ten_thousand_fields_are_not_all_told(server):
    names = ignored(server.chat(**{f"{i}" * 200: i for i in range(10_000)}))
    assert len(names) == 32 and max(map(len, names)) == 100
    assert server.chat(**{f"x{i}": i for i in range(10_001)}).status_code == 400


@pytest.mark.parametrize("strict", [False, True])
def test_a_body_of_very_many_values_is_refused_before_each_of_them_is_looked_at(strict):
    many = 2**18
    bodies = [
        *((CHAT, {"messages": [0] * many}), (MESSAGES, {"messages": [{"content": [[]] * many}]})),
        *((CHAT, {f"x{i}": 0 for i in range(many)}), (TEXTS, {"prompt": ["a"] * 4 * many + ["a"]})),
    ]
    with serving(speak, strict=strict) as server:
        for path, body in bodies:
            found = server.post(path, {"model": MODEL, "max_tokens": 1, **body})
            assert found.status_code == 400 and "values" in found.text
        found = server.post(TEXTS, {"model": MODEL, "prompt": [0] * 2 * many}).json()
        assert found["error"]["code"] == "context_length_exceeded"


def test_an_argument_that_the_template_does_not_read_is_named_and_a_forbidden_one_refused():
    with serving(actor_pair(speak, PLAIN_TEMPLATE)) as server:
        found = server.chat(chat_template_kwargs={"enable_thinking": True})
        assert ignored(found) == ["chat_template_kwargs.enable_thinking"]
        assert ignored(server.message(thinking={"type": "enabled"})) == ["thinking.type"]
        assert server.chat(chat_template_kwargs={"tokenize": False}).status_code == 400


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
SCREEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}


def test_a_picture_of_a_tool_or_an_earlier_turn_becomes_a_note():
    seen = []
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [PICTURE]}
    talk = [*user("a"), {"role": "assistant", "content": [use]}]
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        found = server.message(messages=[*talk, {"role": "user", "content": [result]}])
        assert ignored(found) == ["messages[].content[] of type image"]
        assert "[tool][a picture was here" in seen[0]
        earlier = {"role": "user", "content": [SCREEN]}
        found = server.post(CHAT, {"model": MODEL, "messages": [earlier, *talk[:1]]})
        assert ignored(found) == ["messages[].content[] of type image_url"]


@pytest.mark.parametrize("part", [PICTURE, SCREEN])
def test_a_picture_that_is_asked_about_is_refused_as_one(server, part):
    talk = [{"role": "user", "content": [part]}]
    ask = server.message if part is PICTURE else server.chat
    found = ask(messages=talk)
    assert found.status_code == 400
    assert "a picture" in found.json()["error"]["message"]


PDF = {"type": "document", "source": {"type": "text", "data": "a"}, "title": "b"}
FILE = {"type": "input_file", "file_data": "a"}
SOUND = {"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}}


def test_documents_and_sounds_of_tools_and_earlier_turns_become_notes_and_others_are_refused():
    seen, part = [], "messages[].content[] of type"
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [PDF]}
        talk = [*user("a"), {"role": "assistant", "content": [use]}]
        found = server.message(messages=[*talk, {"role": "user", "content": [result]}])
        assert ignored(found) == [f"{part} document"]
        assert "[tool][a document was here" in seen[-1]
        past = {"role": "user", "content": [SOUND]}
        assert ignored(server.chat(messages=[past, *user("b")])) == [f"{part} input_audio"]
        assert "[user][a sound was here" in seen[-1]
        asked = [{"role": "user", "content": [FILE]}, *user("b")]
        assert ignored(server.post("/v1/responses", {"input": asked, "model": MODEL})) == [
            "input[].content[] of type input_file"
        ]
        for kind, found in (
            ("a document", server.message(messages=[{"role": "user", "content": [PDF]}])),
            ("a sound", server.chat(messages=[past])),
            ("a document", server.post("/v1/responses", {"input": asked[:1], "model": MODEL})),
        ):
            assert found.status_code == 400 and kind in found.json()["error"]["message"]


def test_the_address_says_what_it_is_and_probes_are_answered(server):
    assert "/v1/chat/completions" in server.get("/").text
    for path in ("/", "/health", "/v1/models"):
        found = server.get(path, "HEAD")
        assert (found.status_code, found.content) == (200, b"")


def test_a_model_says_what_it_can(server):
    told = server.get(f"/v1/models/{MODEL}").json()
    assert told["context_length"] == told["max_input_tokens"] == 4000
    can = {name: each["supported"] for name, each in told["capabilities"].items()}
    assert can["tools"] and not can["image_input"]
    with serving(actor_pair(speak, PLAIN_TEMPLATE)) as plain:
        told = plain.get(f"/v1/models/{MODEL}").json()
    assert not told["capabilities"]["tools"]["supported"]


@pytest.mark.parametrize(
    "origin", ["app://obsidian.md", "tauri://localhost", "chrome-extension://ab"]
)
def test_programs_whose_pages_are_no_web_pages_can_be_let_in(origin):
    with serving(lambda prompt: "so", allow_origin=(origin,)) as server:
        assert server.get("/health", headers={"Origin": origin}).status_code == 200
        assert server.get("/health", headers={"Origin": "app://other"}).status_code == 403


def test_a_request_that_finds_no_place_is_told_so_before_its_prompt_is_made(server):
    with serving(lambda prompt: "so", parallel=1, queue=0) as full, full.queue.preparing():
        full.service._prompts.shutdown()  # nothing can be made any more
        assert full.chat().status_code == 429


def test_a_part_without_its_text_is_refused(server):
    found = server.chat(messages=[{"role": "user", "content": [{"type": "text"}]}])
    assert found.status_code == 400 and "text" in found.json()["error"]["message"]


def test_an_answer_is_as_long_as_a_load_generator_asks(server):
    found = server.chat(ignore_eos=True, max_tokens=60).json()
    assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (
        *(60, "length"),
    )
    assert found["choices"][0]["message"]["content"].startswith(WORDS)
    assert "<" not in found["choices"][0]["message"]["content"], (
        "ends that ended nothing are untold"
    )
    found = server.chat(min_tokens=50).json()
    assert found["usage"]["completion_tokens"] == 51 and len(WORDS) < 50
    comma = server.pair.tokenizer.encode("t")[0]
    found = server.chat(stop_token_ids=[comma], logprobs=True)
    assert said(found) == WORDS.partition("t")[0]
    told = found.json()["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in told) == said(found)
