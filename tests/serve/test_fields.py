"""Every field of a request is honoured or refused with 400 that names it."""

from __future__ import annotations

import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.serve.fields import decoding
from dflash_mlx.serve.openai_requests import CompletionRequest
from support.serving import MODEL, actor_pair, chat_body, post, serving, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pair = actor_pair(tmp_path_factory.mktemp("fields"), lambda prompt: "so")
    with serving(pair, messages=3) as server:
        yield server


REFUSED = [
    ("frequency_penalty", 0.5),
    ("presence_penalty", -1),
    ("logit_bias", {"5": 1}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "grammar"}),
    ("tool_choice", "required"),
    ("audio", {"voice": "x"}),
    ("modalities", ["audio"]),
    ("functions", []),
    ("web_search_options", {}),
    ("prediction", {"type": "content", "content": "x"}),
    ("service_tier", "priority"),
    ("store", True),
    ("reasoning_effort", "high"),
    ("chat_template_kwargs", {"no_such_argument": 1}),
    ("chat_template_kwargs", {"chat_template": "{{ 7 * 7 }}"}),
    ("chat_template_kwargs", {"tokenize": False}),
    ("chat_template_kwargs", {"a b": 1}),
    ("stream_options", {"include_usage": True}),
    ("top_logprobs", 3),
    ("top_logprobs", 21),
    ("n", 0),
    ("n", 17),
    ("n", 2.0),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 10**400),
    ("max_tokens", "5"),
    ("max_completion_tokens", 1.5),
    ("temperature", -0.1),
    ("temperature", 10.1),
    ("temperature", 1e300),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -1),
    ("top_k", 2**31),
    ("min_p", 2),
    ("seed", -1),
    ("seed", 2**32),
    ("repetition_penalty", 0),
    ("stop", ["x"] * 17),
    ("stop", ""),
    ("stop", ["a" * 501]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stream", "yes"),
    ("messages", []),
    ("messages", "hello"),
    ("messages", None),
    ("messages", user("a") * 4),
    ("model", 5),
    ("model", "m" * 201),
    ("metadata", {"a": 1}),
    ("tools", [{"type": "custom"}]),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(server, field, value):
    found = post(server, CHAT, chat_body(**{field: value}))
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 700
    assert field in error["param"] and field in error["message"]


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "king", "content": "a"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
         "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "a", "weight": 1}, "messages[0].weight"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
    ],
)  # fmt: skip
def test_a_message_that_is_none_is_refused_by_its_place(server, message, place):
    found = post(server, CHAT, chat_body(messages=[message]))
    assert found.status_code == 400
    assert found.json()["error"]["param"].startswith(place)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("prompt", []),
        ("prompt", [["a"]]),
        ("prompt", [-1]),
        ("prompt", ""),
        ("prompt", None),
        ("logprobs", 21),
        ("messages", []),
        ("n", 9),
    ],
)
def test_completions_refuse_by_name_too(server, field, value):
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 1, field: value}
    found = post(server, TEXT, body)
    assert found.status_code == 400 and field in found.json()["error"]["param"]


def test_fields_that_ask_for_nothing_are_taken(server):
    body = chat_body(
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
        modalities=["text"],
        service_tier="auto",
        store=False,
        user="me",
        metadata={"a": "b"},
        parallel_tool_calls=True,
        max_tokens=9,
        max_completion_tokens=9,
        stop=None,
        logprobs=False,
        tools=None,
    )
    assert post(server, CHAT, body).json()["choices"][0]["message"]["content"] == "so"


def test_two_lengths_that_differ_are_refused(server):
    found = post(server, CHAT, chat_body(max_tokens=5, max_completion_tokens=6))
    assert (found.status_code, found.json()["error"]["param"]) == (400, "max_tokens")


def test_a_request_says_how_tokens_are_drawn_and_the_server_what_it_does_not_say():
    usual = DecodeConfig("none", max_tokens=7, stop=("a",), sampling=SamplingConfig(0.5, min_p=0.1))
    drawn = {
        "top_p": 0.9,
        "top_k": 3,
        "seed": 4,
        "repetition_penalty": 1.1,
        "repetition_context": 9,
    }
    body = CompletionRequest(model=MODEL, prompt="a", n=3, stop="b", **drawn)
    configs = decoding(usual, body)
    assert [each.sampling.seed for each in configs] == [4, 5, 6]
    expected = SamplingConfig(0.5, 0.9, 3, 0.1, 1.1, 9, 4)
    assert configs[0] == DecodeConfig("none", max_tokens=7, stop=("a", "b"), sampling=expected)
    greedy = CompletionRequest(model=MODEL, prompt="a", temperature=0, max_tokens=5)
    (config,) = decoding(usual, greedy)
    assert (config.sampling.temperature, config.max_tokens) == (0, 5)


def test_a_field_of_a_server_that_decodes_exactly_is_refused_as_its_setting_is(tmp_path):
    pair = actor_pair(tmp_path, lambda prompt: "so")
    with serving(pair, DecodeConfig("none", exact=True)) as server:
        found = post(server, CHAT, chat_body(temperature=1.0))
    assert (found.status_code, found.json()["error"]["param"]) == (400, "exact")
