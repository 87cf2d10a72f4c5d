"""The anthropic package against the server."""

from __future__ import annotations

import anthropic
import pytest

from support.serving import (
    COUNT,
    MESSAGES,
    MODEL,
    ROLE,
    TEMPLATE,
    WORDS,
    actor_pair,
    serving,
    speak,
    user,
)


def ask(other, text="hello", **more):
    given = {"max_tokens": 200, **more}
    return other.messages.create(model=MODEL, messages=user(text), **given)


def test_an_answer_comes_whole(other):
    drawn = {"temperature": 0.5, "top_k": 3, "seed": 1}  # the package has no names for these
    more = {"system": "be short", "metadata": {"user_id": "me"}, "extra_body": drawn}
    answer = ask(other, **more)
    assert (answer.content[0].text, answer.stop_reason) == (WORDS, "end_turn")
    usage = answer.usage
    prompt = len("[system]be short[user]hello" + ROLE)
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt
    assert usage.output_tokens == len(WORDS) + 1
    assert answer.model_extra["dflash"]["rounds"] == len(WORDS)


def test_a_stream_is_the_same_answer(other):
    with other.messages.stream(model=MODEL, max_tokens=200, messages=user("hello")) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_message()
    assert (answer.content[0].text, answer.stop_reason) == (WORDS, "end_turn")
    assert answer.usage.output_tokens == len(WORDS) + 1
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_an_answer_says_what_ended_it(other):
    stopped = ask(other, stop_sequences=["time", "upon a time"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "upon a time")
    assert stopped.content[0].text == "Once "
    cut = ask(other, max_tokens=4)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Once")


def test_thoughts_are_blocks_of_their_own_and_turned_on_through_the_template(other, server):
    with other.messages.stream(model=MODEL, max_tokens=200, messages=user("think")) as stream:
        streamed = stream.get_final_message()
    for found in (ask(other, "think", thinking={"type": "adaptive"}), streamed):
        thought, answer = found.content
        assert (thought.thinking, answer.text) == ("Let me see.", "It is blue.")
    on = server.message(thinking={"type": "enabled"})
    assert [block["type"] for block in on.json()["content"]] == ["thinking"]
    assert ask(other, thinking={"type": "disabled"}).content[0].text == WORDS
    budget = {"type": "enabled", "budget_tokens": 1024}  # which the package insists on
    bounded = ask(other, "think", max_tokens=2000, thinking=budget)
    assert bounded.content[0].type == "thinking" and not bounded.model_extra["dflash"]["ignored"]
    assert bounded.usage.output_tokens_details.thinking_tokens == len("\nLet me see.")


def test_the_first_event_counts_cached_tokens_as_the_last_one_does(other):
    for _ in range(2):
        with other.messages.stream(model=MODEL, max_tokens=9, messages=user("again")) as stream:
            events = {event.type: event for event in stream}
        first, last = events["message_start"].message.usage, events["message_delta"].usage
        assert first.input_tokens == last.input_tokens
        assert first.cache_read_input_tokens == last.cache_read_input_tokens
    assert first.cache_read_input_tokens > 0


def test_the_beginning_of_an_answer_is_gone_on_with_and_tokens_are_counted_as_read(other):
    talk = [*user("hello"), {"role": "assistant", "content": "Once upon"}]
    answer = other.messages.create(model=MODEL, max_tokens=200, messages=talk)
    assert answer.content[0].text == WORDS.removeprefix("Once upon")
    counted = other.messages.count_tokens(model=MODEL, messages=user("hello"), system="be short")
    usage = ask(other, system="be short").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_blocks_reach_the_template_as_its_messages():
    seen = []
    cached = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    failed = {"type": "tool_result", "tool_use_id": "1", "is_error": True}
    results = [
        {**failed, "content": [{"type": "text", "text": "no"}]},
        {"type": "text", "text": "go on", **cached},
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    said = {"role": "assistant", "content": [thought, use]}
    talk = [*user("a"), said, {"role": "user", "content": results}]
    system = [{"type": "text", "text": "be short", **cached}]
    with serving(lambda prompt: seen.append(prompt) or "so") as server:
        assert server.message(messages=talk, system=system).status_code == 200
    call = "<think>hm</think><tool_call>f</tool_call>"
    assert seen[0] == f"[system]be short[user]a[assistant]{call}[tool]Error: no[user]go on"


@pytest.mark.parametrize(("reads", "shown"), [("{{ reasoning_effort }}", "high"), ("", "")])
def test_effort_goes_to_a_template_that_reads_it_and_is_no_error_elsewhere(reads, shown):
    seen = []
    with serving(actor_pair(lambda p: seen.append(p) or "so", reads + TEMPLATE)) as server:
        found = server.message("a", output_config={"effort": "high"})
    assert found.status_code == 200 and seen[0] == f"{shown}[user]a"


def test_errors_have_the_shape_of_the_api(other, server):
    with pytest.raises(anthropic.BadRequestError) as found:
        ask(other, max_tokens=-5)
    assert found.value.body["error"]["type"] == "invalid_request_error"
    with serving(speak, strict=True) as strict:
        unknown = strict.message(model="claude").json()
    assert unknown["error"]["type"] == "not_found_error"
    assert server.get(MESSAGES).json()["type"] == "error"


def test_what_another_role_sends_is_refused_with_its_place(server):
    result = {"type": "tool_result", "tool_use_id": "1", "content": "3"}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    wrong = {"assistant": result, "system": result, "user": thought}
    for role, block in wrong.items():
        text = {"type": "text", "text": "a"}
        found = server.message(messages=[*user("a"), {"role": role, "content": [text, block]}])
        assert found.status_code == 400
        assert found.json()["error"]["message"].startswith("messages[1].content[1].type ")


def test_tools_go_round_in_the_other_api(other):
    tool = {"name": "add", "input_schema": COUNT}
    usual = {"model": MODEL, "max_tokens": 200, "tools": [tool]}
    first = other.messages.create(messages=user("what is 1 + 2"), **usual)
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert (text.text, call.name, call.input) == ("Let me see.", "add", {"a": 1, "b": "2"})
    said = {"role": "assistant", "content": first.content}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    talk = [*user("what is 1 + 2"), said, {"role": "user", "content": [result]}]
    assert other.messages.create(messages=talk, **usual).content[0].text == "It is 3."
    one = {"type": "auto", "disable_parallel_tool_use": True}
    alone = other.messages.create(messages=user("two"), tool_choice=one, **usual)
    assert [block.type for block in alone.content] == ["text", "tool_use"]
    with other.messages.stream(messages=user("two"), **usual) as stream:
        last = stream.get_final_message()
    assert [block.type for block in last.content] == ["text", "tool_use", "tool_use"]
    assert last.content[2].input == {"a": 1, "b": "2"}


def test_the_tool_runner_goes_on_though_nothing_is_kept_of_its_threads(other):
    """Each turn after the first is refused as a thread that is lost, and then sent again whole."""

    @anthropic.beta_tool
    def add(a: int, b: str) -> str:
        """Add."""
        return "3"

    asked = {"model": MODEL, "max_tokens": 300, "messages": user("what")}
    runner = other.beta.messages.tool_runner(tools=[add], **asked)
    replies = list(runner)
    assert [each.stop_reason for each in replies] == ["tool_use", "end_turn"]
    assert replies[-1].content[0].text == "It is 3."
