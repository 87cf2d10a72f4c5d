"""Every field of a request to a strict server is honoured or refused with 400 that names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.serve.fields import decoding
from dflash_mlx.serve.openai_requests import CompletionRequest
from support.serving import CHAT, MESSAGES, MODEL, TEXTS, chat_body, message_body, serving, user


@pytest.fixture(scope="module")
def server():
    with serving(lambda prompt: "so", messages=3, strict=True) as server:
        yield server


def one(message):
    return {"messages": [message]}


REFUSED = {  # values by field
    "frequency_penalty": [2.1, float("nan"), "1"],
    "presence_penalty": [-2.1, float("inf")],
    "logit_bias": [
        *({"5": 100.5}, {"5": float("nan")}, {"5": "1"}, {"-1": 1}, {"a": 1}, {"": 1}, [[5, 1]]),
        *({"97": 1}, {"999999999": 0}, {str(i): 0 for i in range(49_152)}),
    ],
    "min_tokens": [-1, 1.5, 2**31],
    "stop_token_ids": [[-1], [97], 5, ["5"], [5] * 1025],
    "ignore_eos": [1, "yes"],
    "response_format": [{"type": "json_schema"}, {"type": "grammar"}],
    "tool_choice": ["required"],
    "audio": [{"voice": "x"}],
    "modalities": [["audio"]],
    "functions": [[]],
    "web_search_options": [{}],
    "prediction": [{"type": "content", "content": "x"}],
    "service_tier": ["priority"],
    "store": [True],
    "reasoning_effort": ["high"],
    "chat_template_kwargs": [
        *({"no_such_argument": 1}, {"chat_template": "{{ 7 * 7 }}"}, {"tokenize": False}),
        {"a b": 1},
    ],
    "stream_options": [{"include_usage": True}],
    "top_logprobs": [3, 21],
    "n": [0, 17, 2.0, True],
    "max_tokens": [0, -1, 2**31, 10**400, "5"],
    "max_completion_tokens": [1.5],
    "temperature": [-0.1, 10.1, 1e300, "hot", [1]],
    "top_p": [0, 1.01],
    "top_k": [-1, 2**31],
    "min_p": [2],
    "seed": [-1, 2**32],
    "repetition_penalty": [0],
    "repetition_context": [-1],
    "stop": [["x"] * 17, "", ["a" * 501], [1], {"a": 1}],
    "stream": ["yes"],
    "messages": [[], "hello", None, user("a") * 4],
    "model": [5, "m" * 201],
    "metadata": [{"a": 1}],
    "tools": [[{"type": "custom"}]],
}
MESSAGE = [  # by the place that is named
    ("messages[0]", {"role": "king", "content": "a"}),
    ("messages[0].content", {"role": "user"}),
    ("messages[0].content", {"role": "user", "content": None}),
    ("messages[0].content[0]",
     {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}),
    ("messages[0].content[0].text", {"role": "user", "content": [{"type": "text", "text": 5}]}),
    ("messages[0].weight", {"role": "user", "content": "a", "weight": 1}),
    ("messages[0].tool_call_id", {"role": "tool", "content": "a"}),
    ("messages[0].tool_calls[0].function", {"role": "assistant", "tool_calls": [{"id": "1"}]}),
]  # fmt: skip
TEXT_REFUSED = {
    "best_of": [0, 9, 17],
    "echo": ["yes"],
    "prompt_logprobs": [1],
    "suffix": ["x"],
    "max_tokens": [-1],
    "prompt": [[], [["a"]], [-1], "", None, [[1], []], [[1], "a"], [[1], [97]], [[1]] * 17],
    "logprobs": [21],
    "messages": [[]],
    "n": [9],
}
MESSAGE_REFUSED = [
    ("output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
    ("messages[0].content[0]", one({"role": "user", "content": [{"type": "image"}]})),
    ("container", {"container": "x"}),
    ("max_tokens", {"max_tokens": None}),
    ("tools[0]", {"tools": [{"type": "web_search_20250305", "name": "w"}]}),
    ("stop_sequences[0]", {"stop_sequences": [""]}),
]
ALL = [
    *((CHAT, field, chat_body(**{field: v})) for field, values in REFUSED.items() for v in values),
    *((CHAT, field, chat_body(**one(message))) for field, message in MESSAGE),
    (CHAT, "max_tokens", chat_body(max_tokens=5, max_completion_tokens=6)),
    *((TEXTS, field, {"model": MODEL, "prompt": ["a", "b"], "n": 1, field: value})
      for field, values in TEXT_REFUSED.items() for value in values),
    *((TEXTS, "best_of", {"model": MODEL, "prompt": "a", "best_of": 2, **more})
      for more in ({"n": 3}, {"stream": True})),
    *((MESSAGES, field, message_body("a", **more)) for field, more in MESSAGE_REFUSED),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "body"), ALL)
def test_what_cannot_be_honoured_is_refused_by_name(server, path, field, body):
    found = server.post(path, body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"] and len(error["message"]) < 700
    assert path == MESSAGES or error["param"].startswith(field)


def test_of_too_many_texts_the_limit_is_said(server):
    for path, body in ((CHAT, chat_body(stop=["x"] * 17)), (TEXTS, {"prompt": ["a"] * 17})):
        error = server.post(path, {"model": MODEL, **body}).json()["error"]
        assert "at most 16 items" in error["message"] and error["param"] in body
    error = server.post(CHAT, chat_body(messages=[])).json()["error"]
    assert error["message"] == "messages: list should have at least 1 item; correct it"


def test_fields_that_ask_for_nothing_are_taken(server):
    nothing = {
        **{"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stop": None},
        **{"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto"},
        **{"store": False, "user": "me", "metadata": {"a": "b"}, "parallel_tool_calls": True},
        **{"max_tokens": 9, "max_completion_tokens": 9, "logprobs": False, "tools": None},
    }
    found = server.chat(**nothing).json()
    assert found["choices"][0]["message"]["content"] == "so"


def test_a_request_says_how_tokens_are_drawn_and_the_server_what_it_does_not_say():
    usual = DecodeConfig("none", max_tokens=7, stop=("a",), sampling=SamplingConfig(0.5, min_p=0.1))
    drawn = {"top_p": 0.9, "top_k": 3, "seed": 4, "repetition_penalty": 1.1}
    drawn |= {"repetition_context": 9, "presence_penalty": -1.0, "frequency_penalty": 2.0}
    drawn |= {"logit_bias": {"7": -3.0}, "min_tokens": 2, "stop_token_ids": [8]}
    more = {"n": 3, "stop": "b", "ignore_eos": True}
    configs = decoding(usual, CompletionRequest(model=MODEL, prompt="a", **drawn, **more))
    assert [each.sampling.seed for each in configs] == [4, 5, 6]
    bias = {"logit_bias": ((7, -3.0),), "stop_token_ids": (8,), "ignore_eos": True}
    expected = replace(SamplingConfig(**{**drawn, **bias}), temperature=0.5, min_p=0.1)
    assert configs[0] == DecodeConfig("none", max_tokens=7, stop=("a", "b"), sampling=expected)
    greedy = CompletionRequest(model=MODEL, prompt="a", temperature=0, max_tokens=5)
    (config,) = decoding(usual, greedy)
    assert (config.sampling.temperature, config.max_tokens) == (0, 5)


def test_a_field_of_a_server_that_decodes_exactly_is_refused_as_its_setting_is():
    with serving(lambda prompt: "so", DecodeConfig("none", exact=True)) as server:
        found = server.chat(temperature=1.0)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "exact")
