"""What only a grammar can promise: answers of a JSON schema, tool calls that must come.

The one place where such requests are looked at; what comes of them is a setting of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.grammar import check_structure, constraint_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.read import unread_arguments
from dflash_mlx.serve import call_grammar
from dflash_mlx.serve.call_grammar import CallForm, call_form, parameters_of
from dflash_mlx.serve.errors import of_settings, refusal
from dflash_mlx.serve.fields import is_text

Json = dict[str, Any]


@dataclass(frozen=True)
class Fields:
    """What the fields of an API are called. parameters, strict, name: of a tool, by its number."""

    form: str
    schema: str
    parameters: str
    strict: str
    name: str
    choice: str = "tool_choice"


OPENAI = Fields(
    "response_format",
    "response_format.json_schema.schema",
    "tools[{}].function.parameters",
    "tools[{}].function.strict",
    "tools[{}].function.name",
)
ANTHROPIC = Fields(
    "output_config.format",
    "output_config.format.schema",
    "tools[{}].input_schema",
    "tools[{}].strict",
    "tools[{}].name",
)


@dataclass(frozen=True)
class StructureRequest:
    """What a request wants of the answer's form.

    schema: of the whole answer, None for words. tools: that may be called, as of OpenAI. required:
    the tool that has to be called, "" for any of them, None where none has to be. one: whether the
    answer is over with its first call.
    """

    schema: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    required: str | None = None
    one: bool = False

    @property
    def asks(self) -> bool:
        """Whether it asks for anything."""
        return self.schema is not None or self.required is not None or self.is_strict

    @property
    def told(self) -> list[Json]:
        """The tools as the model is told of them: how they are kept is not its matter."""
        return [
            {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
            for tool in self.tools
        ]

    @property
    def is_strict(self) -> bool:
        """Whether calls of some tool have to follow its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)


def structure_of(pair: Pair, wanted: StructureRequest, fields: Fields) -> StructureConfig:
    """The grammar that keeps a request's promise, compiled; takes a moment.

    A call that has to come is preferred to an answer of a schema. ApiError for what cannot be
    promised.
    """
    if not wanted.asks:
        return StructureConfig()
    if wanted.schema is not None:
        _compiled(pair, _schema(wanted.schema, fields.schema), fields.schema)
    if wanted.schema is not None and not wanted.tools:
        return _schema(wanted.schema, fields.schema)
    field = _asking(wanted, fields)
    if (form := call_form(pair)) is None:
        what = f"has to know the form of calls, and those of {pair.target.name} are no plain JSON"
        raise refusal(field, what, "leave it out, or serve another model")
    grammar = _grammar(form, wanted, _tools(wanted, fields))
    return _compiled(pair, StructureConfig(grammar=grammar), field)


def without_thoughts(pair: Pair, arguments: Mapping[str, Any], fields: Mapping[str, str]) -> Json:
    """Arguments of the chat template for an answer that a grammar holds: nothing is thought first.

    fields: in which the arguments came that are not in `chat_template_kwargs`. ApiError where one
    asks for thoughts.
    """
    for name, without in (("enable_thinking", False), ("reasoning_effort", "none")):
        if arguments.get(name, without) not in (None, without):
            field = fields.get(name, f"chat_template_kwargs.{name}")
            what = "asks for thoughts, and an answer whose form is given has no room for them"
            raise refusal(field, what, "turn them off, or leave the form to the model")
    if unread_arguments(pair.tokenizer, ["enable_thinking"]):
        return dict(arguments)
    return {**arguments, "enable_thinking": False}


def _asking(wanted: StructureRequest, fields: Fields) -> str:
    """The field because of which calls need a grammar."""
    if wanted.required is not None:
        return fields.choice
    if wanted.schema is not None:
        return fields.form
    strict = [bool(tool["function"].get("strict")) for tool in wanted.tools]
    return fields.strict.format(strict.index(True))


def _tools(wanted: StructureRequest, fields: Fields) -> list[Json]:
    """The tools that may be called, each with the schema that its arguments follow."""
    found = []
    for i, tool in enumerate(wanted.tools):
        name = tool["function"]["name"]
        if not is_text(name):
            raise refusal(
                fields.name.format(i), "has half a surrogate pair", "send whole characters"
            )
        if wanted.required not in (None, "", name):
            continue
        followed = wanted.required is not None or bool(tool["function"].get("strict"))
        schema = parameters_of(tool, followed)
        field = fields.parameters.format(i)
        if schema["type"] != "object":
            what = f"is of type {json.dumps(schema['type'])[:80]}"
            raise refusal(field, what, "send the schema of an object")
        _checked(_schema(schema, field), field)
        found.append({"function": {"name": name, "parameters": schema}})
    if not found:
        what = f"names {wanted.required!r}, which is none of the tools"
        raise refusal(fields.choice, what, "name one of them")
    return found


def _grammar(form: CallForm, wanted: StructureRequest, tools: Sequence[Json]) -> str:
    one = wanted.one or bool(wanted.required)
    if wanted.required is not None:
        return call_grammar.calls_only(form, tools, one)
    if wanted.schema is not None:
        return call_grammar.calls_or_json(form, tools, one, wanted.schema)
    return call_grammar.words_and_calls(form, tools, one)


def _schema(schema: Mapping[str, Any], field: str) -> StructureConfig:
    try:
        return StructureConfig(json_schema=json.dumps(schema))
    except RecursionError:
        raise refusal(field, "is nested too deeply", "make it simpler") from None
    except DFlashError as error:
        raise of_settings(error, {"json_schema": field}) from None


def _checked(structure: StructureConfig, field: str) -> None:
    """ApiError for what llguidance refuses, or where it is missing."""
    try:
        check_structure(structure)
    except DFlashError as error:
        raise of_settings(error, {structure.kind: field}) from None


def _compiled(pair: Pair, structure: StructureConfig, field: str) -> StructureConfig:
    """The same, compiled for this model: what decodes finds it ready."""
    try:
        constraint_of(pair, DecodeConfig(structure=structure), 0)
    except DFlashError as error:
        raise of_settings(error, {structure.kind: field}) from None
    return structure
