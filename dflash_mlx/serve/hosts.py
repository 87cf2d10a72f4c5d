"""Names and addresses of machines, as requests and command lines give them."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address

LOCAL = "localhost"


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    return host == LOCAL or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether it is an address, which no name server can point elsewhere."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def host_of(header: str) -> str:
    """The host that a Host header or the rest of an Origin names, without its port."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def may_call(header: str, allowed: Collection[str]) -> bool:
    """Whether a request for this host is meant for us, not for a name that was made to lead here.

    A web page's own name can be pointed at this machine (DNS rebinding); an address cannot.
    """
    host = host_of(header)
    return host == LOCAL or is_address(host) or host in allowed
