"""The openai package against the server: answers, streams, stops, figures, tools, refusals."""

from __future__ import annotations

import json

import openai
import pytest

from support.serving import (
    CALL,
    CHAT,
    MODEL,
    ROLE,
    TOOL,
    WORDS,
    actor_pair,
    ask,
    said,
    serving,
    speak,
    user,
)

PROMPT = "[user]a" + ROLE


def test_an_answer_comes_whole_with_its_usage_and_figures(client):
    answer = ask(client)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (WORDS, "stop")
    prompt = len("[user]hello" + ROLE)
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len(WORDS) + 1
    assert answer.usage.total_tokens == prompt + len(WORDS) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    metrics = answer.model_extra["dflash"]
    assert (metrics["method"], metrics["rounds"]) == ("none", len(WORDS))
    assert metrics["acceptance_length"] == 1.0 and metrics["parked"] is None
    assert metrics["tokens_per_second"] > 0 < metrics["time_to_first_token"]
    assert ask(client, "").choices[0].message.content == "", "which may be empty"


def test_a_stream_is_the_same_answer(client):
    chunks = [*ask(client, stream=True, stream_options={"include_usage": True})]
    *before, metrics, usage = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in before) == WORDS
    assert metrics.choices[0].finish_reason == "stop"
    assert metrics.model_extra["dflash"]["rounds"] == len(WORDS)
    assert usage.choices == [] and usage.usage.completion_tokens == len(WORDS) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(len(c.choices) == 1 for c in ask(client, stream=True)), "nobody asked for usage"


def test_stop_texts_and_lengths_end_an_answer(client):
    stopped = ask(client, stop=["time", "never"])
    assert stopped.choices[0].message.content == WORDS.partition("time")[0]
    assert stopped.choices[0].finish_reason == "stop"
    for field in ("max_tokens", "max_completion_tokens"):
        cut = ask(client, **{field: 4})
        assert (cut.choices[0].message.content, cut.usage.completion_tokens) == ("Once", 4)
        assert cut.choices[0].finish_reason == "length"


def test_thoughts_are_split_off_where_the_model_or_the_template_began_them(client):
    message = ask(client, "think").choices[0].message
    assert message.content == "It is blue."
    assert message.model_extra["reasoning_content"] == "Let me see."
    deltas = [chunk.choices[0].delta for chunk in ask(client, "think", stream=True)]
    assert "".join(d.content or "" for d in deltas) == "It is blue."
    thoughts = [(d.model_extra or {}).get("reasoning_content", "") for d in deltas]
    assert "".join(thoughts) == "Let me see."
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(client, extra_body=extra).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("", WORDS)


