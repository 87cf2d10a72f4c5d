"""What one key asks neither helps nor shows in answers to another, and off the disk means off."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_mlx.core.config import DecodeConfig, PrefixConfig
from dflash_mlx.core.prompt import Piece, Prompt
from dflash_mlx.drafters.continuations.store import Stores
from dflash_mlx.serve import running
from dflash_mlx.session import session
from support.models import write_endless_model
from support.serving import CHAT, CLIENT, chat_body, command_of, serving

NGRAM = DecodeConfig("ngram", budget=16, max_tokens=200)  # none that goes by the clock
SECRET = "The code of the safe in the cellar is kingfisher. " * 8
SAID = "I shall say to nobody that the code of the safe in the cellar is kingfisher."
ANNA, BERT = ({"Authorization": f"Bearer {name}"} for name in ("anna", "bert"))
FILES = "cache/dflash-chat"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("privacy") / "endless")


def speak(prompt: str) -> str:
    return SAID


def served(**config):
    return serving(speak, NGRAM, key=("anna", "bert"), **config)


def ask(server, who, text=SECRET):
    """What is told of an answer that the clock does not change, and the passes that it took."""
    server.pair.learned.clear()  # how often drafts are right, which all keys share: no text
    server.worker.ask(lambda scheduler: scheduler.drafters.clear()).result()
    before = server.pair.target.passes
    response = server.post(CHAT, chat_body(text), headers=who)
    assert response.status_code == 200, response.text
    assert server.service.earlier.finish(20) == ""
    told = response.json()
    by_clock = ("tokens_per_second", "time_to_first_token", "said_before_seconds", "parked")
    figures = {k: v for k, v in told["dflash"].items() if k not in by_clock}
    figures["said_before"] = told["dflash"]["said_before_seconds"] is not None
    return figures, told["usage"], server.pair.target.passes - before


def test_another_key_gets_the_drafts_figures_and_passes_of_a_server_that_nobody_asked():
    with served() as server:
        alone = ask(server, BERT)
    with served() as server:
        ask(server, ANNA)
        figures, usage, passes = ask(server, ANNA)
        assert figures["said_before"] and usage["prompt_tokens_details"]["cached_tokens"] > 300
        assert passes < alone[2], "her own are of help"
        assert ask(server, BERT) == alone
        assert ask(server, BERT)[0]["said_before"], "as his own are to him"


def test_prompts_that_are_read_at_the_same_time_are_shared_within_a_key_alone():
    def cached(who):
        with served() as server:
            server.pair.target.gate.clear()
            body = chat_body(SECRET, stream=True)
            with CLIENT.stream("POST", server.url + CHAT, json=body, headers=ANNA):
                server.pair.target.gate.set()
                return ask(server, who)[1]["prompt_tokens_details"]["cached_tokens"]

    assert cached(ANNA) > 300
    assert cached(BERT) == 0


def test_a_server_without_keys_drafts_from_what_it_heard_itself_and_not_from_the_chat():
    with serving(speak, NGRAM) as server:
        chat = server.service.earlier.of(server.pair.target.name, server.pair.tokenizer)
        chat.add(server.pair.tokenizer.encode(f"[user]{SECRET}[assistant]{SAID}"))
        chat.wait()
        assert not ask(server, {})[0]["said_before"]
        assert ask(server, {})[0]["said_before"]


def test_prompts_of_two_salts_share_nothing_and_read_the_same():
    text, image = Prompt((5, 6, 7)), Prompt((5, 6, 7), (Piece(0, 2, "picture"),))
    for prompt in (text, image):
        anna, bert = prompt.salted("anna"), prompt.salted("bert")
        assert len({prompt.keys[0], anna.keys[0], bert.keys[0]}) == 3
        assert [*anna.keys[1:]] == [*bert.keys[1:]] == [*prompt.keys[1:]]
        assert anna.salted("") == anna and anna.tokens == prompt.tokens
        assert all(anna.key_at(place) == key for place, key in enumerate(anna.keys))


def usage_of(url: str, who: dict[str, str]) -> tuple[int, bool]:
    """Tokens of the prompt that were read before, and whether an earlier answer helped."""
    body = chat_body(SECRET, model="endless", max_tokens=40, temperature=0)
    told = CLIENT.post(url + CHAT, json=body, headers=who).json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, told["dflash"]["said_before_seconds"] is not None


def test_on_the_disk_keys_are_apart_too(model, tmp_path):
    keys = ("--method", "ngram", "--remember", "--key", "anna", "--key", "bert")
    with command_of(model, tmp_path, *keys) as (server, url):
        assert usage_of(url, ANNA) == (0, False)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    assert [*(tmp_path / FILES).glob("lookup/*.texts")], "the last answer is written as it ends"
    for file in (tmp_path / FILES).glob("*/*"):
        assert file.stat().st_mode & 0o077 == 0, file
    with command_of(model, tmp_path, *keys) as (_, url):
        assert usage_of(url, BERT) == (0, False)
        cached, said = usage_of(url, ANNA)
        assert cached > 300 and said


def test_without_remember_nothing_of_a_request_is_written(model, tmp_path):
    asked, begin = {"model": "endless", "input": SECRET, "max_output_tokens": 20}, time.time()
    with command_of(model, tmp_path, "--method", "ngram", "--prefix-gb", "0.000001") as run:
        server, url = run
        usage_of(url, {})
        assert usage_of(url, {})[1], "in memory it helps"
        CLIENT.post(url + "/v1/responses", json=asked)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr.read() == ""
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert not [each for each in files if {"lookup", "prefixes"} & {*each.parts}], files
    files += [each for each in Path(tempfile.gettempdir()).glob("dflash-chat-*")]
    for each in (each for each in files if each.stat().st_mtime >= begin):
        assert b"kingfisher" not in each.read_bytes(), each


def test_where_drafts_look_in_the_conversation_alone_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(session.platformdirs, "user_cache_path", lambda name: tmp_path)
    none = session.earlier_texts(PrefixConfig(lookup_in="conversation"))
    with served() as server:
        server.service.earlier = none
        body = chat_body(SECRET)
        for _ in range(2):
            told = server.post(CHAT, body, headers=ANNA).json()["dflash"]
        assert told["said_before_seconds"] is None and "said" not in told["accepted_from"]
    assert not [*tmp_path.iterdir()]


def test_a_request_can_be_kept_out_of_what_later_drafts_come_from_and_those_out_of_it():
    apart = {"lookup_in": "conversation"}
    with served() as server:

        def helped(**more) -> bool:
            told = server.post(CHAT, chat_body(SECRET, **more), headers=ANNA).json()["dflash"]
            assert server.service.earlier.finish(20) == "" and "lookup_in" not in told["ignored"]
            return told["said_before_seconds"] is not None

        assert not helped(**apart) and not helped(), "the first was not kept"
        assert helped() and not helped(**apart), (
            "a race with what was just said would prove nothing"
        )
        assert (
            server.post(CHAT, chat_body(SECRET, lookup_in="all"), headers=ANNA).status_code == 400
        )


def test_all_keys_together_have_the_memory_of_one(monkeypatch, tmp_path):
    monkeypatch.setattr(session.platformdirs, "user_cache_path", lambda name: tmp_path)
    made: list[int] = []
    monkeypatch.setattr(session, "Stores", lambda folder, limit: made.append(limit))
    for users in (0, 1, 4):
        session.earlier_texts(PrefixConfig(lookup_mb=8), users=users)
    assert made == [8_000_000, 8_000_000, 2_000_000]


def test_what_is_told_of_a_fault_names_nothing_that_was_asked(monkeypatch, tmp_path, capsys):
    def broken(prompt: str) -> str:
        raise RuntimeError("the model is broken")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with serving(broken, NGRAM, faults=True) as server:
        server.queue.fault = running.Faults()
        response = server.chat(SECRET)
        assert response.status_code == 500
    (log,) = tmp_path.iterdir()
    for told in (log.read_text(), capsys.readouterr().err, response.text):
        assert "the model is broken" in told and "kingfisher" not in told
    assert log.stat().st_mode & 0o077 == 0


def test_what_cannot_be_written_is_told_without_the_text(tmp_path):
    (tmp_path / "lookup").write_text("a file in the folder's place")
    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=lambda ids: [str(each) for each in ids], __len__=lambda self: 9
    )
    stores = Stores(tmp_path / "lookup")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_mlx.drafters.continuations.store.owner_of", lambda *_: "owner")
        store = stores.of("model", tokenizer)
    store.add([4242, 4243, 4244] * 20)
    told = stores.finish(20)
    assert "what was said cannot be kept" in told and "4242" not in told
