"""Conversations in Anthropic's words to those that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_mlx.models.read import unread_arguments
from dflash_mlx.serve.anthropic_requests import (
    AssistantMessage,
    Counted,
    SystemMessage,
    Text,
    Thinking,
    Tool,
    ToolResult,
    ToolUse,
    UserMessage,
)
from dflash_mlx.serve.errors import refusal
from dflash_mlx.serve.prompts import Chat, Message, call_of, check_arguments, check_tools, text_of
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.structure import ANTHROPIC, StructureRequest, structure_of, without_thoughts

Json = dict[str, Any]


def chat_of(service: Service, body: Counted) -> Chat:
    """The conversation of a request; ApiError for what the model or this server cannot do."""
    service.check_model(body.model)
    if (number := len(body.messages)) > (most := service.config.messages):
        raise refusal("messages", f"are {number}, and {most} may be", "send fewer")
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system)})
    for each in body.messages:
        messages += _messages(each)
    go_on = isinstance(body.messages[-1], AssistantMessage)
    if go_on and messages[-1].get("tool_calls"):
        step = "send the result of the call behind it"
        raise refusal("messages", "end with a call of a tool", step)
    wanted, arguments = _wanted(service, body), _arguments(service, body)
    if wanted.asks:
        if go_on:
            step = "end with the user's, or leave the form of the answer to the model"
            raise refusal("messages", "end with the assistant's words", step)
        asking = body.thinking is not None and body.thinking.type == "enabled"
        fields = {"enable_thinking": "thinking"} if asking else {}
        arguments = without_thoughts(service.pair, arguments, fields)
    else:
        arguments = {**_effort(service, body), **arguments}
    structure = structure_of(service.pair, wanted, ANTHROPIC)
    return Chat(messages, wanted.told, arguments, go_on, structure)


def _messages(message: UserMessage | AssistantMessage | SystemMessage) -> list[Message]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if isinstance(message, AssistantMessage):
        return [_assistant(message.content)]
    results = [block for block in message.content if isinstance(block, ToolResult)]
    texts = [block for block in message.content if isinstance(block, Text)]
    found = [_result(block) for block in results]
    if texts or not found:
        found.append({"role": message.role, "content": text_of(texts)})
    return found


def _assistant(blocks: Sequence[Text | Thinking | ToolUse]) -> Message:
    texts = [block for block in blocks if isinstance(block, Text)]
    found: Message = {"role": "assistant", "content": text_of(texts)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, Thinking)]:
        found["reasoning_content"] = "".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    if calls:
        found["tool_calls"] = [call_of(call.name, call.input, call.id) for call in calls]
    return found


def _result(block: ToolResult) -> Message:
    """Templates know nothing of errors, so the words say that it is one."""
    text = text_of(block.content)
    told = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "content": told, "tool_call_id": block.tool_use_id}


def _wanted(service: Service, body: Counted) -> StructureRequest:
    """The tools that the model is told of, in OpenAI's words, and what the answer has to be."""
    tools, choice, required = [_tool(each) for each in body.tools or []], body.tool_choice, None
    if choice is not None and choice.type in ("any", "tool"):
        if choice.type == "tool" and not choice.name:
            raise refusal("tool_choice", "of type tool names none", "send its name")
        if not tools:
            raise refusal("tool_choice", "is given without tools", "leave it out, or send tools")
        required = (choice.name if choice.type == "tool" else None) or ""
    if choice is not None and choice.type == "none":
        tools = []
    if tools:
        check_tools(service.pair)
    output = body.output_config
    schema = output.format.schema_ if output is not None and output.format is not None else None
    return StructureRequest(
        schema, tools, required, bool(choice and choice.disable_parallel_tool_use)
    )


def _tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _effort(service: Service, body: Counted) -> Json:
    """How hard the model is to try, which its template may read or not: it is for it to say."""
    effort = body.output_config.effort if body.output_config is not None else None
    reads = not unread_arguments(service.pair.tokenizer, ["reasoning_effort"])
    return {"reasoning_effort": effort} if effort is not None and reads else {}


def _arguments(service: Service, body: Counted) -> Json:
    """Arguments of the chat template: thinking is one, where the template reads it."""
    given = body.chat_template_kwargs or {}
    check_arguments(service.pair, given, "chat_template_kwargs")
    thinking = body.thinking
    if thinking is None or thinking.type == "adaptive":  # as the model has it
        return given
    if thinking.type == "enabled" and thinking.budget_tokens is not None:
        step = 'send {"type": "adaptive"}, and max_tokens for all of the answer'
        raise refusal("thinking.budget_tokens", "is a limit that this server cannot keep", step)
    on = {"enable_thinking": thinking.type == "enabled"}
    if thinking.type == "disabled" and not service.pair.tokenizer.has_thinking:
        return given
    check_arguments(service.pair, on, "thinking")
    return {**on, **given}