def test_several_answers_come_to_one_prompt(client):
    answer = ask(client, n=3, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {WORDS}
    assert answer.usage.completion_tokens == 3 * (len(WORDS) + 1)
    assert answer.usage.prompt_tokens == len("[user]hello" + ROLE)
    chunks = [*ask(client, n=2, stream=True)]
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == WORDS
        assert own[-1].finish_reason == "stop"
    assert [("dflash" in (c.model_extra or {})) for c in chunks].count(True) == 1


def test_log_probabilities_are_those_of_the_model(client):
    answer = ask(client, logprobs=True, top_logprobs=2, temperature=2.0)
    told = answer.choices[0].logprobs.content
    assert "".join(each.token for each in told) == WORDS
    assert all(-1e-6 < each.logprob <= 0 for each in told)
    assert all(each.top_logprobs[0].token == each.token for each in told)
    assert all(each.top_logprobs[1].logprob == pytest.approx(-60, abs=0.01) for each in told)
    assert told[0].bytes == [ord("O")]
    chunks = [*ask(client, logprobs=True, stream=True)]
    laws = [law for c in chunks if c.choices[0].logprobs for law in c.choices[0].logprobs.content]
    assert "".join(law.token for law in laws) == WORDS


def test_texts_and_tokens_go_on_without_a_template(client, server):
    answer = client.completions.create(model=MODEL, prompt=[PROMPT + "Once"], logprobs=1)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (WORDS.removeprefix("Once"), "stop")
    assert "".join(choice.logprobs.tokens) == choice.text + "<|im_end|>"
    assert choice.logprobs.text_offset == [*range(len(choice.text) + 1)]
    both = client.completions.create(
        model=MODEL, prompt=[PROMPT, PROMPT + "Once"], n=2, max_tokens=4
    )
    assert [choice.text for choice in both.choices] == ["Once", "Once", " upo", " upo"]
    assert both.usage.prompt_tokens == 2 * len(PROMPT) + 4
    stream = client.completions.create(model=MODEL, prompt=PROMPT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == WORDS
    tokens = server.pair.tokenizer.encode(PROMPT)
    answer = client.completions.create(model=MODEL, prompt=tokens, max_tokens=4)
    assert answer.choices[0].text == "Once"
    with pytest.raises(openai.BadRequestError, match="97"):
        client.completions.create(model=MODEL, prompt=[97])


def test_an_answer_begins_with_words_that_are_given(server):
    began = [*user("hello"), {"role": "assistant", "content": "Once"}]
    go_on = {"messages": began, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        assert said(server.chat(**{**go_on, **more})) == WORDS.removeprefix("Once")
    usual = {"add_generation_prompt": True, "continue_final_message": False}
    assert said(server.chat(**usual)) == WORDS
    faults = {
        "add_generation_prompt": ({**go_on, "add_generation_prompt": True}, usual | go_on),
        "continue_final_message": ({"continue_final_message": True},),
    }
    for field, bodies in faults.items():
        for body in bodies:
            response = server.chat(**body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    response = server.chat(add_generation_prompt=False)
    assert response.json()["error"]["param"] == "add_generation_prompt"


def test_models_are_listed_and_known_by_every_name(client):
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve("alias").model_extra["max_model_len"] == 4000
    answer = client.chat.completions.create(model="alias", messages=user("hello"))
    assert answer.model == "alias"
    for unknown in ("gpt-5", "../../etc/passwd", "http://example.org/model"):
        answer = client.chat.completions.create(model=unknown, messages=user("hello"))
        assert answer.model == MODEL
    with serving(speak, strict=True) as server:
        error = server.chat("a", **{"model": "gpt-5"}).json()["error"]
    assert error["code"] == "model_not_found" and "gpt-5" in error["message"]


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_read(client, server):
    passes = server.pair.target.passes
    for length in (4000, 4000 * 128 + 1):
        with pytest.raises(openai.BadRequestError, match=r"4000"):
            ask(client, "x" * length)
    assert server.pair.target.passes == passes


def test_messages_of_all_roles_reach_the_template():
    seen = []
    call = {"name": "f", "arguments": json.dumps({"x": 1})}
    calls = [{"id": "1", "type": "function", "function": call}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": parts},
        said,
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    thoughts = {"reasoning_content": "hm"}, {"reasoning": "hm"}  # the second is vLLM's
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        for thought in thoughts:
            messages[2] = {**said, **thought}
            response = server.post(CHAT, {"model": MODEL, "messages": messages})
            assert response.json()["dflash"]["ignored"] == []
    expected = "[system]be short[user]ab[assistant]<think>hm</think><tool_call>f</tool_call>[tool]2"
    assert {*seen} == {expected}


def test_a_call_and_its_result_go_round(client):
    choice = ask(client, "what is 1 + 2", tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": "2"}
    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    talk = [*user("what is 1 + 2"), said, result]
    again = client.chat.completions.create(model=MODEL, messages=talk, tools=[TOOL]).choices[0]
    assert (again.finish_reason, again.message.content) == ("stop", "It is 3.")


def test_a_stream_has_calls_as_they_are_made_and_by_number(client):
    chunks = [*ask(client, "two", tools=[TOOL], stream=True)]
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    begun = [call for call in calls if call.id]
    assert [(call.index, call.function.name) for call in begun] == [(0, "add"), (1, "add")]
    assert begun[0].id != begun[1].id
    for index in (0, 1):
        given = [call.function.arguments for call in calls if call.index == index]
        assert len(given) > 5 and json.loads("".join(given)) == {"a": 1, "b": "2"}
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "First.\n"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_ends_the_answer_where_one_is_wanted_and_none_comes_of_tools_not_to_use(client):
    choice = ask(client, "two", tools=[TOOL], parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    choice = ask(client, "what is 1 + 2", tools=[TOOL], tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (WORDS, "stop")


NO_TOOLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + ROLE


def test_a_model_whose_template_knows_no_tools_is_told_of_them_in_words_unless_strict():
    prompts = []

    def act(prompt):
        prompts.append(prompt)
        return "So: 3." if "3\n</tool" in prompt else CALL

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        *user("a"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        *user("and"),
    ]
    with serving(actor_pair(act, NO_TOOLS)) as server:
        first = server.chat("a", tools=[TOOL]).json()
        (found,) = first["choices"][0]["message"]["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == {"a": 1, "b": "2"}
        assert [each for each in first["dflash"]["ignored"] if "system prompt" in each]
        assert '"name": "add"' in prompts[-1] and "<tool_call>" in prompts[-1]
        second = server.post(CHAT, {"model": MODEL, "tools": [TOOL], "messages": talk})
        assert said(second) == "So: 3."
        assert '"arguments": {"a": 1}}' in prompts[-1] and "</tool_response>\nand" in prompts[-1]
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    with serving(actor_pair(act, no_system + NO_TOOLS)) as server:
        second = server.post(CHAT, {"model": MODEL, "tools": [TOOL], "messages": talk})
        assert said(second) == "So: 3." and prompts[-1].startswith("[user]You may call")
    with serving(actor_pair(act, NO_TOOLS), strict=True) as server:
        found = server.chat("a", tools=[TOOL])
        assert (found.status_code, found.json()["error"]["param"]) == (400, "tools")
