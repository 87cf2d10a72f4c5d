"""Requests that schemathesis makes of the schema that a server serves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.errors import InvalidSchema

from support.serving import MODEL, Server

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
HASTE = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=SLOW)
OURS = st.sampled_from([MODEL, MODEL, MODEL, "another"])


def attack(server: Server, each: int, number: int = 0) -> Counter[str]:
    """`each` requests to every path, valid ones and others; counts what became of them.

    number: another one makes other requests. Raises AssertionError for a 5xx and for an error in
    another shape than the API's.
    """
    counted: Counter[str] = Counter()
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    for found in schema.get_all_operations():
        asked = found.ok()
        wrong = [GenerationMode.NEGATIVE] if asked.method == "post" else []
        for mode in (GenerationMode.POSITIVE, *wrong):
            _ask(asked.as_strategy(generation_mode=mode), each, number, counted)
    return counted


def _ask(cases: st.SearchStrategy[Any], each: int, number: int, counted: Counter[str]) -> None:
    @seed(number)
    @settings(HASTE, max_examples=each)
    @given(cases, OURS)
    def ask(case: Any, name: str) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = name  # no other would be answered
        response = case.call(timeout=120)  # a legal request may ask for the whole context
        counted["requests"] += 1
        counted["answered" if response.status_code == 200 else "refused"] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400 and case.method != "HEAD":
            error = response.json()["error"]
            assert error if case.path.startswith("/api/") else error["message"]

    try:
        ask()
    except InvalidSchema:  # schemathesis can make no more of these
        counted["given up"] += 1
