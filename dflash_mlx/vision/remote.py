"""Pictures from addresses: HTTPS alone, from public machines, with limits of size and time."""

from __future__ import annotations

import socket
import ssl
import time
from http.client import HTTPException, HTTPSConnection
from ipaddress import ip_address
from urllib.parse import urlsplit

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.vision.pictures import MOST_BYTES, too_large

PATIENCE = 20.0  # seconds for all of a picture
_PART = 2**16  # bytes
_SAVE = "save the picture, and give its file"


def is_address(text: str) -> bool:
    """Whether a picture is named by an address of the web."""
    return text.lower().startswith(("http://", "https://"))


def fetch(address: str, most: int = MOST_BYTES, patience: float = PATIENCE) -> bytes:
    """What an https address has, of at most so many bytes; redirections are not followed.

    Raises DFlashError for any other address, for one of a machine that is not public, as routers
    and servers at home are not, and for what is too large or too slow.
    """
    shown, ends = address[:200], time.monotonic() + patience
    try:
        parts = urlsplit(address)
        if parts.scheme.lower() != "https" or not parts.hostname or parts.username is not None:
            raise DFlashError(f"{shown} is not an https address", _SAVE)
        connection = _PublicConnection(parts.hostname, parts.port or 443, timeout=patience)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "image/*"})
            response = connection.getresponse()
            if response.status != 200:
                raise DFlashError(f"{shown} answers with status {response.status}", _SAVE)
            data = b""
            while part := response.read1(_PART):
                data += part
                if len(data) > most:
                    raise too_large(shown, len(data), most)
                if time.monotonic() > ends:
                    raise TimeoutError(f"it took more than {patience:.0f} s")
            return data
        finally:
            connection.close()
    except (OSError, ValueError, HTTPException) as error:
        raise DFlashError(f"{shown} cannot be read ({in_one_line(error)})", _SAVE) from None


class _PublicConnection(HTTPSConnection):
    """Connects to the very address that was found public: a second look-up could lead elsewhere."""

    def connect(self) -> None:
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        places = [str(each[4][0]) for each in found]
        for place in places:
            if not ip_address(place).is_global:
                raise DFlashError(f"{self.host} is at {place}, which is not public", _SAVE)
        plain = socket.create_connection((places[0], self.port), self.timeout)
        context = ssl.create_default_context()
        self.sock = context.wrap_socket(plain, server_hostname=self.host)
