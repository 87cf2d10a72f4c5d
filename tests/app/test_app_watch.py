"""The view of a server: figures read from its page, shown, and the server's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from textual.widgets import Static

from dflash_chat.watch import Look, Served, WatchApp, reachable, read_metrics, rows
from support.app_scripts import until

PAGE = """# HELP dflash_tokens_total Tokens of answers
# TYPE dflash_tokens_total counter
dflash_tokens_total 30.0
dflash_answers_total{ended="stop"} 2.0
dflash_answers_total{ended="length"} 1.0
dflash_rounds_total 10.0
dflash_drafted_total 40.0
dflash_accepted_total 17.0
dflash_prompt_tokens_total 8.0
dflash_cached_tokens_total 2.0
dflash_decoding 1.0
dflash_waiting 0.0
dflash_memory_bytes 3e+06
dflash_cache_bytes 1e+06
dflash_first_token_seconds_count 3.0
dflash_first_token_seconds_sum 1.5
"""


def test_a_page_is_read_and_its_figures_are_sums_shares_and_rates():
    found = read_metrics(PAGE)
    assert found["dflash_answers_total"] == 3 and found["dflash_memory_bytes"] == 3e6
    before, now = Look(1.0, {"dflash_tokens_total": 10.0}), Look(3.0, read_metrics(PAGE))
    assert now.rate("tokens_total", before) == 10.0
    assert before.rate("tokens_total", now) == 0.0
    assert before.share("accepted_total", "drafted_total") is None
    shown = dict(row.split(maxsplit=1) for row in rows(now) if not row.startswith("in the"))
    assert shown["drafts"].startswith("2.70 ") and shown["memory"].startswith("3.0 MB")
    assert any("42%" in row for row in rows(now)) and any("0.50 s" in row for row in rows(now))
    assert len(rows(before)) == 3


def test_an_address_for_all_machines_is_asked_on_this_one():
    assert reachable("http://0.0.0.0:80") == "http://127.0.0.1:80"
    assert reachable("http://[::]:80") == "http://[::1]:80"


class Ended(Served):
    """A server that says where it is and ends when it is told to."""

    def __init__(self, page: str) -> None:
        self._page = page
        super().__init__([], None)

    def look(self) -> Look | None:
        self.looks = getattr(self, "looks", 0) + 1
        return Look(float(self.looks), read_metrics(self._page)) if self.address else None


@pytest.fixture
def served(monkeypatch):
    say = "import sys, time; print('x: m at http://127.0.0.1:8, \\x1b[2J', file=sys.stderr, "
    say += "flush=True); time.sleep(60)"
    real = subprocess.Popen

    def instead(words, **more):
        return real([sys.executable, "-c", say], **more)

    monkeypatch.setattr("dflash_chat.watch.subprocess.Popen", instead)
    server = Ended(PAGE)
    yield server
    server.process.kill()
    server.process.wait()


def test_the_view_shows_a_server_and_ends_it(served, monkeypatch):
    monkeypatch.setattr("dflash_chat.watch._PAUSE", 0.01)

    async def look_and_leave():
        app = WatchApp(served)
        async with app.run_test() as pilot:
            await until(lambda: "tokens per round" in shown(app, "#figures"), pilot)
            assert "http://127.0.0.1:8" in shown(app, "#name")
            await pilot.press("ctrl+q")
            await until(lambda: served.process.poll() is not None, pilot)

    asyncio.run(look_and_leave())
    assert served.process.returncode == -15


def shown(app, name: str) -> str:
    return str(app.query_one(name, Static).content)
