"""What a request says of thoughts means the same in all APIs; a budget ends them by tokens."""

from __future__ import annotations

import json

import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.engine import sequence
from support.models import TEMPLATE as PLAIN_TEMPLATE
from support.serving import CHAT, MESSAGES, MODEL, TEMPLATE, actor_pair, serving, user

RESPONSES = "/v1/responses"
LONG = "<think>" + "t" * 30 + "</think>It is blue."
HIGH, NONE = {"reasoning_effort": "high"}, {"reasoning_effort": "none"}
FORMAT = {
    CHAT: {"response_format": {"type": "json_object"}},
    RESPONSES: {"text": {"format": {"type": "json_object"}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
}


def body(path, **more):
    said = {"input": "a"} if path == RESPONSES else {"messages": user("a")}
    return {"model": MODEL, "max_tokens": 60, **said, **more}


def told(found):
    """The thought, the words and the tokens of thoughts in an answer of any API."""
    assert found.status_code == 200, found.text
    answer, thought, words = found.json(), "", ""
    usage = answer["usage"]
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        tokens = usage["completion_tokens_details"]["reasoning_tokens"]
        return message.get("reasoning_content", ""), message["content"], tokens
    for block in answer.get("output") or answer["content"]:
        part = block["content"][0] if "output" in answer else block
        if block["type"] in ("reasoning", "thinking"):
            thought += part.get("thinking") or part["text"]
        else:
            words += part["text"]
    details = usage["output_tokens_details"]
    return thought, words, details.get("thinking_tokens", details.get("reasoning_tokens"))


def ignored(found):
    assert found.status_code == 200, found.text
    return found.json()["dflash"]["ignored"]


@pytest.fixture(scope="module", params=["none", "auto"])
def server(request):
    with serving(lambda prompt: LONG, DecodeConfig(request.param)) as server:
        yield server


BUDGETS = [
    {"thinking": {"type": "enabled", "budget_tokens": 5}},
    *({"reasoning": {"max_tokens": 5}}, {"thinking_budget": 5}, {"thinking_token_budget": 5}),
    {"reasoning_budget": 5, "enable_thinking": True},
    {"thinking_budget": 5, "reasoning": {"effort": "none", "max_tokens": 9}},
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("fields", BUDGETS, ids=str)
def test_a_budget_ends_the_thought_by_tokens_under_every_name(server, path, fields):
    thought, words, tokens = told(server.post(path, body(path, temperature=1.0, **fields)))
    assert (thought, tokens) == ("ttttt", 5)
    assert words.endswith("It is blue.")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_without_a_budget_all_of_the_thought_is_told_and_counted(server, path):
    for fields in ({}, {"thinking_budget": -1}, {"thinking_budget": 30}):
        found = told(server.post(path, body(path, **fields)))
        assert found == ("t" * 30, "It is blue.", 30)


def test_a_stream_is_ended_likewise_and_several_answers_each(server):
    asked = body(CHAT, thinking_budget=5, n=3, stream_options={"include_usage": True})
    with server.streaming(CHAT, asked) as lines:
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [each["choices"][0]["delta"] for each in events if each["choices"]]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == "t" * 15
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 15}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_budget_for_a_model_that_does_not_think_is_named_and_refused_by_a_strict_server(path):
    asked = body(path, thinking={"type": "enabled", "budget_tokens": 1024})
    pair = actor_pair(lambda prompt: "so", PLAIN_TEMPLATE)
    with serving(pair) as server:
        assert ignored(server.post(path, asked)) == ["thinking.type", "thinking.budget_tokens"]
        assert ignored(server.post(path, body(path, **NONE))) == []
        two = ignored(server.post(path, body(path, thinking_budget=9, reasoning={"max_tokens": 9})))
        assert {*two} == {"thinking_budget", "reasoning.max_tokens"}
    with serving(pair, strict=True) as server:
        found = server.post(path, asked)
        assert found.status_code == 400 and "thinking.type" in found.text
        found = server.post(path, body(path, thinking_budget=9))
        assert found.status_code == 400 and "thinking_budget limits" in found.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_budget_that_is_ignored_limits_nothing_and_costs_no_rounds(monkeypatch, path):
    made, known = [], sequence.ThoughtLimit
    limit = lambda *how: made.append(how) or known(*how)  # noqa: E731
    monkeypatch.setattr(sequence, "ThoughtLimit", limit)
    for template, honoured in ((PLAIN_TEMPLATE, False), (TEMPLATE, True)):
        with serving(actor_pair(lambda prompt: "so", template)) as server:
            server.post(path, body(path, thinking_budget=5))
        assert bool(made) is honoured


def test_marks_that_are_not_known_here_have_no_budget(monkeypatch):
    pair = actor_pair(lambda prompt: "so")
    for name, value in (("has_thinking", True), ("think_end", "<channel|>")):
        monkeypatch.setattr(type(pair.tokenizer), name, value)
    with serving(pair) as server:
        assert ignored(server.chat(thinking_budget=9)) == ["thinking_budget"]


EFFORTS = {CHAT: ("reasoning_effort", "reasoning.effort"), RESPONSES: ("reasoning.effort",)}
EFFORTS[MESSAGES] = "output_config.effort", "reasoning_effort"
NAMED = [(path, name) for path, names in EFFORTS.items() for name in names]


def nested(name, value):
    head, _, tail = name.partition(".")
    return {head: {tail: value} if tail else value}


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_effort_reaches_a_template_that_reads_it_and_none_turns_thoughts_off(
    monkeypatch, path, name
):
    seen, switch = [], "{{ '' if enable_thinking else 'off' }}"
    reads, plain = switch + "{{ reasoning_effort }}" + TEMPLATE, PLAIN_TEMPLATE

    def shown(template, effort):
        pair = actor_pair(lambda prompt: seen.append(prompt) or "so", template)
        monkeypatch.setattr(type(pair.tokenizer), "has_thinking", True)
        with serving(pair) as server:
            found = ignored(server.post(path, body(path, **nested(name, effort))))
        return seen.pop().partition("[user]")[0], found

    assert shown(reads, "low") == ("low", [])
    assert shown(reads, "none") == ("offnone", [])
    assert shown(switch + TEMPLATE, "none") == ("off", [])
    assert shown(switch + TEMPLATE, "low") == ("", [name])
    assert shown(plain, "low")[1] == shown(plain, "none")[1] == [name]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_an_answer_of_a_given_format_has_thoughts_only_where_they_are_asked_for(path):
    with serving(actor_pair(lambda prompt: "<think>Hm.</think>{}")) as server:
        asked = body(path, **FORMAT[path], reasoning={"effort": "high"}, thinking_budget=5)
        assert ignored(server.post(path, asked)) == ["reasoning.effort"]
        on = server.post(path, body(path, **FORMAT[path], thinking={"type": "enabled"}))
        assert told(on) == ("Hm.", "{}", 3)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_thoughts_that_are_not_to_be_told_are_made_and_counted(server, path):
    asked = body(path, include_reasoning=False)
    assert told(server.post(path, asked)) == ("", "It is blue.", 30)
    assert "ttt" not in server.post(path, {**asked, "stream": True}).text


@pytest.mark.parametrize("fields", [{"thinking_budget": -2}, {"reasoning": {"max_tokens": "x"}}])
def test_a_budget_that_is_none_is_refused_by_name(server, fields):
    error = server.chat(**fields).json()["error"]
    assert error["param"].startswith(*fields)


def test_completions_have_no_thoughts_to_limit(server):
    found = server.post("/v1/completions", {"prompt": "a", "thinking_budget": 5})
    assert found.status_code == 400 and "thinking_budget" in found.text
    usage = server.post("/v1/completions", {"prompt": "[user]a[assistant]"}).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/completions"])
@pytest.mark.parametrize("length", [5000, 600_000])
def test_a_prompt_that_is_too_long_has_the_code_and_the_words_that_clients_look_for(path, length):
    said = {"prompt": "a" * length} if path == "/v1/completions" else {"input": "a" * length}
    said = said if path != CHAT and path != MESSAGES else {"messages": user("a" * length)}
    with serving(lambda prompt: "so") as server:
        found = server.post(path, {"model": MODEL, "max_tokens": 5, **said})
    error = found.json()["error"]
    assert found.status_code == 400 and "maximum context length is 4000" in error["message"]
    assert "prompt is too long: " in error["message"]
    assert path == MESSAGES or error["code"] == "context_length_exceeded"


def test_codex_finds_the_code_in_a_stream(client, server):
    with client.responses.create(model=MODEL, input="a" * 5000, stream=True) as events:
        kinds = [(event.type, getattr(event.response.error, "code", None)) for event in events]
    assert [kind for kind, _ in kinds] == [
        *("response.created", "response.in_progress", "response.failed")
    ]
    assert kinds[-1][1] == "context_length_exceeded"
    found = server.post(RESPONSES, {"model": MODEL, "input": "a" * 5000, "stream": True})
    assert found.headers["content-type"].startswith("text/event-stream")
    assert server.post(RESPONSES, {"input": 5, "stream": True}).status_code == 400


@pytest.mark.parametrize(
    ("content", "headers", "said"),
    [
        (b'{"model":', {}, "not a JSON object"),
        (b'{"model": "\xff"}', {}, "JSON in UTF-8"),
        (b"[" * 100_000, {}, "usual depth"),
        (b'{"model": "x"}', {"Content-Type": "text/plain"}, "Content-Type: application/json"),
    ],
)
def test_a_body_that_is_none_is_told_what_to_do(server, content, headers, said):
    found = server.post(CHAT, content, headers=headers)
    assert found.status_code == 400 and said in found.json()["error"]["message"]
