"""What a hub answers."""

from __future__ import annotations


class Response:
    """As much of an HTTP response as the hub's errors read."""

    headers: dict[str, str] = {}
    request = None
