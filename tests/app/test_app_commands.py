"""Slash commands and `@file`: completing a name, copying an answer, sending a file along."""

import os
import threading

import pytest

from dflash_chat.commands import COMMANDS
from dflash_chat.completions import complete
from dflash_chat.conversation import code_blocks
from dflash_chat.mentions import attached, mentions
from dflash_mlx import DFlashError, PairConfig
from dflash_mlx.client import AvailableModel
from support.app_scripts import ANSWER, ScriptedBackend, in_chat


@in_chat(lambda: ScriptedBackend(["<think>hm</think>" + ANSWER + "\n\n~~~\nmore\n~~~\n"]))
async def test_an_answer_or_one_of_its_code_blocks_is_copied(chat, app, backend):
    await chat.say("/copy")
    assert "ask something first" in chat.notices[-1]
    await chat.answered()
    await chat.say("/copy")
    assert app.clipboard == ANSWER + "\n\n~~~\nmore\n~~~"
    await chat.say("/copy 1")
    assert app.clipboard == 'def rivers() -> list[str]:\n    return ["Rhine", "Main"]\n'
    await chat.say("/copy 2")
    assert app.clipboard == "more\n"
    for wrong in ("3", "0", "x", "9" * 5000):
        await chat.say(f"/copy {wrong}")
        assert "has 2 code blocks" in chat.notices[-1]
    assert app.clipboard == "more\n"
    await chat.say("/copy 1")
    await chat.press("ctrl+o")
    assert app.clipboard == "more\n", "its key copies the last one"
    assert "copy code" in chat.text
    backend.answers = ["a\x1b[201~b\ud800"]
    await chat.answered()
    await chat.say("/copy")
    await chat.until(lambda: "copy code" not in chat.text)
    assert app.clipboard == "a[201~b?", "it commands no terminal that it is pasted into"


def test_code_blocks_are_found_wherever_markdown_has_them():
    text = "1. a\n   ```py\n   x\n   ```\n\n````\n```\nin\n```\n````\n\n    indented\n\n```\nopen\n"
    assert code_blocks(text) == ["x\n", "```\nin\n```\n", "indented\n", "open\n"]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("/", [command.name for command in COMMANDS]),
        ("/MOD", ["model"]),
        ("/me", ["method"]),
        ("/re", ["retry", "rename"]),
        ("/draft", ["draft", "drafter"]),
        *[(typed, []) for typed in ("", "m", "/x", "/usr/bin", "//", "/re x")],
    ],
)
def test_a_beginning_is_completed_to_the_commands_that_have_it(typed, names):
    word, found = complete(typed)
    assert [text.strip("/ ") for text, _ in found] == names
    assert all(meaning for _, meaning in found) and word in (typed, "x", "")


@in_chat()
async def test_commands_are_offered_with_what_they_do_and_tab_or_enter_takes_one(chat, app):
    prompt = app.prompt
    await chat.press("/", "r", "e")
    assert "/retry" in chat.text and "title: name this conversation" in chat.text
    await chat.press("down", "tab")
    assert prompt.text == "/rename ", "and goes on to what it needs"
    assert prompt.has_focus and not prompt.offering
    prompt.text, before = "", app.theme
    await chat.press(*"/the", "enter")
    await chat.until(lambda: app.theme != before)
    assert prompt.text == "", "Enter takes half a name for the command that is chosen, and runs it"
    await chat.press(*"/d", "up", "up", "down", "down", "enter")
    assert prompt.text == "/drafter ", "but for one that needs more"
    prompt.text = ""
    await chat.press(*"/drafter", "enter")
    assert "/drafter needs more" in chat.notices[-1], "a whole name alone is not completed again"
    prompt.text = ""
    await chat.press(*"/dr", "escape")
    assert not prompt.offering and prompt.text == "/dr"
    await chat.press("enter")
    assert "there is no command /dr" in chat.notices[-1], "closed, the list chooses nothing"
    prompt.text = "one\n"
    await chat.press("ctrl+end", "/", "n")
    assert not prompt.offering, "in a text of several lines it is a word"
    prompt.put("/n")
    await chat.pause()
    assert not prompt.offering, "and what is put there was not typed"


