"""The server as an ASGI application: its paths, errors in each API's shape, and the guards."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Scope

from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve import anthropic_api, guard, ollama_api, openai_replies, responses_replies
from dflash_mlx.serve.chat import Json
from dflash_mlx.serve.errors import ApiError, as_json, place_of, response_of
from dflash_mlx.serve.fields import Asked
from dflash_mlx.serve.lenient import Route
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.web_page import HOME, TYPES, is_home, page
from dflash_mlx.session.forms import form_of

# What programs call the length of a context.
_LENGTHS = (
    *("context_length", "max_model_len", "max_input_tokens"),
    *("max_context_length", "loaded_context_length"),
)
_DETAILS = ("parent_model", "family", "parameter_size", "quantization_level")
_ERROR = {"description": "one sentence, in the shape of the API"}
_ERRORS: dict[int | str, Json] = {code: _ERROR for code in ("4XX", 500, 503)}


async def models(request: Request) -> Response:
    """The models by all of their names, in the shape of all APIs that list models here."""
    found = _listed(request)
    ends = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return as_json({"object": "list", "data": found, **ends})


async def studio_models(request: Request) -> Response:
    """The models in LM Studio's shape, with what its clients read."""
    found = _listed(request)
    for each in found:
        can = ["tool_use"] * _can(each, "tools")
        kind = "vlm" if _can(each, "image_input") else "llm"
        each |= {"type": kind, "publisher": "", "compatibility_type": "mlx", "capabilities": can}
    return as_json({"object": "list", "data": found})


async def tags(request: Request) -> Response:
    """The models in Ollama's shape; by `/api/ps` those that are in memory."""
    is_all = not request.url.path.endswith("/ps")
    found = (each for each in _listed(request) if is_all or each["state"] == "loaded")
    return as_json({"models": [_in_ollama(each) for each in found]})


async def show(body: Asked, request: Request) -> Response:
    """What Ollama tells of one."""
    request.app.state.service.check(body)
    return as_json(_in_ollama(_model(request.app.state.service, body.model)))


async def version() -> Response:
    """A version of Ollama that has what is served of it; programs refuse older ones."""
    return as_json({"version": "0.13.0"})


async def model(name: str, request: Request) -> Response:
    """A model by one of its names."""
    request.app.state.service.check_model(name)
    return as_json(_model(request.app.state.service, name))


async def hello(request: Request) -> Response:
    """What this is, for programs and people without a browser, who get the page."""
    paths = "\n".join(f"  {path}" for path in _KNOWN)
    name = request.app.state.service.names[0]
    return PlainTextResponse(f"dflash-serve answers programs, with {name}. Its paths:\n\n{paths}\n")


