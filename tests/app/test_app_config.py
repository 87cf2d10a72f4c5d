"""What the chat keeps in the user's file and takes from there; light or dark as the terminal is."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from textual.drivers import linux_driver
from textual.events import Key
from textual.widgets import Input, Static

from dflash_chat import terminal
from dflash_chat.keymap import rebind
from dflash_chat.themes import DARK, LIGHT
from dflash_mlx.client import DecodeConfig, DFlashError, SamplingConfig, UserConfig
from support.app_scripts import ScriptedBackend, in_chat

MANUAL = Path(__file__).parents[2] / "docs" / "chat.md"
QWEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("# mine\nmax_tokens = 9\n")
    return file


async def kept(chat, app):
    assert await app.keeper.finish(60)
    await chat.pause()


# What is kept


@in_chat(lambda: ScriptedBackend(loads=[None, DFlashError("no such model", "try another")]))
async def test_a_model_is_kept_when_it_was_really_opened(chat, app, file, tmp_path, monkeypatch):
    app.user = UserConfig(str(file))
    before = file.read_text()
    await chat.say("/model owner/wrong")
    await chat.until(lambda: any("no such model" in said for said in chat.notices))
    await kept(chat, app)
    assert file.read_text() == before
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    await chat.say("/model here")
    await chat.shows("Kept in")
    assert UserConfig(str(file)).values["model"] == str(tmp_path / "here"), "from any folder"
    await chat.say("/drafter owner/guesses")
    await chat.until(lambda: "guesses" in file.read_text())
    await chat.say("/model owner/name")
    await chat.until(lambda: "owner/name" in file.read_text())
    await kept(chat, app)
    assert UserConfig(str(file)).values == {"max_tokens": 9, "model": "owner/name"}
    assert file.read_text().startswith("# mine\n")


@in_chat()
async def test_of_a_model_that_is_gone_the_chat_tells_the_line_too(chat, app, backend, file):
    file.write_text('# mine\nmodel = "/gone"\n')
    app.user = UserConfig(str(file))
    gone = DFlashError("there is no folder '/gone'", "give another with --model")
    backend.loads = [gone, DFlashError("there is no folder '/other'", "give another with --model")]
    await chat.say("/model /gone")
    await chat.until(lambda: len(chat.notices) == 1)
    assert chat.notices[-1].startswith(f"line 2 of {file}: there is no folder '/gone'")
    await chat.say("/model /other")
    await chat.until(lambda: len(chat.notices) == 2)
    assert chat.notices[-1].startswith("there is no folder '/other'")


@in_chat(lambda: ScriptedBackend(waits="load"))
async def test_the_model_that_the_chat_starts_with_is_not_kept(chat, app, backend, file):
    file.write_text(before := 'model = "owner/mine"')
    app.user = UserConfig(str(file))
    backend.held.set()
    await chat.until(lambda: app.pair and not app.listener.waiting)
    await kept(chat, app)
    assert file.read_text() == before, "it may have been typed for this once"


@in_chat(size=(120, 40), decode=DecodeConfig(max_tokens=9))
async def test_the_theme_and_what_was_changed_in_settings_are_kept(chat, app, file):
    app.user = UserConfig(str(file))
    await chat.say("/theme")
    await chat.until(lambda: "light" in file.read_text())
    await chat.say("/settings")
    await chat.shows("Longest answer, from ")
    screen = app.screen  # which may be too narrow for the path
    labels = [label.content for label in screen.query(".label").results(Static)]
    assert f"Longest answer, from {file}" in labels
    assert any(said == f"Kept in {file}: theme." for said in chat.notices)
    assert screen.query_one("#set-block_size", Input).placeholder.startswith("as the draft model")
    screen.query_one("#set-temperature", Input).value = "0.7"
    screen.query_one("#set-stop", Input).value = "END"
    screen.query_one("#set-recalibrate").value = True
    await chat.press("ctrl+s")
    await chat.until(lambda: "0.7" in file.read_text())
    await kept(chat, app)
    wanted = {"max_tokens": 9, "theme": "light", "temperature": 0.7, "stop": ("END",)}
    assert UserConfig(str(file)).values == wanted, "measuring anew is for once"
    await chat.say("/temperature 0.2")
    await chat.say("/settings")
    assert "Temperature, from this chat" in chat.text
    await chat.press("escape")
    await kept(chat, app)
    assert UserConfig(str(file)).values == wanted, "a command is for this conversation"
    await chat.say("/settings")
    app.screen.query_one("#set-stop", Input).value = ""
    await chat.press("ctrl+s")
    await chat.until(lambda: UserConfig(str(file)).values["stop"] == ())


@in_chat()
async def test_the_chat_lives_on_where_nothing_can_be_kept(chat, app, file):
    app.user = UserConfig(str(file))
    file.chmod(0o400)
    before = file.read_text()
    await chat.say("/theme")
    await chat.until(lambda: any("cannot be written" in said for said in chat.notices))
    assert str(file) in chat.notices[-1] and app.theme == LIGHT.name
    await chat.answered()
    assert file.read_text() == before
    app.user = UserConfig()
    await chat.say("/theme")
    await kept(chat, app)
    assert len([said for said in chat.notices if "ept" in said]) == 0, "--config none"


# Sampling of the model's makers


@in_chat(lambda: ScriptedBackend(advised=QWEN), size=(120, 60), decode=DecodeConfig())
async def test_sampling_begins_as_the_model_s_makers_advise_and_says_so(chat, app, backend):
    await chat.answered()
    sampling = backend.requests[0].config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    await chat.say("/settings")
    assert "Temperature, from the model's generation_config.json" in chat.text
    await chat.press("escape")
    await chat.say("/temperature 0")
    backend.advised = {}
    await chat.say("/model owner/other")
    await chat.until(lambda: len(backend.loaded) == 2 and not app.listener.waiting)
    assert app.config.sampling == SamplingConfig(), "the advice was for the other model"


# Keys


@in_chat(size=(120, 40))
async def test_keys_of_the_user_s_own_take_the_place_of_the_usual_ones(chat, app):
    rebind(app, {"draft": "f5", "settings": "f8,ctrl+n"})
    await chat.press("f2")
    assert not app.draft.display
    await chat.press("f5")
    assert app.draft.display
    await chat.press("ctrl+n")
    await chat.shows("Settings")


@in_chat()
async def test_the_file_on_the_manual_s_page_is_taken(app, file):
    (text,) = re.findall(r"```toml\n(.*?)```", MANUAL.read_text(encoding="utf-8"), re.DOTALL)
    file.write_text(text)
    user = UserConfig(str(file))
    assert user.values["max_tokens"] == 2048
    rebind(app, user.values["keys"])


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("drafts", "f5", "write draft"),
        ("zzz", "f5", "write model, "),
        ("draft", "contrl+x", "draft is 'contrl+x'"),
        ("draft", "x", "draft is 'x'"),
        ("draft", "escape", "draft is 'escape'"),
        ("draft", "f3", "draft is 'f3'"),
        ("draft", "f99", "draft is 'f99'"),
        ("draft", "ctrl+c", "draft is 'ctrl+c'"),
        ("draft", "ctrl+a", "nothing else has"),
        ("draft", "", "draft is ''"),
    ],
)
def test_a_key_that_cannot_be_is_one_sentence_with_its_line(file, name, keys, said):
    @in_chat()
    async def check(app):
        file.write_text(f'# mine\n[keys]\n{name} = "{keys}"\n')
        user = UserConfig(str(file))
        with pytest.raises(DFlashError) as refused, user.telling():
            rebind(app, user.values["keys"])
        assert said in str(refused.value) and f"line 3 of {file}" in str(refused.value)

    check(tmp_path=file.parent)


# Light or dark


def listening():
    heard, asked = [], []
    parser = terminal._Listening(asked.append, heard.append, False)
    return parser, heard, asked


def typed(parser, *parts):
    events = [event for part in parts for event in parser.feed(part)]
    return "".join(e.character or "" for e in events if isinstance(e, Key))


ANSWERS = {
    "\x1b]11;rgb:ffff/ffff/ffff\x1b\\": True,
    "\x1b]11;rgb:fb/fb/f9\x07": True,
    "\x1b]11;rgba:1111/1515/1b1b/ffff\x1b\\": False,
    "\x1b]11;rgb:0/0/0\x07": False,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_background_is_heard_and_is_no_key(answer):
    parser, heard, asked = listening()
    assert asked == ["\x1b]11;?\x1b\\"]
    assert typed(parser, "ab" + answer + "cd") == "abcd" and heard == [ANSWERS[answer]]
    for cut in range(5, len(answer)):
        parser, heard, _ = listening()
        assert typed(parser, "a" + answer[:cut], answer[cut:] + "b") == "ab", cut
        assert heard == [ANSWERS[answer]]


def test_what_is_no_answer_is_typed_as_ever():
    parser, heard, _ = listening()
    assert typed(parser, "]11;rgb:ff/ff/ff", "x") == "]11;rgb:ff/ff/ffx"
    assert heard == []


class Themed(SimpleNamespace):
    """As much of an app as the terminal's background changes."""

    _driver = None

    def call_later(self, act, *arguments):
        act(*arguments)


def test_the_theme_follows_the_terminal_until_the_user_chooses(monkeypatch):
    monkeypatch.setattr(linux_driver, "XTermParser", linux_driver.XTermParser)
    for told, theme in (("0;15", LIGHT), ("15;default;0", DARK), ("", DARK), ("7", LIGHT)):
        app = Themed(theme=DARK.name)
        terminal.follow_background(app, told)
        assert app.theme == theme.name, told
    parser = linux_driver.XTermParser(False)
    typed(parser, "\x1b]11;rgb:00/00/00\x07")
    assert app.theme == DARK.name, "what the terminal says counts more"
    app.theme = LIGHT.name
    typed(parser, "\x1b]11;rgb:00/00/00\x07")
    assert app.theme == LIGHT.name
