"""Pictures in requests: the real clients send them, of all kinds, and what is wrong is told."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import anthropic
import openai
import pytest

from dflash_mlx.serve.settings import MOST_PICTURES
from support import pictures
from support.pictures import PLACES, answered, picture, seeing
from support.serving import (
    CHAT,
    COUNT,
    MESSAGES,
    MODEL,
    actor_pair,
    said,
    serving,
    speak,
    user,
)

RESPONSES, OLLAMA, GENERATE = "/v1/responses", "/api/chat", "/api/generate"


def base64(data: bytes) -> str:
    return b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64(data)}"


def screen(data: bytes = b"", **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data or picture()), **more}}


def block(data: bytes = b"") -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64(data or picture())}
    return {"type": "image", "source": source}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def eyes():
    patch = pytest.MonkeyPatch()
    patch.setattr("dflash_mlx.vision.prompts.read_prompt", pictures.read_prompt)
    with serving(seeing(answered)) as server:
        yield server
    patch.undo()


def talk(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def test_the_openai_client_sends_pictures_to_chat_completions_and_to_responses(eyes):
    with openai.OpenAI(base_url=eyes.url + "/v1", api_key="none", max_retries=0) as client:
        two = talk(screen(detail="high"), words("these"), screen(picture("blue", kind="JPEG")))
        found = client.chat.completions.create(model=MODEL, messages=two)
        assert found.choices[0].message.content == "2 for these"
        text = {"type": "input_text", "text": "this"}
        image = {"type": "input_image", "image_url": url(picture(kind="WEBP")), "detail": "auto"}
        first = client.responses.create(model=MODEL, input=talk(text, image))
        assert first.output_text == "1 for this"
        before = {"previous_response_id": first.id, "model": MODEL}
        assert client.responses.create(input="and?", **before).output_text == "1 for and?"
        stream = client.chat.completions.create(model=MODEL, messages=two, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "2 for these"


def test_the_anthropic_client_sends_pictures_and_a_tool_may_answer_with_one(eyes):
    with anthropic.Anthropic(base_url=eyes.url, api_key="none", max_retries=0) as client:
        asked = {"model": MODEL, "messages": talk(block(), words("this"))}
        assert client.messages.create(max_tokens=99, **asked).content[0].text == "1 for this"
        counted = client.messages.count_tokens(**asked).input_tokens
        assert counted == PLACES + len("[user]this[assistant]")
        use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [block()]}
        agent = [
            *user("look"),
            {"role": "assistant", "content": [use]},
            *talk(result, words("and?")),
        ]
        found = client.messages.create(model=MODEL, max_tokens=99, messages=agent)
        assert found.content[0].text == "1 for and?"


def test_ollama_has_pictures_beside_the_words(eyes):
    message = {**user("this")[0], "images": [base64(picture()), base64(picture("blue"))]}
    asked = {"model": MODEL, "messages": [message], "stream": False}
    assert eyes.post(OLLAMA, asked).json()["message"]["content"] == "2 for this"
    asked = {"model": MODEL, "prompt": "this", "images": message["images"], "stream": False}
    assert eyes.post(GENERATE, asked).json()["response"] == "2 for this"
    assert eyes.post(GENERATE, {**asked, "raw": True}).status_code == 400


def test_a_model_that_sees_says_so_in_all_apis(eyes):
    told = eyes.get(f"/v1/models/{MODEL}").json()
    assert told["capabilities"]["image_input"]["supported"]
    assert "vision" in eyes.post("/api/show", {"model": MODEL}).json()["capabilities"]
    assert eyes.get("/api/v0/models").json()["data"][0]["type"] == "vlm"


def test_fields_that_are_ignored_take_no_picture_away(eyes):
    asked = {"model": MODEL, "messages": [*talk(screen(), words("a")), *user("b")], "odd": None}
    found = eyes.post(CHAT, asked)
    assert (said(found), found.json()["dflash"]["ignored"]) == ("1 for b", ["odd"])
    assert eyes.pair.target.passes and found.json()["usage"]["prompt_tokens"] == PLACES + len(
        "[user]a[user]b[assistant]"
    )


def test_a_model_that_sees_reads_no_documents_and_is_not_said_to_read_text_alone(eyes):
    file = {"type": "file", "file": {"file_data": "a"}}
    found = eyes.post(CHAT, chat(screen(), file))
    assert (found.status_code, found.json()["error"]["param"]) == (400, "messages[0].content[1]")
    assert "reads text" not in found.text
    found = eyes.post(CHAT, {"model": MODEL, "messages": [*talk(screen(), file), *user("b")]})
    assert said(found) == "1 for b"
    assert found.json()["dflash"]["ignored"] == ["messages[].content[] of type file"]


def test_tools_and_an_answer_that_goes_on_are_told_behind_pictures():
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_mlx.vision.prompts.read_prompt", pictures.read_prompt)
        pair = seeing(lambda prompt: seen.append(prompt) or "so")
        plain = actor_pair(lambda prompt: seen.append(prompt) or "so", PLAIN_TEMPLATE)
        plain.target.sees = True
        for each in (pair, plain):
            with serving(each) as server:
                tool = {"type": "function", "function": {"name": "add", "parameters": COUNT}}
                messages = [*user("a"), call(), result(), *talk(screen(), words("b"))]
                found = server.post(CHAT, {"model": MODEL, "messages": messages, "tools": [tool]})
                assert found.status_code == 200, found.text
                assert seen[-1].count("^") == 2 * PLACES and "add" in seen[-1]


PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def call() -> dict[str, Any]:
    inner = {"name": "add", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": inner}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result() -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": [words("3"), screen()]}


# Prefixes


def reused(server: Any, messages: Any) -> int:
    found = server.post(CHAT, {"model": MODEL, "messages": messages}).json()
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_shares_a_prefix_with_its_own_pictures_and_never_with_other_pixels(eyes):
    head = words("x" * 100)
    for colour in ("green", "black"):
        first = talk(head, screen(picture(colour)), words("y" * 100))
        begun = len("[user]") + 100
        assert reused(eyes, first) <= begun, "nothing of the other picture, nor behind it"
        again = [*first, {"role": "assistant", "content": "so"}, *user("z")]
        assert reused(eyes, again) > begun + PLACES + 100, "its own is not read again"
    same = talk(head, screen(picture("green", kind="GIF")), words("y" * 100))
    assert reused(eyes, same) > begun + PLACES, "equal pixels from another file are the same"
    text = [*user("x" * 100 + "^" * PLACES + "y" * 100)]
    assert reused(eyes, text) <= begun, "the marks of a picture, typed, are none"


def test_answers_about_other_pictures_are_not_changed_by_what_was_said_about_one():
    drafted = pytest.MonkeyPatch()
    drafted.setattr("dflash_mlx.vision.prompts.read_prompt", pictures.read_prompt)
    from dflash_mlx.core.config import DecodeConfig

    with serving(seeing(answered), DecodeConfig("ngram", max_tokens=200)) as server:
        for colour in ("green", "black", "green"):
            for question in ("a b c d e", "f g h i j"):
                found = server.post(CHAT, chat(screen(picture(colour)), words(question)))
                assert said(found) == f"1 for {question}"
    drafted.undo()


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": talk(*parts)}


# What is refused


@pytest.mark.parametrize(
    ("part", "word"),
    [
        (screen(b"no picture"), "no picture"),
        (screen(picture()[:40]), "damaged"),
        (screen(pictures.png(60_000, 60_000)), "50 million pixels"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "addresses"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "file:///etc/passwd"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}, "a.example"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "127.0.0.1"),
    ],
)
def test_what_is_no_picture_here_is_refused_with_its_place(eyes, part, word):
    passes = eyes.pair.target.passes
    found = eyes.post(CHAT, chat(words("a"), part))
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "messages[0].content[1]")
    assert word in error["message"]
    assert eyes.pair.target.passes == passes, "nothing of it was read"


def test_an_address_of_anthropics_is_refused_too_and_damaged_ones_of_all_apis(eyes):
    source = {"type": "url", "url": "https://a.example/a.png"}
    asked = {"model": MODEL, "max_tokens": 9, "messages": talk({"type": "image", "source": source})}
    found = eyes.post(MESSAGES, asked)
    assert found.status_code == 400 and "a.example" in found.json()["error"]["message"]
    asked = {"model": MODEL, "messages": [{**user("a")[0], "images": ["AA=="]}]}
    assert "messages[0].images[0]" in eyes.post(OLLAMA, asked).json()["error"]
    part = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    found = eyes.post(RESPONSES, {"model": MODEL, "input": talk(part)})
    assert found.json()["error"]["param"] == "input[0].content[0]"


def test_more_pictures_or_pixels_than_the_limits_are_refused(eyes, monkeypatch):
    found = eyes.post(CHAT, chat(*[screen()] * (MOST_PICTURES + 1)))
    assert found.status_code == 400 and str(MOST_PICTURES + 1) in found.text
    monkeypatch.setattr("dflash_mlx.serve.pictures.MOST_PIXELS", 100)
    found = eyes.post(CHAT, chat(*[screen()] * 3))
    assert found.json()["error"]["param"] == "messages[0].content[2]"


def test_a_request_may_not_be_larger_than_others_for_its_pictures():
    with serving(seeing(answered), body_mb=0.01) as server:
        assert server.post(CHAT, chat(screen(bytes(20_000)))).status_code == 413


def test_addresses_are_read_where_that_is_allowed_and_their_size_counts(monkeypatch):
    monkeypatch.setattr("dflash_mlx.vision.prompts.read_prompt", pictures.read_prompt)
    asked: list[tuple[str, int]] = []

    def fetch(address: str, most: int, patience: float) -> bytes:
        assert 1 <= patience <= 20
        asked.append((address, most))
        return picture()

    monkeypatch.setattr("dflash_mlx.serve.pictures.fetch", fetch)
    part = {"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}
    with serving(seeing(answered), allow_image_urls=True, body_mb=1.0) as server:
        assert said(server.post(CHAT, chat(part, part, words("a")))) == "2 for a"
        place = {"type": "url", "url": "https://b.example/"}
        message = {
            "model": MODEL,
            "max_tokens": 99,
            "messages": talk({"type": "image", "source": place}),
        }
        assert server.post(MESSAGES, message).json()["content"][0]["text"] == "1 for "
    assert asked[:2] == [
        ("https://a.example/a.png", 10**6),
        ("https://a.example/a.png", 10**6 - len(picture())),
    ]
    with serving(speak, allow_image_urls=True) as server:
        found = server.post(CHAT, chat(part))
        assert found.status_code == 400 and len(asked) == 3, "a model of texts reads no address"


def test_the_real_server_refuses_addresses_at_home_even_where_they_are_allowed():
    with serving(seeing(answered), allow_image_urls=True) as server:
        for host in ("127.0.0.1", "localhost", "[::1]", "169.254.169.254"):
            part = {"type": "image_url", "image_url": {"url": f"https://{host}:{server.port}/a"}}
            found = server.post(CHAT, chat(part))
            assert found.status_code == 400 and "not public" in found.text


# Models of texts


def test_every_api_says_that_a_model_of_texts_sees_nothing(server):
    asks = [
        (CHAT, chat(words("a"), screen()), "messages[0].content[1]"),
        (MESSAGES, {**chat(words("a"), block()), "max_tokens": 9}, "messages[0].content[1]"),
        (RESPONSES, {"model": MODEL, "input": talk({**block()})}, "input[0].content[0]"),
        (OLLAMA, {"model": MODEL, "messages": [{**user("a")[0], "images": ["AA=="]}]}, "images"),
    ]
    for path, body, place in asks:
        found = server.post(path, body)
        assert found.status_code == 400 and place in found.text and "a picture" in found.text


@pytest.mark.parametrize("part", [screen(), {"type": "file", "file": {"file_data": "a"}}])
def test_a_strict_server_refuses_what_is_no_text_of_earlier_turns_too_and_says_where(part):
    with serving(speak, strict=True) as server:
        asked = {"model": MODEL, "messages": [*talk(words("a"), part), *user("b")]}
        found = server.post(CHAT, asked)
        assert found.status_code == 400
        assert found.json()["error"]["param"] == "messages[0].content[1]"
    with serving(speak) as server:
        found = json.loads(server.post(CHAT, asked).text)
        assert found["dflash"]["ignored"] == [f"messages[].content[] of type {part['type']}"]
