"""The page in a browser: four files of `page/`, which need no key; it asks as other clients do."""

from __future__ import annotations

from importlib.resources import files

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

HOME = "/page/index.html"
TYPES = {HOME: "text/html", "/page/page.css": "text/css"}
TYPES |= dict.fromkeys(("/page/page.js", "/page/pictures.js"), "text/javascript")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # programs get something else at /
}


def is_home(scope: Scope) -> bool:
    """Whether somebody opens the address in a browser."""
    return scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", "").lower()


async def page(path: str) -> Response:
    """A file of the page."""
    content = (files(__package__) / path.removeprefix("/")).read_bytes()
    return Response(content, headers=_HEADERS, media_type=TYPES[path])
