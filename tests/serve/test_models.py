"""Several models in one server: asked for by name, loaded, and unloaded for one another."""

from __future__ import annotations

import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import httpx2 as httpx
import pytest

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.load import load_pair
from dflash_mlx.serve import command
from dflash_mlx.session.models import Model
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import generate
from support.families import make_model
from support.models import write_endless_model, write_model
from support.serving import (
    CHAT,
    CLIENT,
    MODEL,
    actor_pair,
    chat_body,
    command_of,
    said,
    serving,
    user,
)

FURTHER = ("second", "third")
MESSAGES = [user(text) for text in ("hello", "Name three rivers.", "why " * 40)]


def saying(name: str):
    return actor_pair(lambda prompt: f"{name} answers {prompt.rpartition('[user]')[2]}")


def loading(name: str, load=None) -> Model:
    """A further model, that counts how often it is loaded."""

    def counted():
        model.loads += 1
        return load() if load else saying(name)

    model = Model((name,), counted)
    model.loads = 0
    return model


def states(server) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.get("/v1/models").json()["data"]}


def test_every_model_answers_by_its_name_and_is_loaded_when_it_is_asked_for():
    further = [loading(name) for name in FURTHER]
    with serving(saying(MODEL), further=further, name=("alias",)) as server:
        first = dict.fromkeys((MODEL, "alias"), "loaded")
        assert states(server) == {**first, **dict.fromkeys(FURTHER, "not-loaded")}
        assert said(server.chat(model="second")) == "second answers hello"
        assert said(server.chat(model="alias")) == f"{MODEL} answers hello"
        assert states(server) == {**first, "second": "loaded", "third": "not-loaded"}
        told = server.get("/metrics").text
        assert 'dflash_loaded{model="second"} 1.0' in told
        assert 'dflash_loaded{model="third"} 0.0' in told
        other = server.chat(model="/etc/passwd")
        assert said(other) == f"{MODEL} answers hello" and other.json()["model"] == MODEL
        assert [each.loads for each in further] == [1, 0]
        here = [each["name"] for each in server.get("/api/ps").json()["models"]]
        assert here == [MODEL, "alias", "second"]
        assert len(server.get("/api/tags").json()["models"]) == 4
        assert said(server.chat(model="second:latest")) == "second answers hello"
    with serving(saying(MODEL), further=[loading("second")], strict=True) as server:
        assert server.chat(model="third").status_code == 404
        assert said(server.chat(model="second")) == "second answers hello"


def test_a_model_takes_the_place_of_an_idle_one_and_waits_for_one_that_answers():
    first, second = saying(MODEL), loading("second")
    with serving(first, further=[second], most_loaded=1) as server:
        first.target.gate.clear()
        with ThreadPoolExecutor(4) as clients:
            running = clients.submit(server.chat)
            server.until(lambda: server.queue.answers(first))
            waiting = clients.submit(server.chat, model="second")
            server.until(lambda: server.models._waits)
            asked, take = [], server.models.take
            server.models.take = lambda name: asked.append(name) or take(name)
            later = clients.submit(server.chat, "again")
            server.until(lambda: asked)
            assert second.loads == 0 and not running.done()
            first.target.gate.set()
            assert said(running.result(20)) == f"{MODEL} answers hello"
            assert said(waiting.result(20)) == "second answers hello"
            assert said(later.result(20)) == f"{MODEL} answers again", "it is loaded again"
        assert states(server) == {MODEL: "loaded", "second": "not-loaded"}


def test_a_model_that_cannot_be_loaded_is_the_error_of_its_request_alone():
    found = [DFlashError("/secret/folder is damaged", "choose another"), ZeroDivisionError("oh")]

    def failing():
        if found:
            raise found.pop(0)
        return saying("second")

    further = [loading("second", failing)]
    with serving(saying(MODEL), further=further, faults=True) as server:
        refused = server.chat(model="second")
        assert refused.status_code == 503 and "secret" not in refused.text
        assert "'second'" in refused.json()["error"]["message"]
        failed = server.message(model="second")
        assert (failed.status_code, failed.json()["type"]) == (500, "error")
        assert said(server.chat()) == f"{MODEL} answers hello"
        assert said(server.chat(model="second")) == "second answers hello"


def test_who_leaves_while_a_model_is_loaded_takes_nothing_from_others():
    may_load = threading.Event()
    further = [loading("second", lambda: may_load.wait(20) and saying("second"))]
    with serving(saying(MODEL), further=further) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.post(CHAT, chat_body(model="second"), timeout=0.3)
        assert said(server.chat()) == f"{MODEL} answers hello", "while the other is loaded"
        may_load.set()
        server.until(lambda: further[0].pair is not None)
        assert said(server.chat(model="second")) == "second answers hello"
        assert further[0].loads == 1 and further[0].users == 0


