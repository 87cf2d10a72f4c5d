"""Slash commands and `@file`: completing a name, copying an answer, sending a file along."""

import os

import pytest

from dflash_chat.commands import COMMANDS, completions
from dflash_chat.conversation import code_blocks
from dflash_chat.mentions import attached, mentions
from dflash_mlx import DFlashError
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
    backend.answers = ["a\x1b[201~b\ud800"]
    await chat.answered()
    await chat.say("/copy")
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
        *[(typed, []) for typed in ("", "m", "/x", "/model ", "/usr/bin", "//", "/re\n")],
    ],
)
def test_a_beginning_is_completed_to_the_commands_that_have_it(typed, names):
    assert [command.name for command in completions(typed)] == names


@in_chat()
async def test_commands_are_offered_while_they_are_typed_and_tab_completes(chat, app):
    await chat.press("/", "r")
    assert "/race" in chat.text and "/rename" in chat.text
    await chat.press("e", "n")
    assert "/rename title  name this conversation" in chat.text
    await chat.press("tab")
    assert app.prompt.text == "/rename ", "and goes on to what it needs"
    assert app.prompt.has_focus
    app.prompt.text, before = "", app.theme
    await chat.press(*"/the", "tab", "enter")
    await chat.until(lambda: app.theme != before)
    assert app.prompt.text == ""
    await chat.press("h", "i")
    assert not app.prompt.suggestion
    assert "Tab completes" not in chat.text
    app.prompt.text = ""
    await chat.press(*"/expo")
    assert app.prompt.suggestion == "rt", "shown behind the cursor alone"
    await chat.press("left")
    await chat.until(lambda: not app.prompt.suggestion)
    await chat.press("end", "right")
    assert app.prompt.text == "/export"


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
