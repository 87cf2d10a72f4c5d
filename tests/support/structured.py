"""Schemas, tools and a model that says calls as Qwen's template has them."""

from __future__ import annotations

from dflash_mlx.core.config import DecodeConfig
from support.serving import TEMPLATE

WORDS = "Once upon a time."
# As Qwen's template has it: the call as JSON, on a line between the tags.
CALLS = TEMPLATE.replace(
    "<tool_call>{{ (tool_call.function or tool_call.name).name }}</tool_call>",
    '<tool_call>\n{"name": "{{ (tool_call.function or tool_call.name).name }}", '
    '"arguments": {{ tool_call.function.arguments | tojson }}}\n</tool_call>',
)
ODD = """{# '<function name="' and '<param name="' are MiniCPM's, with its own escapes #}"""
FREE = '<tool_call>\n{"name": "pick", "arguments": {"colour": "blue"}}\n</tool_call>'


def schema_of(**properties):
    known = {"type": "object", "properties": properties, "required": [*properties]}
    return {**known, "additionalProperties": False}


COUNT = schema_of(count={"type": "integer", "minimum": 1, "maximum": 30})
COLOUR = schema_of(colour={"enum": ["red", "green"]})
NAME = schema_of(name={"type": "string", "maxLength": 5}, ok={"type": "boolean"})
NOTE = schema_of(note={"type": "string"})
SCHEMAS = [COUNT, COLOUR, NAME]
BAD = {"type": "object", "properties": {"a": {"type": "numbre"}}}


def tool(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("add", COUNT), tool("pick", COLOUR)]
STRICT = [tool("add", COUNT, strict=True), tool("pick", COLOUR, strict=True)]
ADD = {"type": "function", "function": {"name": "add"}}


def act(prompt):
    """ "long" has an end token nowhere, so that what is chosen by a grammar is chosen evenly."""
    if prompt.endswith("long"):
        return "x" * 3000
    return f"Well. {FREE} So." if prompt.endswith("call") else WORDS


USUAL = DecodeConfig("none", max_tokens=300)


def form(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}