def test_what_is_unloaded_leaves_the_memory(folders):
    targets = []

    def load():
        pair = load_pair(PairConfig(str(folders / "second")))
        targets.append(weakref.ref(pair.target))
        return pair

    further = [loading("second", load)]
    with serving(saying(MODEL), further=further, most_loaded=1) as server:
        for _ in range(3):
            for name in ("second", MODEL):
                assert server.chat(model=name, max_tokens=8).status_code == 200
        assert [each() for each in targets] == [None] * 3


def test_what_nobody_asks_for_in_a_while_is_unloaded():
    with serving(saying(MODEL), idle_unload=0.001) as server:
        server.until(lambda: server.models._all[0].pair is None)
        assert said(server.chat()) == f"{MODEL} answers hello"


def test_what_fails_while_a_model_is_unloaded_is_told_and_later_ones_are_unloaded(monkeypatch):
    forget, failed = Scheduler.forget, []

    def failing(scheduler, target):
        if not failed:
            failed.append(target)
            raise ZeroDivisionError("oh")
        return forget(scheduler, target)

    monkeypatch.setattr(Scheduler, "forget", failing)
    with serving(saying(MODEL), idle_unload=0.001, faults=True) as server:
        server.until(lambda: server.faults)
        assert said(server.chat()) == f"{MODEL} answers hello"
        server.until(lambda: server.models._all[0].pair is None)
        assert [type(each) for each in server.faults] == [ZeroDivisionError]


def test_a_request_of_ollama_s_without_words_loads_the_model():
    with serving(saying(MODEL), further=[loading("second"), loading("third")]) as server:
        for path, name in (("/api/chat", "second"), ("/api/generate", "third")):
            assert server.post(path, {"model": name}).json()["done_reason"] == "load"
            assert states(server)[name] == "loaded"


def test_a_load_that_hangs_keeps_nobody_else_from_an_answer(monkeypatch):
    monkeypatch.setattr("dflash_mlx.session.models.PATIENCE", 1.0)
    goes_on = threading.Event()
    hanging = loading("second", lambda: goes_on.wait(30) and saying("second"))
    further = [hanging, loading("third")]
    with serving(saying(MODEL), further=further, parallel=1, queue=1) as server:
        with ThreadPoolExecutor(4) as clients:
            refused = [clients.submit(server.chat, model="second") for _ in range(4)]
            server.until(lambda: hanging.users == 4)
            assert said(server.chat()) == f"{MODEL} answers hello", "they take no places"
            assert [each.result(20).status_code for each in refused] == [503] * 4
        assert server.chat(model="second").status_code == 503
        assert said(server.chat(model="third")) == "third answers hello"
        goes_on.set()
        server.until(lambda: hanging.pair is not None)
        assert said(server.chat(model="second")) == "second answers hello"
        assert hanging.loads == 1 and hanging.users == 0


def test_a_load_that_is_late_takes_the_place_of_others_when_it_is_there(monkeypatch):
    monkeypatch.setattr("dflash_mlx.session.models.PATIENCE", 0.1)
    goes_on = threading.Event()
    hanging = loading("second", lambda: goes_on.wait(30) and saying("second"))
    with serving(saying(MODEL), further=[hanging, loading("third")], most_loaded=1) as server:
        assert server.chat(model="second").status_code == 503
        assert said(server.chat(model="third")) == "third answers hello"
        goes_on.set()
        server.until(lambda: hanging.pair is not None)
        assert states(server)["third"] == "not-loaded"
        assert said(server.chat(model="second")) == "second answers hello"


def test_room_is_kept_for_a_load_that_is_late(monkeypatch):
    monkeypatch.setattr("dflash_mlx.session.models.PATIENCE", 0.1)
    monkeypatch.setattr("dflash_mlx.session.models.free_memory", lambda: 10**9)
    goes_on = threading.Event()
    hanging = replace(loading("second", lambda: goes_on.wait(30) and saying("second")), needs=10**9)
    with serving(saying(MODEL), further=[hanging, replace(loading("third"), needs=10)]) as server:
        assert server.chat(model="second").status_code == 503
        assert states(server)[MODEL] == "loaded"
        assert said(server.chat(model="third")) == "third answers hello"
        assert states(server)[MODEL] == "not-loaded"
        goes_on.set()
        server.until(lambda: hanging.pair is not None)


@pytest.mark.parametrize(("needs", "state"), [(5 * 10**9, "loaded"), (2 * 10**9, "not-loaded")])
def test_a_model_for_which_there_is_no_room_even_alone_is_refused(needs, state, monkeypatch):
    monkeypatch.setattr("dflash_mlx.session.models.free_memory", lambda: 10**9)
    monkeypatch.setattr("mlx.core.get_active_memory", lambda: 2 * 10**9)
    further = [replace(loading("second"), needs=needs), loading("third")]
    with serving(saying(MODEL), further=further) as server:
        assert server.chat(model="second").status_code == 503
        assert states(server)[MODEL] == state, "nothing is unloaded in vain"
        assert said(server.chat(model="third")) == "third answers hello"


