"""Requests made from the served schema, valid and not: none is a fault of ours."""

from __future__ import annotations

from dflash_mlx.core.config import DecodeConfig
from support.fuzzed_api import attack
from support.serving import serving


def test_requests_of_all_kinds_make_no_fault():
    with serving(lambda prompt: "so", DecodeConfig("none", max_tokens=3)) as server:
        counted = attack(server, 20)
    assert counted["requests"] >= 150
    assert counted["answered"] > 20 and counted["refused"] > 20
