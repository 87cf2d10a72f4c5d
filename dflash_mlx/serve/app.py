"""The server as an ASGI application: its paths, errors in each API's shape, and the guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from dflash_mlx.serve import anthropic_messages, openai_chat, openai_completions
from dflash_mlx.serve.anthropic_requests import Counted, MessagesRequest
from dflash_mlx.serve.errors import ApiError, as_json, response_of
from dflash_mlx.serve.guard import (
    HEALTH,
    BodyLimitMiddleware,
    CallerCheck,
    CheckMiddleware,
    KeyCheck,
    OuterMiddleware,
)
from dflash_mlx.serve.metrics import CONTENT_TYPE
from dflash_mlx.serve.openai_requests import ChatRequest, CompletionRequest
from dflash_mlx.serve.replies import ClientGone
from dflash_mlx.serve.service import Service

Json = dict[str, Any]

_ERROR = {"description": "one sentence, in the shape of the API"}
_ERRORS: dict[int | str, Json] = {code: _ERROR for code in ("4XX", 500, 503)}
_GONE = 499  # nobody reads it


def make_app(service: Service, fault: Callable[[Exception], ApiError]) -> ASGIApp:
    """The application around a service. fault: notes an exception and makes an error of it."""
    api = FastAPI(
        title="dflash-serve",
        docs_url=None,  # a page with scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    _add_answers(api, service)
    _add_figures(api, service)
    _add_errors(api)
    config, metrics = service.config, service.metrics
    app: ASGIApp = BodyLimitMiddleware(api, config.body_bytes, config.idle)
    app = CheckMiddleware(app, KeyCheck(config.key))
    if config.allow_origin:
        origins, all_of_them = config.allow_origin, ("*",)
        app = CORSMiddleware(app, origins, allow_methods=all_of_them, allow_headers=all_of_them)
    app = CheckMiddleware(app, CallerCheck((config.host, *config.allow_host), config.allow_origin))
    paths = {route.path for route in api.routes if isinstance(route, APIRoute)}

    def counted(path: str, status: int) -> None:
        metrics.responded(path if path in paths else "other", status)

    return OuterMiddleware(app, counted, fault)


def _add_answers(api: FastAPI, service: Service) -> None:
    @api.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await openai_chat.chat(service, body, request)

    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await openai_completions.complete(service, body, request)

    @api.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await anthropic_messages.messages(service, body, request)

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(body: Counted, request: Request) -> Response:
        return await anthropic_messages.count_tokens(service, body, request)


def _add_figures(api: FastAPI, service: Service) -> None:
    @api.get("/v1/models")
    async def models() -> Response:
        found = [_model(service, name) for name in service.names]
        ends = {"has_more": False, "first_id": service.names[0], "last_id": service.names[-1]}
        return as_json({"object": "list", "data": found, **ends})

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return as_json(_model(service, name))

    @api.get(HEALTH)
    async def health() -> Response:
        return as_json({"status": "ok"})

    @api.get("/metrics")
    async def metrics() -> Response:
        page = service.metrics.page(service.queue.worker.used)
        return Response(page, media_type=CONTENT_TYPE)


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return response_of(error, request.url.path)

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return response_of(invalid_field(error.errors(), error.body), request.url.path)

    @api.exception_handler(HTTPException)
    async def no_path(request: Request, error: HTTPException) -> Response:
        told = str(error.detail)
        if error.status_code == 404:
            told = f"{request.url.path[:200]} is no path of this server; docs/serve.md lists them"
        found = ApiError(error.status_code, told, headers=error.headers)
        return response_of(found, request.url.path)

    @api.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=_GONE)


def invalid_field(problems: Sequence[Json], body: Any) -> ApiError:
    """What pydantic found, as a sentence that names the field it is deepest in."""
    problem = max(problems, key=lambda each: len(_place(each, body)))
    field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in _place(problem, body))
    field = field.removeprefix(".")[:200]
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{field} is nothing that this server knows; leave it out", field)
    if not field:
        told = problem.get("ctx", {}).get("error", problem["msg"])
        return ApiError(400, f"the request is no JSON object ({str(told)[:200]})")
    said = str(problem["msg"])[:300]
    return ApiError(400, f"{field}: {said[:1].lower()}{said[1:]}", field)


def _place(problem: Json, body: Any) -> list[str | int]:
    """Where it is; pydantic's place also has names of the types that it tried."""
    found: list[str | int] = []
    for each in problem["loc"][1:]:
        is_key = isinstance(body, dict) and each in body
        if is_key or (isinstance(body, list) and isinstance(each, int) and each < len(body)):
            body = body[each]
        elif problem["type"] != "missing" or each != problem["loc"][-1]:
            continue
        found.append(each)
    return found


def _model(service: Service, name: str) -> Json:
    """A model as both APIs list it."""
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "dflash",
        "type": "model",
        "display_name": name,
        "created_at": _iso(service.started),
        "max_model_len": service.pair.target.context_length,
    }


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