@in_chat()
async def test_models_are_offered_behind_their_command(chat, app, monkeypatch):
    models = [AvailableModel(PairConfig(name), place="here") for name in ("big/One", "small/Two")]
    monkeypatch.setattr("dflash_chat.completions.available_models", lambda _: models)
    loaded = []
    monkeypatch.setattr(app, "load", lambda config: loaded.append(config.model))
    await chat.press(*"/model tw")
    await chat.shows("small/Two")
    assert "big/One" not in chat.text and "on this machine" in chat.text
    await chat.press("enter")
    assert loaded == ["tw"], "what was typed is sent as it is where nothing was chosen"
    await chat.press(*"/model ")
    await chat.shows("big/One")
    await chat.press("down", "down", "enter")
    assert loaded == ["tw", "small/Two"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with files of all kinds, as the current one."""
    folder = tmp_path / "here"
    (folder / "sub").mkdir(parents=True)
    (folder / "notes.md").write_text("Two rivers.\n")
    (folder / "my notes.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (folder / "code.py").write_text("x = '```'\n")
    (folder / "photo.png").write_bytes(b"\x89PNG\r\n")
    (folder / "zero.txt").write_bytes(b"a\x00b")
    (folder / "large.txt").write_text("word " * 4000)
    os.mkfifo(folder / "pipe.txt")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("typed", "texts"),
    [
        ("read @", ["@code.py ", "@large.txt ", '@"my notes.txt" ', "@notes.md ", "@photo.png "]),
        ("@no", ["@notes.md "]),
        ('@"m', ['@"my notes.txt" ']),
        ("@su", ["@sub/"]),
        ("@./no", ["@./notes.md "]),
        ("@sub/.h", ["@sub/.hidden "]),
        *[(typed, []) for typed in ("@sub/", "a@no", "@none/x", "@~no-such-user/", "@no ", "@\0/")],
    ],
)
def test_a_file_is_completed_to_what_the_folder_has(here, typed, texts):
    (here / "sub" / ".hidden").touch()
    (here / 'a"quote').touch()
    (here / "no\x1b[2Jcommand").touch()
    word, found = complete(typed)
    assert [text for text, _ in found][: len(texts)] == texts and bool(found) == bool(texts)
    assert not found or typed.endswith(word)
    assert not [text for text, _ in found if "quote" in text or "command" in text]


@in_chat()
async def test_a_file_is_taken_into_the_question_and_a_slow_disk_is_not_waited_for(
    chat, app, here, monkeypatch
):
    await chat.press(*"what says @su", "tab")
    assert app.prompt.text == "what says @sub/"
    app.prompt.text = ""
    await chat.press(*"what says @no")
    await chat.until(lambda: app.prompt.offering)
    assert "@notes.md" in chat.text and "0.0 kB" in chat.text
    await chat.press("tab", *"now?")
    assert app.prompt.text == "what says @notes.md now?"
    app.prompt.text, gate, scan = "", threading.Event(), os.scandir
    monkeypatch.setattr("os.scandir", lambda path: gate.wait(60) and scan(path))
    await chat.press(*"@no", "t")
    assert app.prompt.text == "@not" and not app.prompt.offering
    gate.set()
    await chat.until(lambda: app.prompt.offering)
    app.prompt.text = ""


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("what does @notes.md say?", ["notes.md:\n```\nTwo rivers.\n```"]),
        ("sum up @notes.md, please (@notes.md).", ["notes.md:\n```\nTwo rivers.\n```"]),
        ('read @"my notes.txt"', ["my notes.txt:\n```\nwith a mark\n```"]),
        ("@./notes.md", ["notes.md:\n```\nTwo rivers.\n```"]),
        ("@code.py", ["code.py:\n````\nx = '```'\n````"]),
        (
            "compare @code.py with @notes.md",
            ["code.py:\n````\nx = '```'\n````", "notes.md:\n```\nTwo rivers.\n```"],
        ),
        ("ask @anna, mail a@b.md, or @types/node", []),
        ("@app.get('/x')\n@functools.cache\ndef f(): ...", []),
        ("@ notes.md", []),
        ("@@ -1,3 +1,4 @@", []),
    ],
)
def test_the_text_of_each_file_goes_behind_the_question(here, line, files):
    assert attached(line, 1000) == "".join(f"\n\n{file}" for file in files)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.md", "no file missing.md"),
        ("/no/such", "no file /no/such"),
        ("sub", "sub is a folder"),
        ("pipe.txt", "pipe.txt is not a regular file"),
        ("/dev/zero", "/dev/zero is not a regular file"),
        ("photo.png", "byte 0x89 at 0"),
        ("zero.txt", "byte 0x00 at 1"),
        ("large.txt", "20,000 bytes, about 5,000 tokens, but only about 1,000"),
        ("~no-such-user/x.md", "no file ~no-such-user"),
        ("x" * 5000 + ".md", "no file xxx"),
    ],
)
def test_a_file_that_cannot_go_along_is_named_with_what_to_do(here, name, problem):
    with pytest.raises(DFlashError) as refused:
        attached(f"read @{name}", 1000)
    assert problem in refused.value.what
    assert refused.value.next_step
    assert len(str(refused.value)) < 500


def test_files_share_the_room_and_only_words_that_begin_with_the_sign_may_be_some(here):
    assert mentions("a @b") and not mentions("a@b") and not mentions("a @ b")
    assert attached("@large.txt", 6000)
    with pytest.raises(DFlashError, match=r"notes.md has 12 bytes.*about 0 are left"):
        attached("@large.txt @notes.md", 5000)


@in_chat()
async def test_a_file_goes_with_the_question_or_leaves_it_in_the_line(chat, app, backend, here):
    await chat.answered("What says @notes.md?")
    (message,) = backend.requests[0].messages
    assert message["content"] == "What says @notes.md?\n\nnotes.md:\n```\nTwo rivers.\n```"
    assert app.prompt.text == ""
    await chat.press("up")
    assert app.prompt.text == "What says @notes.md?"
    (here / "notes.md").write_text("Three rivers.")
    await chat.press("enter")
    await chat.until(lambda: len(backend.requests) == 2)
    assert "Three rivers." in backend.requests[1].messages[-1]["content"], "read anew"
    await chat.is_over()
    await chat.say("What says @missing.md?")
    await chat.until(lambda: chat.notices)
    assert "no file missing.md" in chat.notices[0]
    assert app.prompt.text == "What says @missing.md?"
    await chat.say("What says @large.txt?")  # the scripted model holds 8192 tokens
    await chat.until(lambda: len(backend.requests) == 3)
    await chat.is_over()
    await chat.say("And again @large.txt?")
    await chat.shows("are left in the context")
    assert len(backend.requests) == 3
