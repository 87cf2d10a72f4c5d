"""What a request says beyond the schema: taken where that changes no answer, unless --strict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dflash_mlx.core.option import LARGEST
from dflash_mlx.serve.chat import Json
from dflash_mlx.serve.errors import ApiError, place_of
from dflash_mlx.serve.settings import ServeConfig

_TRIES = 8  # a field may be wrong only once another is gone
_MOST_VALUES, _MOST_TOKENS = 2**18, 2**20  # in a body, and in its prompt
_MOST_WRONG = 10_000  # problems of a request, each of which takes time that the others wait
_MOST_TOLD, _LONGEST_TOLD = 32, 100  # names of ignored fields, characters of one
# What other servers call fields of ours.
_SAME = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repetition_context_size": "repetition_context",
    **dict.fromkeys(("thinking_token_budget", "thinking_budget_tokens"), "thinking_budget"),
    "reasoning_budget": "thinking_budget",
    "repeat_last_n": "repetition_context",
}
# Known fields of which no value changes an answer here.
_HINTS = {
    *("service_tier", "user", "metadata", "safety_identifier", "prompt_cache_key"),
    *("cache_control", "stream_options"),
}
# Fields that this server does not know, and that would change the answer.
_ASKING = {
    *("functions", "function_call", "web_search_options", "audio", "mcp_servers", "container"),
    *("thread", "thinking", "options", "system", "input", "images", "documents", "suffix", "echo"),
    *("grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex", "n", "tools"),
    *("guided_choice", "guided_grammar", "format", "template", "chat_template", "raw", "adapters"),
    *("bad_words", "best_of", "use_beam_search", "messages", "stop", "stop_sequences"),
    *("mirostat", "typical_p", "tfs_z", "top_a", "top_n_sigma", "xtc_probability", "context"),
    *("dry_multiplier", "dynatemp_range", "logits_processors", "prompt_embeds"),
    *("presence_context_size", "frequency_context_size"),
    *("add_generation_prompt", "continue_final_message", "truncate_prompt_tokens", "prompt"),
    *("tool_choice", "response_format", "output_config", "reasoning_effort", "prompt_logprobs"),
    "thinking_budget",
}
_NEUTRAL_AT_1 = {"best_of", "typical_p", "tfs_z", "n"}
_MINUS_1 = {"max_tokens", "max_completion_tokens", "top_k", "seed", "thinking_budget"}  # default
_CREATE = {"type": "create"}  # a thread, which may be lost: the conversation is sent again then
_NOTHING: tuple[object, ...] = (None, False, 0, -1, "", [], {}, "none", "auto", _CREATE)


class Route(APIRoute):
    """Refuses bodies that take long to come, or whose many wrong values would take long to name.

    Unless the server is strict it takes what changes no answer; `request.state.ignored` names it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            ignored: list[str] = []
            request.state.ignored = ignored
            config: ServeConfig = request.app.state.service.config
            try:
                with suppress(ValueError, RecursionError, ClientDisconnect):  # which FastAPI tells
                    _check_size(await asyncio.wait_for(request.json(), config.idle))
            except asyncio.TimeoutError:
                what = f"the request did not arrive within {config.idle:g} s"
                raise ApiError(408, what, headers={"Connection": "close"}) from None
            for _ in range(0 if config.strict else _TRIES):
                try:
                    return await handle(request)
                except RequestValidationError as error:
                    if not _soften(error, ignored):
                        raise
            return await handle(request)

        return handle if self.body_field is None else read


def _check_size(body: Any) -> None:
    """ApiError for a body of too many values; as a prompt many tokens may be sent."""
    if not isinstance(body, dict):
        return
    tokens = body.get("prompt")
    if _has_more({**body, "prompt": None}, _MOST_VALUES) or _has_more(tokens, _MOST_TOKENS):
        what = f"the request has more than {_MOST_VALUES} values, or {_MOST_TOKENS} in its prompt"
        raise ApiError(400, f"{what}; send fewer")


def _has_more(value: Any, most: int) -> bool:
    """Whether there are more values in it than that, at any depth."""
    found = [value]
    while found and most >= 0:
        each = found.pop()
        inner = each.values() if isinstance(each, dict) else each
        if isinstance(each, (dict, list)):
            most -= len(each)
            found += (one for one in inner if isinstance(one, (dict, list)))
    return most < 0


def told(names: list[str]) -> list[str]:
    """Each name once, as many as a response bears."""
    return [*dict.fromkeys(each[:_LONGEST_TOLD] for each in names)][:_MOST_TOLD]


def _soften(error: RequestValidationError, ignored: list[str]) -> bool:
    """Take away what may be, in the body itself; whether anything was."""
    if len(problems := error.errors()) > _MOST_WRONG:
        return False
    changed = False
    for problem in problems:
        place = place_of(problem, error.body)
        holder: Any = error.body
        try:
            for each in place[:-1]:
                holder = holder[each]
        except (LookupError, TypeError):  # the tag of a part that has no such field
            continue
        if not place or not isinstance(holder, dict):
            continue
        fields = len(holder)
        if place == ["model"] and holder.get("model") in (None, ""):
            holder["model"] = "default"  # as any other name, it is answered
            changed = True
        elif place[-1] in holder and _may_go(problem, place, holder):
            changed, is_gone = True, len(holder) < fields  # and has no other name
            if is_gone and (problem["type"] == "extra_forbidden" or place[0] in _HINTS):
                ignored.append(_name(place))
    return changed


def _may_go(problem: Json, place: list[str | int], holder: Json) -> bool:
    """Change the last field of a place to what it means, or take it away; whether it could be."""
    key, is_top = str(place[-1]), place[:-1] in ([], ["options"])
    value = holder[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if problem["type"] == "extra_forbidden":
        if is_top and key in _SAME:
            other = holder.get(_SAME[key])
            if None not in (value, other) and value != other:
                return False  # two values of one field
            holder[_SAME[key]] = value if other is None else other
            del holder[key]
            return True
        nothing = value in _NOTHING or (key in _NEUTRAL_AT_1 and is_number and value == 1)
        if (is_top or key == "images") and key in _ASKING and not nothing:
            return False
    elif is_top and _SAME.get(key, key) == "repetition_context" and value == -1:
        holder[key] = LARGEST
        return True
    elif is_top and key == "seed" and isinstance(value, int) and is_number and value != -1:
        holder[key] = value % 2**32
        return True
    else:
        is_default = is_top and key in _MINUS_1 and is_number and value == -1
        if not is_default and place[0] not in _HINTS and value not in (None, ""):
            return False
    del holder[key]
    return True


def _name(place: list[str | int]) -> str:
    """Of a field, without the numbers of its messages."""
    parts = ("[]" if isinstance(each, int) else f".{each}" for each in place)
    return "".join(parts).removeprefix(".")
