"""What only a grammar can promise: answers of a JSON schema, tool calls that must come.

The one place where such requests are looked at. Nothing here can hold the model to a grammar yet,
so they are refused; a grammar that the engine follows would be returned for `DecodeConfig` here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.serve.errors import refusal

_STEP = "ask for it in words, and check the answer"


def check_structure(
    response_format: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    required: str | None,
    names: tuple[str, str] = ("response_format", "tool_choice"),
) -> None:
    """Raise ApiError for what this server cannot promise.

    tools: as of OpenAI. required: the tool that has to be called, "" for any of them, None where
    none has to be. names: of the two fields in the API that was asked.
    """
    if response_format is not None and response_format.get("type", "text") != "text":
        kind = response_format.get("type")
        raise refusal(names[0], f"of type {kind!r} is not supported yet", _STEP)
    if required is not None:
        step = f"leave {names[1]} to the model, and say in words that a tool is wanted"
        raise refusal(names[1], "that requires a call is not supported yet", step)
    for i, tool in enumerate(tools):
        if tool["function"].get("strict"):
            raise refusal(f"tools[{i}].function.strict", "is not supported yet", "leave it out")
