"""Completions as evaluations ask for them: prompts echoed with log-probabilities, lists of ids."""

from __future__ import annotations

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.engine.delta import TokenLogprobs, token_bytes
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.openai_replies import ChatWriter, TextWriter
from dflash_mlx.serve.openai_requests import ChatRequest, CompletionRequest
from dflash_mlx.serve.request_queue import Reply
from dflash_mlx.session.reading import WORDS, Part
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.models import write_tokenizer
from support.serving import CHAT, MESSAGES, TEXTS, chat_body, message_body, serving, user

PROMPTS = ["Once upon a time there was a long, long answer.", "a b c d", "hello <|im_end|> you"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completions")
    write_tokenizer(folder)
    target = Target(make_model("llama"), 256, "llama")
    model = drafter_folder(folder / "drafter", [0, 1, 2], 1, target)
    return Pair(target, load_tokenizer(folder), (model,), "tiny")


@pytest.fixture(scope="module", params=["none", "dflash"])
def server(pair, request):
    with serving(pair, DecodeConfig(request.param, max_tokens=9), "llama") as server:
        yield server


def close(values):
    return pytest.approx(values, abs=1e-3)


def ask(server, prompt, **more):
    found = server.post(TEXTS, {"model": "llama", "prompt": prompt, **more})
    assert found.status_code == 200, found.text
    return found.json()


def expected(pair, tokens):
    """Log-probabilities [T, V] after each token."""
    logits, _ = pair.target.forward(mx.array(tokens), pair.target.new_cache(), Block(len(tokens)))
    return np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(mx.float32))


def test_an_echoed_prompt_has_the_log_probabilities_of_one_pass(pair, server):
    ids = [pair.tokenizer.encode(prompt) for prompt in PROMPTS]
    for _ in range(2):  # the second time caches have all of it
        answer = ask(server, ids, echo=True, logprobs=2, max_tokens=1)
        for choice, prompt, tokens in zip(answer["choices"], PROMPTS, ids, strict=True):
            told = choice["logprobs"]
            assert choice["text"].startswith(prompt)
            assert "".join(told["tokens"][: len(tokens)]) == prompt
            assert len(told["tokens"]) == len(tokens) + 1, "the stop token, too, if it is one"
            assert told["token_logprobs"][0] is None is told["top_logprobs"][0]
            for i, row in enumerate(expected(pair, tokens)[:-1], start=1):
                own, tops = told["token_logprobs"][i], told["top_logprobs"][i]
                assert own == close(row[tokens[i]])
                assert max(tops.values()) == close(row.max())
                assert tops[told["tokens"][i]] == own and 2 <= len(tops) <= 3
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = ask(server, ids, echo=True, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "where none are asked for"
    assert all(choice["logprobs"] is None for choice in again["choices"])


def test_a_text_and_its_ids_are_one_prompt_streamed_or_whole(pair, server):
    settings = {"echo": True, "logprobs": 0, "n": 2, "max_tokens": 6}
    whole = ask(server, PROMPTS[0], **settings)["choices"]
    others = ask(server, pair.tokenizer.encode(PROMPTS[0]), **settings)["choices"]
    for each, other in zip(whole, others, strict=True):
        told = each["logprobs"]
        assert each["text"] == other["text"]
        assert told["token_logprobs"][1:] == close(other["logprobs"]["token_logprobs"][1:])
        assert told["top_logprobs"] is None
        assert told["text_offset"][-6:] == [*range(len(PROMPTS[0]), len(PROMPTS[0]) + 6)]
        assert len(told["token_logprobs"]) == len(PROMPTS[0]) + 6
    body = {"model": "llama", "prompt": PROMPTS[0], **settings}
    with server.streaming(TEXTS, body) as lines:
        events = [json.loads(line[6:]) for line in lines if line[6:].startswith("{")]
    for each in whole:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == each["index"]]
        assert "".join(choice["text"] for choice in own) == each["text"]
        told = [choice["logprobs"] for choice in own if choice["logprobs"]]
        joined = {name: sum((part[name] for part in told), []) for name in told[0] if told[0][name]}
        assert joined["tokens"] == each["logprobs"]["tokens"]
        assert joined["text_offset"] == each["logprobs"]["text_offset"]
        assert joined["token_logprobs"][1:] == close(each["logprobs"]["token_logprobs"][1:])


def test_no_tokens_are_made_where_none_are_wanted(server):
    settings = {"echo": True, "logprobs": 1, "max_tokens": 0}
    answer = ask(server, PROMPTS, **settings)
    assert [choice["text"] for choice in answer["choices"]] == PROMPTS
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    ids = server.pair.tokenizer.encode(PROMPTS[0])
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert answer["usage"]["completion_tokens"] == 0 == answer["dflash"]["tokens_per_second"]
    assert ask(server, "a", max_tokens=0)["choices"][0]["text"] == ""
    body = {"model": "llama", "prompt": PROMPTS[1], **settings}
    with server.streaming(TEXTS, body) as lines:
        events = [json.loads(line[6:]) for line in lines if line[6:].startswith("{")]
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPTS[1]
    found = server.post(MESSAGES, message_body("hello", max_tokens=0)).json()
    assert (found["content"], found["stop_reason"]) == ([], "max_tokens"), "as Anthropic has it"
    refused = server.post(CHAT, chat_body("hello", max_tokens=0)).json()["error"]
    assert refused["param"] == "max_tokens", "as OpenAI has it"


