"""The page at `/`: its files, who gets them, and the two fields of requests that it uses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from dflash_chat.themes import THEMES
from dflash_mlx.client import token_sources
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.serve import web_page
from support.serving import CHAT, ROOT, chat_body, serving, speak

FOLDER = ROOT / "dflash_mlx/serve/page"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
CSS, SCRIPT = ((FOLDER / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
PICTURES = (FOLDER / "pictures.js").read_text("utf-8")


@pytest.fixture(scope="module")
def locked():
    with serving(speak, key=("s3cret",)) as server:
        yield server


def test_a_browser_gets_the_page_and_a_program_what_it_got_before(server):
    found = server.get("/", headers=HTML)
    assert found.text == (FOLDER / "index.html").read_text("utf-8")
    assert found.headers["content-type"].startswith("text/html")
    assert server.get("/", "HEAD", headers=HTML).content == b""
    for accept in ("*/*", "application/json", ""):
        told = server.get("/", headers={"Accept": accept})
        assert told.headers["content-type"].startswith("text/plain") and CHAT in told.text


def test_the_page_needs_no_key_and_all_that_it_asks_does(locked):
    for path in web_page.TYPES:
        assert locked.get(path).status_code == 200
    assert locked.get("/", headers=HTML).status_code == 200
    for path in ("/", "/v1/models", "/metrics", "/page/../v1/models", "/page"):
        assert locked.get(path).status_code == 401
    assert locked.chat().status_code == 401
    for path in ("/page/", "/page/x.js", "/page/page.js/", "/page/%2e%2e/app.py", "/page//etc"):
        found = locked.get(path, headers=HTML)
        assert found.status_code in (401, 404) or path == "/page/page.js/"
        assert "import" not in found.text or path == "/page/page.js/"


def test_the_page_may_load_nothing_but_its_own_files_and_no_page_may_hold_it(server):
    for path in web_page.TYPES:
        found = server.get(path)
        said = dict(each.split(maxsplit=1) for each in policy_of(found).split("; "))
        assert said.pop("img-src") == "data:"
        assert {said.pop(f"{kind}-src") for kind in ("script", "style", "connect")} == {"'self'"}
        assert {*said.values()} == {"'none'"}
        assert said.keys() == {"default-src", "base-uri", "form-action", "frame-ancestors"}
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in found.headers


def policy_of(response) -> str:
    return response.headers["content-security-policy"]


def test_the_files_have_no_address_no_script_between_tags_and_no_text_as_html():
    found: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.append((tag, dict(attrs)))
    parser.feed((FOLDER / "index.html").read_text("utf-8"))
    assert not [name for _, given in found for name in given if name.startswith("on")]
    assert all("style" not in given and tag != "style" for tag, given in found)
    asked = [given.get(name) for _, given in found for name in ("src", "href") if name in given]
    assert {*asked} == {"data:,", *web_page.TYPES} - {web_page.HOME}
    for text in (CSS, SCRIPT, PICTURES):
        assert not re.search(r"//\w+\.|https?:|url\(|@import", text)
    assert not re.search(
        r"HTML\b(?!\.)|document\.write|\beval\b|Function\(|localStorage", SCRIPT + PICTURES
    )


def test_the_package_has_the_files_and_they_are_small():
    data = (ROOT / "pyproject.toml").read_text("utf-8").partition("package-data]\ndflash_mlx")[2]
    assert '"serve/page/*"' in data.splitlines()[0]
    assert {f"/page/{file.name}" for file in FOLDER.iterdir()} == {*web_page.TYPES}
    assert len(SCRIPT.splitlines()) < 350 and len(CSS.splitlines()) < 200


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_colours_are_those_of_the_chat(look):
    theme, dark = THEMES[look], CSS.index("prefers-color-scheme: dark")
    rules = CSS[dark : CSS.index("/* What")] if look == "dark" else CSS[:dark]
    used = dict(re.findall(r"--([\w-]+): (#\w+);", rules))
    known = {**vars(theme), **theme.variables}
    assert len(used) == 14
    assert {name: colour for name, colour in used.items() if known[name].lower() != colour} == {}
    for source in token_sources():
        assert f".{source.name} {{ --colour: var(--{source.colour});" in CSS
        assert f'{source.name}: "{source.label}"' in SCRIPT


def test_neither_side_of_the_race_drafts_from_what_the_other_said():
    assert "...RACE }" in SCRIPT and 'lookup_in: "conversation"' in SCRIPT


def test_the_page_says_how_many_tokens_a_race_has_at_most():
    (most,) = re.findall(r"RACE = .*max_tokens: (\d+)", SCRIPT)
    assert (FOLDER / "index.html").read_text("utf-8").count(f"{most} tokens") == 2


def test_a_stream_tells_what_each_round_drafted_where_a_request_asks():
    told = "one two three one two three one two three"
    with serving(lambda prompt: told, DecodeConfig("ngram", max_tokens=200)) as server:
        plain = chunks(server)
        rounds = [each for chunk in chunks(server, return_drafts=True) for each in drafts(chunk)]
        alone = [chunk["dflash"] for chunk in chunks(server, method="none") if "dflash" in chunk]
        assert server.chat(method="other").status_code == 400
        assert "drafts" not in server.chat(return_drafts=True).json()["dflash"]
    assert not any(drafts(chunk) for chunk in plain) and alone[-1]["method"] == "none"
    tokens = [token for each in rounds for token in each["tokens"]]
    assert bytes(byte for _, own in tokens for byte in own).decode() == told
    assert {source for source, _ in tokens} <= {"lookup", "said", "target"}
    guessed = sum(source != "target" for source, _ in tokens)
    assert sum(each["accepted"] for each in rounds) == guessed > 0
    assert all(each["drafted"] >= each["accepted"] for each in rounds)


def chunks(server, **more) -> list[dict]:
    with server.streaming(CHAT, chat_body(**more)) as lines:
        events = [line.removeprefix("data: ") for line in lines]
    return [json.loads(each) for each in events if each != "[DONE]"]


def drafts(chunk: dict) -> list[dict]:
    return chunk.get("dflash", {}).get("drafts", [])
