"""The command, the clipboard, the figures of a chat without drafts, and private files."""

import os
import stat
import subprocess
import sys
from datetime import datetime

import pytest

from dflash_chat import clipboard, figures, main
from dflash_chat.commands import parse
from dflash_chat.conversation import Conversation, Turn
from dflash_chat.mentions import attached, folded
from dflash_chat.open_screen import when
from dflash_chat.store import Store
from dflash_chat.transcript import Question
from dflash_mlx import DFlashError
from support.app_scripts import in_chat


def figures_with(**changed):
    return figures.read_figures(
        {"method": "auto", "generated_tokens": 200, "tokens_per_second": 20.0, **changed}
    )


@pytest.mark.parametrize(("tokens", "ratio"), [(19, 2.0), (200, 1.04), (200, 0.9)])
def test_no_ratio_before_20_tokens_or_below_105_hundredths(tokens, ratio):
    shown = figures_with(generated_tokens=tokens, times_plain=ratio)
    assert figures.times_plain(shown) == "" and figures.bars(shown, 80) == []
    assert figures.times_plain(figures_with(times_plain=1.05)) == "~1.1"
    drafted = {**shown, "accepted_by_position": [0.5]}  # so drafts were made
    told = dict(figures.statistics_rows(drafted))["against plain decoding"]
    assert "/race compares" in told and "no drafts" not in told


@pytest.mark.parametrize(
    ("modes", "said"), [("200 plain", "drafts do not pay here"), ("", "no drafts found")]
)
def test_figures_say_that_no_drafts_were_made_and_why(modes, said):
    shown = figures_with(modes=modes, times_plain=1.0)
    assert any(said in part for part in figures.speed_parts(shown))
    assert said in dict(figures.statistics_rows(shown))["against plain decoding"]


@pytest.mark.parametrize(
    ("typed", "name"),
    [("/exit", "quit"), ("exit", "quit"), (":q", "quit"), ("/clear", "new"), ("/?", "help")],
)
def test_what_other_programs_call_a_command_is_known(typed, name):
    assert parse(typed).command.name == name


@in_chat()
async def test_what_is_typed_after_a_refused_command_takes_its_place(chat, app, backend):
    await chat.say("/nonsense")
    await chat.press(*"hi", "enter")
    await chat.is_over()
    assert backend.asked == ["hi"]


def test_the_machines_own_program_copies_and_over_ssh_none(monkeypatch, tmp_path):
    program, out = tmp_path / "pbcopy", tmp_path / "copied"
    program.write_text(f"#!/bin/sh\n/bin/cat > {out}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SSH_CONNECTION", "SSH_TTY"):
        monkeypatch.delenv(name, raising=False)
    assert clipboard.copied("Zürich\n")
    assert out.read_text(encoding="utf-8") == "Zürich\n"
    program.write_text("#!/bin/sh\nexit 1\n")
    assert not clipboard.copied("x")
    monkeypatch.setenv("SSH_TTY", "/dev/pts/1")
    program.write_text(f"#!/bin/sh\necho > {out}.ssh\n")
    assert not clipboard.copied("x")
    assert not (tmp_path / "copied.ssh").exists()


def test_conversations_are_for_their_owner_alone(tmp_path):
    store, talk = Store(tmp_path / "talks"), Conversation(turns=[Turn("user", "a secret")])
    for _ in range(2):
        store.save(talk)
        mode = [stat.S_IMODE(f.stat().st_mode) for f in (store.folder, store.file_of(talk))]
        assert mode == [0o700, 0o600]


def test_the_list_has_groups_and_times_of_the_last_change_by_which_it_is_sorted():
    noon = datetime.now().replace(hour=12, minute=5).timestamp()
    days = {-1: "today", 0: "today", 1: "yesterday", 2: "the last seven days", 7: "earlier"}
    assert {ago: when(noon - ago * 86400)[0] for ago in days} == days
    assert when(noon)[1] == "12:05" and when(0)[1][:4] in ("1970", "1969")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["modles"], "did you mean dflash-chat models"),
        (["Why?", "--prompt", "How?"], "two questions"),
    ],
)
def test_a_command_that_is_nearly_one_and_two_questions_are_refused(words, said, monkeypatch):
    with pytest.raises(DFlashError, match=said):
        main.run(words)


def test_a_piped_question_is_answered_as_text(monkeypatch):
    asked = []
    monkeypatch.setattr(main, "_answer", lambda *given: asked.append(given[3]))
    monkeypatch.setattr("dflash_mlx.cli.options.read_stdin", lambda: "a text\n")
    main.run(["Sum this up:"])
    assert asked == ["Sum this up:\n\na text\n"]


@pytest.mark.parametrize(
    "start", [["-m", "dflash_chat"], ["-c", "import dflash_chat.main as m; m.main()"]]
)
def test_the_version_is_told_however_it_is_started(start):
    done = subprocess.run(
        [sys.executable, *start, "--version"], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("dflash-chat 1.")


def test_a_terminal_that_cannot_show_the_screen_is_refused(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
    with pytest.raises(DFlashError, match="TERM=dumb"):
        main.run([])
    assert os.environ["TERM"] == "dumb"


def test_a_file_that_goes_with_a_question_is_folded_like_a_paste(tmp_path):
    file = tmp_path / "long.md"
    file.write_text("word ```\n" * 200)
    line = f"What is @{file}?"
    sent = line + attached(line, 10_000)
    assert folded(sent) == f"{line}\n[{file}, 1,799 characters]"
    assert folded(f"{line}\n\nmine:\n```\nshort\n```") == f"{line}\n\nmine:\n```\nshort\n```"
    assert "1,799 characters" in str(Question(sent).render())