async def health() -> Response:
    """That the server is there."""
    return as_json({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    queue = request.app.state.service.queue
    known = request.app.state.service.models.by_name.values()
    loaded = {each.names[0]: each.pair is not None for each in known}
    page = queue.metrics.page(queue.worker.used, loaded)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


_PATHS: dict[str, dict[str, Callable[..., Any]]] = {
    "POST": {
        "/v1/chat/completions": openai_replies.chat_completions,
        "/v1/responses": responses_replies.responses,
        "/v1/responses/input_tokens": responses_replies.input_tokens,
        "/v1/completions": openai_replies.completions,
        "/v1/messages": anthropic_api.messages,
        "/v1/messages/count_tokens": anthropic_api.count_tokens,
        "/api/chat": ollama_api.chat,
        "/api/generate": ollama_api.generate,
        "/api/show": show,
    },
    "GET": {
        "/": hello,
        **{path: partial(page, path) for path in TYPES},
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/v1/responses/{name}": responses_replies.response,
        "/v1/responses/{name}/input_items": responses_replies.input_items,
        "/api/tags": tags,
        "/api/ps": tags,
        "/api/version": version,
        "/api/v0/models": studio_models,
        guard.HEALTH: health,
        "/metrics": metrics,
    },
    "DELETE": {"/v1/responses/{name}": responses_replies.forget},
}
_KNOWN = tuple(dict.fromkeys(chain(*_PATHS.values())))
# What stands before the first part of a path, and what may in a base URL.
_HEADS = {path.removeprefix("/v1").split("/")[1]: "/v1" * ("/v1/" in path) for path in _KNOWN}
_PREFIXES = re.compile(r"(/|v1/|api/v[01]/(?!models))*")
_NOT_HERE = {  # why there is no such path, by its last part
    **dict.fromkeys(("embed", "embeddings"), "embeddings need a model and a server of their own"),
    **dict.fromkeys(("pull", "create", "copy", "delete"), "--model says what is served"),
}


def canonical(scope: Scope) -> None:
    """Put in the path and the type of the body that are meant, where a client has others."""
    scope["path"] = HOME if is_home(scope) else scope["path"]
    rest = _PREFIXES.sub("", scope["path"], count=1).rstrip("/")
    if (head := _HEADS.get(rest.split("/")[0])) is not None:
        scope["path"] = f"{head}/{rest}"
    headers = MutableHeaders(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if rest.startswith("api/") or kind in ("", "application/x-www-form-urlencoded"):
        headers["content-type"] = "application/json"  # Ollama's clients and curl do not say so


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
    api.router.route_class = Route
    for method, paths in _PATHS.items():
        for path, answer in paths.items():
            api.add_api_route(path, answer, methods=[method])
            if method == "GET":  # probes ask so
                api.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    config, most = service.config, int(service.config.body_mb * 10**6)
    _add_errors(api, most)
    app: ASGIApp = RequestBodyLimitMiddleware(api, most)
    known = [*map(guard.digest, config.key)]
    keys = [partial(guard.check_key, known)] if known else []
    app = guard.CheckMiddleware(app, *keys, partial(guard.check_size, most))
    if config.allow_origin:
        origins, all_of_them = config.allow_origin, ("*",)
        app = CORSMiddleware(app, origins, allow_methods=all_of_them, allow_headers=all_of_them)
    hosts = config.host, *config.allow_host
    caller = partial(guard.check_caller, hosts, config.allow_origin)
    app = guard.CheckMiddleware(app, canonical, caller)

    def counted(path: str, status: int) -> None:
        service.queue.metrics.responded(path if path in _KNOWN else "other", status)

    return guard.OuterMiddleware(app, counted, service.queue.fault)


def _add_errors(api: FastAPI, most: int) -> None:
    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 413:  # Starlette's
            error = guard.too_large(most)
        elif error.status_code == 404 and not isinstance(error, ApiError):
            near = get_close_matches(path[:200], _KNOWN, 1)
            step = f"did you mean {near[0]}?" if near else "GET / lists them"
            step = _NOT_HERE.get(path.rpartition("/")[2], step)
            error = ApiError(404, f"{path[:200]} is not a path of this server; {step}")
        elif error.status_code == 405:  # Starlette's, too
            allowed = (error.headers or {}).get("Allow", "")
            what = f"{path[:200]} does not take {request.method}; send {allowed}"
            error = ApiError(405, what, headers=error.headers)
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
    said = str(problem["msg"]).partition(" after validation")[0][:300]
    told = long or problem["type"] in ("missing", "too_short")
    given = "" if told else f", not {reprlib.repr(problem['input'])}"
    return ApiError(400, f"{field}: {said[:1].lower()}{said[1:]}{given}; correct it", field)


def _listed(request: Request) -> list[Json]:
    service: Service = request.app.state.service
    return [_model(service, name) for name in service.names]


def _model(service: Service, name: str) -> Json:
    pair = service.models.by_name[name].pair
    began = datetime.fromtimestamp(service.started, timezone.utc)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "dflash",
        "type": "model",
        "display_name": name,
        "created_at": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "state": "not-loaded" if pair is None else "loaded",
        **({} if pair is None else _facts(pair)),
    }


def _facts(pair: Pair) -> Json:
    tokenizer, length = pair.tokenizer, pair.target.context_length
    can = {
        "tools": not form_of(pair).in_prompt,
        "thinking": bool(tokenizer.has_thinking),
        "structured_outputs": find_spec("llguidance") is not None,
        "image_input": bool(pair.target.sees),
        "pdf_input": False,
    }
    lengths = dict.fromkeys(_LENGTHS, length)
    return {**lengths, "capabilities": {name: {"supported": it} for name, it in can.items()}}


def _can(model: Json, name: str) -> bool:
    """Whether a model is known to be able to do that, which one that is not loaded is not."""
    return bool(model.get("capabilities", {}).get(name, {}).get("supported"))


def _in_ollama(model: Json) -> Json:
    """What Ollama's lists and its `show` tell of a model; what is not known is empty."""
    name, length = model["id"], model.get("context_length", 0)
    found = {"name": name, "model": name, "digest": name.encode().hex()}
    found |= {"modified_at": model["created_at"], "expires_at": "9999-12-31T23:59:59Z"}
    found |= {"size": 0, "size_vram": 0, "context_length": length}
    found |= {"details": dict.fromkeys(_DETAILS, "") | {"format": "mlx", "families": []}}
    found |= {"model_info": {"general.architecture": "mlx", "mlx.context_length": length}}
    names = {"tools": "tools", "thinking": "thinking", "image_input": "vision"}
    told = [theirs for ours, theirs in names.items() if _can(model, ours)]
    return {**found, "capabilities": ["completion", *told]}