def test_where_memory_is_short_idle_models_go_first_and_then_what_caches_may_take(monkeypatch):
    monkeypatch.setattr("dflash_mlx.session.models._LOOK", 0.05)
    short: list[bool] = []
    monkeypatch.setattr("dflash_mlx.session.models.is_short", lambda: bool(short))
    first, further = saying(MODEL), [loading(name) for name in FURTHER]
    with serving(first, further=further) as server:
        for name in (*FURTHER, MODEL):
            assert said(server.chat(model=name)) == f"{name} answers hello"
        memory = server.worker._scheduler.memory
        memory.limit = 1
        short.append(True)
        server.until(lambda: memory.limit != 1 and not any(each.pair for each in further))
        assert states(server) == {MODEL: "loaded", **dict.fromkeys(FURTHER, "not-loaded")}
        memory.limit = 1
        server.until(lambda: memory.limit != 1)
        assert states(server)[MODEL] == "loaded", "the last one stays"


def test_kept_prefixes_go_though_nothing_is_asked_and_earlier_texts_behind_them(
    folders, monkeypatch
):
    monkeypatch.setattr("dflash_mlx.session.models._LOOK", 0.05)
    short, left = [], []
    monkeypatch.setattr("dflash_mlx.session.models.is_short", lambda: bool(short))
    with serving(load_pair(PairConfig(str(folders / MODEL)))) as server:
        prefixes = server.worker._scheduler.prefixes
        server.models.spare = lambda: left.append(prefixes.nbytes)
        assert server.chat(max_tokens=4).status_code == 200
        server.until(lambda: prefixes.nbytes > 0)
        server.models._memory = lambda held: 0
        short.append(True)
        server.until(lambda: left)
        assert left[0] == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    for seed, name in enumerate((MODEL, *FURTHER)):
        write_model(place / name, make_model("llama", seed))
    return place


@pytest.mark.parametrize("most", [None, 1])
def test_answers_are_those_of_each_model_alone_while_all_stream(folders, most):
    config = DecodeConfig("ngram", max_tokens=40)
    load = {each: partial(load_pair, PairConfig(str(folders / each))) for each in (MODEL, *FURTHER)}
    alone = {}
    for name in load:
        pair = load[name]()
        alone |= {(name, i): generate(pair, m, config).text for i, m in enumerate(MESSAGES)}
    assert len({*alone.values()}) == len(alone), "else a mix-up would not show"
    further = [loading(name, load[name]) for name in FURTHER]
    asked = [*alone] * 3
    with serving(load[MODEL](), usual=config, further=further, most_loaded=most) as server:
        server.models._all[0].load = load[MODEL]

        def ask(which):
            name, i = which
            return said(server.post(CHAT, {"model": name, "messages": MESSAGES[i]}))

        with ThreadPoolExecutor(9) as clients:
            found = [*clients.map(ask, asked)]
        assert found == [alone[each] for each in asked]
    assert all((each.loads > 1) if most else (each.loads == 1) for each in further)


NEVER_LOADED = """import runpy, sys, threading
from dflash_mlx.serve import command

load, loaded = command.cli.open_pair, []

def once(*how, **more):
    if loaded:
        print("loading", file=sys.stderr, flush=True)
        threading.Event().wait()
    loaded.append(load(*how, **more))
    return loaded[0]

command.cli.open_pair = once
runpy.run_module("dflash_mlx.serve", run_name="__main__")
"""


def test_a_signal_in_the_middle_of_a_load_ends_the_server_and_writes_prefixes(folders, tmp_path):
    argv, run = ("--remember", "--models-dir", str(folders)), ("-c", NEVER_LOADED)
    argv += ("--max-tokens", "4")
    with (
        command_of(write_endless_model(tmp_path / "endless"), tmp_path, *argv, run=run) as served,
        ThreadPoolExecutor(1) as clients,
    ):
        running, url = served
        listed = CLIENT.get(url + "/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["endless", *sorted((MODEL, *FURTHER))]
        assert (
            CLIENT.post(url + CHAT, json=chat_body("a" * 900, model="endless")).status_code == 200
        )
        found = clients.submit(CLIENT.post, url + CHAT, json=chat_body(model="second"))
        assert running.stderr.readline() == "loading\n"
        running.send_signal(signal.SIGTERM)
        assert found.result(20).status_code == 503
        assert running.wait(20) == 0
    assert [*(tmp_path / "cache").glob("dflash-chat/prefixes/*")]


def test_folders_that_cannot_be_told_apart_or_hold_no_model_are_refused(folders, tmp_path):
    def refused(*argv: object) -> str:
        with pytest.raises(DFlashError) as found:
            command.main(["--port", "0", *map(str, argv)])
        return found.value.setting

    assert refused("--models-dir", tmp_path) == "models_dir"
    assert (
        refused("--model", folders / MODEL, "--name", "second", "--models-dir", folders) == "model"
    )
    assert refused("--model", folders / MODEL, "--most-loaded", 0) == "most_loaded"