def test_the_best_answers_are_those_with_the_highest_mean_log_probability(server):
    drawn = {"temperature": 1.5, "seed": 3, "max_tokens": 8}
    every = ask(server, PROMPTS[:2], n=4, logprobs=0, **drawn)["choices"]
    best = ask(server, PROMPTS[:2], n=2, best_of=4, **drawn)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == sum(len(e["logprobs"]["tokens"]) for e in every)
    for i in range(2):
        own = every[4 * i : 4 * i + 4]
        own.sort(key=lambda each: -np.mean(each["logprobs"]["token_logprobs"]))
        told = best["choices"][2 * i : 2 * i + 2]
        assert [each["text"] for each in told] == [each["text"] for each in own[:2]]
        assert all(each["logprobs"] is None for each in told)
    echoed = ask(server, PROMPTS[0], best_of=4, echo=True, logprobs=0, **drawn)["choices"]
    assert [each["text"] for each in echoed] == [PROMPTS[0] + best["choices"][0]["text"]]


def test_what_a_prompt_begins_with_beside_its_text_counts_in_no_offset_and_it_in_no_mean():
    beginning = TokenLogprobs(2, None, ())
    replies = [reply_to((2, 3), index=i, echo="a", reason="stop") for i in range(2)]
    for reply, own in zip(replies, ([-1.2], [-1.0, -1.0]), strict=True):
        reply.statistics.generated_tokens = len(own)
        prompt = [beginning, TokenLogprobs(3, -0.1, ())]
        reply.logprobs = [*prompt, *(TokenLogprobs(3, each, ()) for each in own)]
        reply.parts = [Part(WORDS, "a"), Part(WORDS, "a" * len(own))]
    body = CompletionRequest(model="m", prompt=[2, 3], logprobs=0, echo=True, best_of=2)
    (choice,) = TextWriter(body, replies).whole()["choices"]
    assert choice["logprobs"]["tokens"] == [" a", "a", "a", "a"], "the first is no part of the text"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.1, -1.0, -1.0]


# Tokens that are parts of characters


def written(pieces, decoder) -> PreTrainedTokenizerFast:
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTE_LEVEL = written(["Ã", "©", "Ġa", "a", "ï¿½", "Ġ"], decoders.ByteLevel())
SENTENCES = written(
    ["<0xC3>", "<0xA9>", "▁a", "a", "é"],
    decoders.Sequence([
        *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
        decoders.Strip(" ", 1, 0),
    ]),
)  # fmt: skip


def reply_to(prompt, **more) -> Reply:
    return Reply(prompt, DecodeConfig(), SimpleNamespace(tokenizer=SENTENCES), **more)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCES])
def test_the_bytes_of_tokens_make_their_text(tokenizer):
    found = [token_bytes(tokenizer, token) for token in range(4)]
    assert found == [b"\xc3", b"\xa9", b" a", b"a"]
    last = {BYTE_LEVEL: ["\ufffd", " "], SENTENCES: ["é"]}[tokenizer]
    assert [token_bytes(tokenizer, 4 + i).decode() for i in range(len(last))] == last


def test_parts_of_characters_are_told_by_their_bytes():
    told = [TokenLogprobs(i, -1.0 - i, ((i, -1.0 - i), (1 - i, -2.5))) for i in range(2)]
    told.append(TokenLogprobs(3, -0.5, ()))
    reply = reply_to(())
    body = ChatRequest(model="m", messages=user("a"), logprobs=True, top_logprobs=2)
    chat = ChatWriter(body, [reply]).logprobs(reply, told)["content"]
    assert [each["bytes"] for each in chat] == [[0xC3], [0xA9], [ord("a")]]
    assert chat[0]["top_logprobs"][1]["bytes"] == [0xA9]
    body = CompletionRequest(model="m", prompt="a", logprobs=2)
    found = TextWriter(body, [reply]).logprobs(reply, told)
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
    assert found["text_offset"] == [0, 1, 1]
    assert found["top_logprobs"][0] == {"bytes:\\xc3": -1.0, "bytes:\\xa9": -2.5}
    assert found["top_logprobs"][2] == {"a": -0.5}


@pytest.mark.parametrize("prompt", [[-1] * 2**16, ["a", *[1] * 2**16], [[-1] * 2**12] * 17])
def test_a_list_of_wrong_values_has_few_problems_however_long_it_is(prompt):
    """Each problem took time in which all others waited."""
    with pytest.raises(ValidationError) as found:
        CompletionRequest.model_validate({"model": "m", "prompt": prompt})
    assert found.value.error_count() < 64
