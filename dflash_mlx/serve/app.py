"""The server as an ASGI application: its paths, errors in each API's shape, and the guards."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from dflash_mlx.models.read import unread_arguments
from dflash_mlx.serve import anthropic_replies, guard, openai_replies, responses_replies
from dflash_mlx.serve.chat import Json
from dflash_mlx.serve.errors import ApiError, as_json, place_of, response_of
from dflash_mlx.serve.lenient import BoundedRoute, LenientRoute, unseen
from dflash_mlx.serve.service import Service

_ERROR = {"description": "one sentence, in the shape of the API"}
_ERRORS: dict[int | str, Json] = {code: _ERROR for code in ("4XX", 500, 503)}


async def models(request: Request) -> Response:
    """The model by all of its names, in the shape of both APIs."""
    names = request.app.state.service.names
    found = [_model(request.app.state.service, name) for name in names]
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return as_json({"object": "list", "data": found, **ends})


async def model(name: str, request: Request) -> Response:
    """The model by one of its names."""
    request.app.state.service.check_model(name)
    return as_json(_model(request.app.state.service, name))


async def hello(request: Request) -> Response:
    """What this is, for people who open the address in a browser."""
    paths = "\n".join(f"  {path}" for path in (*_ASKED, *_TOLD))
    name = request.app.state.service.names[0]
    return PlainTextResponse(f"dflash-serve answers programs, with {name}. Its paths:\n\n{paths}\n")


async def health() -> Response:
    """That the server is there."""
    return as_json({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    queue = request.app.state.service.queue
    return Response(queue.metrics.page(queue.worker.used), media_type=CONTENT_TYPE_LATEST)


_ASKED: dict[str, Callable[..., Any]] = {  # by POST
    "/v1/chat/completions": openai_replies.chat_completions,
    "/v1/responses": responses_replies.responses,
    "/v1/completions": openai_replies.completions,
    "/v1/messages": anthropic_replies.messages,
    "/v1/messages/count_tokens": anthropic_replies.count_tokens,
}
_TOLD: dict[str, Callable[..., Any]] = {  # by GET
    "/": hello,
    "/v1/models": models,
    "/v1/models/{name:path}": model,
    "/v1/responses/{name}": responses_replies.response,
    guard.HEALTH: health,
    "/metrics": metrics,
}
_DROPPED: dict[str, Callable[..., Any]] = {  # by DELETE
    "/v1/responses/{name}": responses_replies.forget,
}


def make_app(service: Service) -> ASGIApp:
    """The application around a service."""
    api = FastAPI(
        title="dflash-serve",
        docs_url=None,  # a page with scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    api.state.service = service
    api.router.route_class = BoundedRoute if service.config.strict else LenientRoute
    for method, paths in (("POST", _ASKED), ("GET", _TOLD), ("DELETE", _DROPPED)):
        for path, answer in paths.items():
            api.add_api_route(path, answer, methods=[method])
            if method == "GET":  # probes ask so
                api.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    config, most = service.config, int(service.config.body_mb * 10**6)
    _add_errors(api, most)
    app: ASGIApp = RequestBodyLimitMiddleware(api, most)
    app = guard.BodyTimeMiddleware(app, config.idle)
    keys = [] if config.key is None else [guard.key_check(config.key)]
    app = guard.CheckMiddleware(app, *keys, guard.size_check(most))
    if config.allow_origin:
        origins, all_of_them = config.allow_origin, ("*",)
        app = CORSMiddleware(app, origins, allow_methods=all_of_them, allow_headers=all_of_them)
    hosts = config.host, *config.allow_host
    app = guard.CheckMiddleware(app, guard.caller_check(hosts, config.allow_origin))

    def counted(path: str, status: int) -> None:
        service.queue.metrics.responded(path if path in {*_ASKED, *_TOLD} else "other", status)

    return guard.OuterMiddleware(app, counted, service.queue.fault)


def _add_errors(api: FastAPI, most: int) -> None:
    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 413:  # Starlette's
            error = guard.too_large(most)
        elif error.status_code == 404 and not isinstance(error, ApiError):
            what = f"{path[:200]} is not a path of this server; docs/serve.md lists them"
            error = ApiError(404, what)
        elif error.status_code == 400 and not isinstance(error, ApiError):  # FastAPI's
            error = ApiError(400, "the request is not JSON in UTF-8 of usual depth; correct it")
        return response_of(error, path)

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return response_of(invalid_field(error.errors(), error.body), request.url.path)


def invalid_field(problems: Sequence[Json], body: Any) -> ApiError:
    """What pydantic found, as a sentence that names the field it is deepest in.

    Where a text or a list may stand, it also finds that a list which is too long is no text; then
    the length is what is said.
    """
    long = [each for each in problems if each["type"] == "too_long"]
    problem = max(long or problems, key=lambda each: len(place_of(each, body)))
    field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place_of(problem, body))
    field = field.removeprefix(".")[:200]
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{field} is not known to this server; leave it out", field)
    if not field:
        step = "send Content-Type: application/json" if isinstance(body, bytes) else "correct it"
        return ApiError(400, f"the request is not a JSON object; {step}")
    part = {"type": problem["input"]} if field.endswith("].type") else problem["input"]
    if (kind := unseen(part)) is not None:
        return ApiError(400, f"{field} is {kind}, and this model reads text; send text", field)
    said = str(problem["msg"])[:300]
    told = long or problem["type"] == "missing"
    given = "" if told else f", not {reprlib.repr(problem['input'])}"
    return ApiError(400, f"{field}: {said[:1].lower()}{said[1:]}{given}; correct it", field)


def _model(service: Service, name: str) -> Json:
    tokenizer, length = service.pair.tokenizer, service.pair.target.context_length
    reads_tools = "tools" not in unread_arguments(tokenizer, ["tools"])
    can = {
        "tools": reads_tools and bool(tokenizer.has_tool_calling),
        "thinking": bool(tokenizer.has_thinking),
        "structured_outputs": find_spec("llguidance") is not None,
        "image_input": False,
        "pdf_input": False,
    }
    began = datetime.fromtimestamp(service.started, timezone.utc)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "dflash",
        "type": "model",
        "display_name": name,
        "created_at": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_model_len": length,
        "context_length": length,
        "max_input_tokens": length,
        "capabilities": {name: {"supported": each} for name, each in can.items()},
    }
