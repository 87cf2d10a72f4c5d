"""Refusals in the shape of the API that was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from dflash_mlx.core.errors import DFlashError

ANTHROPIC = "/v1/messages"  # where its paths begin
_KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}
_FAULT = ("server_error", "api_error")


class ApiError(Exception):
    """A request that is not answered: an HTTP status and one sentence.

    param: the field that the sentence is about. code: for programs. headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def refusal(param: str, problem: str, next_step: str) -> ApiError:
    """A field that cannot be honoured."""
    return ApiError(400, f"{param} {problem}; {next_step}", param)


def of_settings(error: DFlashError, names: Mapping[str, str] | None = None) -> ApiError:
    """A DFlashError about a request, in the words of the API. names: of fields, by setting."""
    known = dict(names or {})
    field = known.get(error.setting, error.setting) or None
    return ApiError(400, error.told(lambda setting: known.get(setting, setting)), field)


def body_of(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON of an error for a request of this path."""
    openai, anthropic = _KINDS.get(error.status, _FAULT)
    if path.startswith(ANTHROPIC):
        return {"type": "error", "error": {"type": anthropic, "message": error.message}}
    told = {"message": error.message, "type": openai, "param": error.param, "code": error.code}
    return {"error": told}


def response_of(error: ApiError, path: str) -> Response:
    """The response that says so."""
    return as_json(body_of(error, path), error.status, error.headers)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with this value."""
    return Response(encoded(value), status, headers, "application/json")


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, as an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
