"""Many clients at once, with drafts: each reads what it would read alone."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import generate
from dflash_mlx.verifier.model import Target
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.models import write_tokenizer
from support.serving import serving, user

QUESTIONS = ["hello", "what is it?", "a b c d", "0123456789", "one more, please"]
USUAL = DecodeConfig("ddtree", max_tokens=24)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    write_tokenizer(folder)
    target = Target(make_model("llama"), 256, "llama")
    model = drafter_folder(folder / "drafter", [0, 1, 2], 1, target)
    return Pair(target, load_tokenizer(folder), (model,), "tiny")


def test_answers_side_by_side_are_those_of_generate(pair):
    heats = [0.0, 0.7, 0.0, 0.0, 1.2]
    alone = [
        generate(pair, q, DecodeConfig("ddtree", max_tokens=24, sampling=SamplingConfig(t, seed=i)))
        for i, (q, t) in enumerate(zip(QUESTIONS, heats, strict=True))
    ]

    async def together(url: str):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            def ask(i: int):
                return client.chat.completions.create(
                    model="llama", messages=user(QUESTIONS[i]), temperature=heats[i], seed=i
                )

            return await asyncio.gather(*map(ask, range(len(QUESTIONS))))

    with serving(pair, USUAL, "llama") as server:
        found = asyncio.run(together(server.url + "/v1"))
    for answer, expected in zip(found, alone, strict=True):
        assert answer.choices[0].message.content == expected.text
        assert answer.usage.completion_tokens == len(expected.tokens)
        metrics = answer.model_extra["dflash"]
        assert metrics["method"] == "ddtree" and metrics["rounds"] >= 1


def test_log_probabilities_of_drafted_tokens_are_those_of_plain_decoding(pair):
    def laws(server):
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
            answer = client.chat.completions.create(
                model="llama", messages=user("hello"), logprobs=True, top_logprobs=3
            )
        return answer.choices[0].logprobs.content, answer.model_extra["dflash"]

    with serving(pair, DecodeConfig("none", max_tokens=24), "llama") as server:
        plain, _ = laws(server)
    with serving(pair, DecodeConfig("dflash", block_size=4, max_tokens=24), "llama") as server:
        drafted, metrics = laws(server)
    assert metrics["method"] == "dflash"
    assert [law.token for law in drafted] == [law.token for law in plain]
    for one, other in zip(drafted, plain, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs[0].logprob == pytest.approx(other.top_logprobs[0].logprob, abs=1e-4)
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob, abs=1e-4)


def test_a_next_turn_and_further_answers_read_only_what_is_new(pair):
    def ask(client, messages, **more):
        return client.chat.completions.create(model="llama", messages=messages, **more)

    with (
        serving(pair, USUAL, "llama") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client,
    ):
        first = ask(client, user(QUESTIONS[1]))
        said = {"role": "assistant", "content": first.choices[0].message.content}
        second = ask(client, [*user(QUESTIONS[1]), said, *user("and?")])
        ask(client, user(QUESTIONS[4]), n=3, temperature=1.0)
        page = httpx.get(server.url + "/metrics").text
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 1
    told = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    read = sum(len(pair.tokenizer.encode(q)) for q in (QUESTIONS[1], "and?", QUESTIONS[4]))
    new = float(told["dflash_prompt_tokens_total"]) - float(told["dflash_cached_tokens_total"])
    assert new < read + 100 < float(told["dflash_prompt_tokens_total"])


TALK = {"messages": user(QUESTIONS[1]), "max_tokens": 24}
BODIES = {
    "/v1/chat/completions": TALK,
    "/v1/messages": TALK,
    "/v1/responses": {"input": QUESTIONS[1]},
    "/v1/completions": {"prompt": QUESTIONS[1]},
}
SEED = {"seed": 5}
LAW = {
    **{"presence_penalty": 1.1, "frequency_penalty": 0.4, "repeat_penalty": 1.2},
    **{"repeat_last_n": -1, "min_tokens": 20, "stop_token_ids": [40, 41], "min_p": 0.01},
    **{"top_k": 90, "logit_bias": {"40": 4.5, "50": 1.0, "60": -100}, **SEED},
}


def test_penalties_and_bias_are_the_same_in_every_api_with_drafts_and_without(pair):
    def ask(server, path, heat, more):
        body = {"model": "llama", "temperature": heat, **BODIES[path], **more}
        found = server.post(path, body).json()
        assert found.pop("dflash")["ignored"] == []
        usage = found["usage"].get("completion_tokens") or found["usage"]["output_tokens"]
        answer = found.get("choices") or found.get("content") or found["output"]
        (text,) = re.findall(r'"(?:content|text)": "((?:[^"\\]|\\.)*)"', json.dumps(answer))
        return text, usage

    asked = [
        (path, heat, more) for path in BODIES for heat in (0.0, 0.7, 1.0) for more in (LAW, SEED)
    ]
    with serving(pair, DecodeConfig("none", max_tokens=24), "llama") as server:
        plain = [ask(server, *each) for each in asked]
    with serving(pair, USUAL, "llama") as server, ThreadPoolExecutor(len(asked)) as clients:
        together = [*clients.map(lambda each: ask(server, *each), asked)]
    assert together == plain
    assert all(tokens >= 20 for _, tokens in plain[::2])
    assert all(one != other for one, other in zip(plain[::2], plain[1::2], strict=True))
    assert {text for text, _ in plain[0:12:6]} == {plain[0][0]} == {plain[12][0]}
