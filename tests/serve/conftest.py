"""The clients of both APIs, of the server that a module has."""

from __future__ import annotations

import pytest

from support.serving import serving, speak


@pytest.fixture(scope="module")
def server():
    with serving(speak, name=("alias",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def other(server):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client
