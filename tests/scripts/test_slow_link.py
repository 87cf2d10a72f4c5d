"""The link that takes its time: what goes in comes out, later, and is counted."""

from __future__ import annotations

import socket
import time

from slow_link import PORT, SlowLink


def test_bytes_arrive_late_and_are_counted():
    link = SlowLink(latency=0.05, rate=1e6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for name, through in (("ring", link.to(port, "ring")), ("control", link.anywhere)):
            with socket.create_connection(("127.0.0.1", through)) as near:
                if name == "control":
                    near.sendall(PORT.pack(port))
                far, _ = server.accept()
                with far:
                    begin, left = time.monotonic(), 50_000
                    near.sendall(b"x" * left)
                    while left:
                        left -= len(far.recv(left))
                    assert time.monotonic() - begin >= 0.05 + 0.05, "latency, and the line's rate"
                    far.sendall(b"back")
                    assert near.recv(4) == b"back"
            assert link.sent[name] == 50_004
