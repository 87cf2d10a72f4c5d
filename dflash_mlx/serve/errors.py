"""Refusals in the shape of the API that was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from dflash_mlx.core.errors import DFlashError

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"  # where their paths begin
_INVALID, _FAULT = "invalid_request_error", ("server_error", "api_error")
_KINDS = {  # what a status is called in OpenAI's API and in Anthropic's
    400: (_INVALID, _INVALID),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: (_INVALID, "not_found_error"),
    405: (_INVALID, _INVALID),
    408: ("timeout_error", "timeout_error"),
    413: (_INVALID, "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}


class ApiError(HTTPException):
    """A request that is not answered: an HTTP status and one sentence."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param  # the field that the sentence is about
        self.code = code  # for programs


def refusal(param: str, problem: str, next_step: str) -> ApiError:
    """A field that cannot be honoured."""
    return ApiError(400, f"{param} {problem}; {next_step}", param)


def of_settings(error: DFlashError, names: Mapping[str, str] | None = None) -> ApiError:
    """A DFlashError about a request, in the words of the API. names: of fields, by setting."""
    known = dict(names or {})
    field = known.get(error.setting, error.setting) or None
    return ApiError(400, error.told(lambda setting: known.get(setting, setting)), field)


def body_of(error: HTTPException, path: str) -> dict[str, Any]:
    """The JSON of an error for a request of this path."""
    openai, anthropic = _KINDS.get(error.status_code, _FAULT)
    if path.startswith(ANTHROPIC):
        told: dict[str, Any] = {"type": anthropic, "message": error.detail}
        if getattr(error, "param", None) == "thread":  # clients send the conversation again then
            told["details"] = {"error_code": "thread_not_found"}
        return {"type": "error", "error": told}
    if path.startswith(OLLAMA):
        return {"error": error.detail}
    about = {"param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    return {"error": {"message": error.detail, "type": openai, **about}}


def place_of(problem: Mapping[str, Any], body: Any) -> list[str | int]:
    """Where a problem of pydantic's is; its own place also names the types that it tried."""
    found: list[str | int] = []
    loc = problem["loc"][1:]
    for left, each in enumerate(loc, 1 - len(loc)):
        if left and _names_kind(each, body):
            continue
        inner = body.get(str(body.get("type"))) if isinstance(body, dict) else None
        if isinstance(inner, dict) and each in inner and each not in body:  # `Nested`
            found.append(str(body["type"]))
            body = inner
        is_key = isinstance(body, dict) and each in body
        if is_key or (isinstance(body, list) and isinstance(each, int) and each < len(body)):
            body = body[each]
        elif problem["type"] != "missing" or each != problem["loc"][-1]:
            continue
        found.append(each)
    return found


def _names_kind(name: str | int, body: Any) -> bool:
    """Whether pydantic says which kind of object it took, as `text`, which may be a field, too."""
    kinds = (body.get("type"), body.get("role")) if isinstance(body, dict) else ()
    return name in kinds and not isinstance(body.get(name), (dict, list))


def response_of(error: HTTPException, path: str) -> Response:
    """The response that says so."""
    return as_json(body_of(error, path), error.status_code, error.headers)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with this value."""
    return Response(encoded(value), status, headers, "application/json")


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, as an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def event(kind: str, **values: Any) -> bytes:
    """A server-sent event that has a name, in itself too."""
    return f"event: {kind}\ndata: ".encode() + encoded({"type": kind, **values}) + b"\n\n"
