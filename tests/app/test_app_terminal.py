"""The whole program in a real pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_chat import main
from dflash_chat.conversation import UNFINISHED, Conversation, Turn
from dflash_chat.store import Store
from dflash_mlx import DFlashError
from dflash_mlx.models.default_model import fetch
from support.hostile import hostile_text, state
from support.models import write_drafter, write_endless_model
from support.terminals import START, Terminal

ENTER, ESCAPE, CTRL_C, CTRL_Q, CTRL_Z = "\r", "\x1b", "\x03", "\x11", "\x1a"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny pair whose answers go on for as long as one likes: no token ends them."""
    root = tmp_path_factory.mktemp("pair")
    model, drafter = write_endless_model(root / "model"), write_drafter(root / "drafter")
    return ["--model", str(model), "--drafter", str(drafter)]


@pytest.fixture
def chat(pair, tmp_path):
    """Start the chat on the tiny pair; conversations stay from one start to the next."""

    def start(*options, columns=100, lines=30, program=START):
        folder = ["--conversations", str(tmp_path / "talks")]
        return Terminal([*pair, *folder, *options], tmp_path / "cache", columns, lines, program)

    return start


def stored(tmp_path):
    (entry,) = Store(tmp_path / "talks").entries()
    return Store(tmp_path / "talks").open(entry.file).conversation.turns


def test_a_kill_in_the_middle_of_an_answer_keeps_what_was_said_until_then(chat, tmp_path):
    with chat("--max-tokens", "20") as terminal:
        terminal.type("first question" + ENTER)
        terminal.until(lambda screen: "Longest answer" in screen)
        terminal.type("/quit" + ENTER)
        assert terminal.wait() == 0
    before = stored(tmp_path)
    assert [turn.role for turn in before] == ["user", "assistant"]
    with chat("--max-tokens", "50000", "--resume") as terminal:
        terminal.until(lambda screen: "first question" in screen and "<-" in screen)
        terminal.type("second question" + ENTER)
        terminal.until(lambda screen: "second question" in screen and _context(screen) > 150)
        terminal.until(lambda screen: len(stored(tmp_path)) == 4)
        terminal.kill()
    *earlier, question, answer = stored(tmp_path)
    assert (earlier, question.content) == (before, "second question")
    assert answer.ending == UNFINISHED and answer.content
    with chat("--resume") as terminal:
        screen = terminal.until(lambda screen: "stopped here" in screen)
        assert "damaged" not in screen
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0


def test_the_terminal_is_given_back_when_suspended_and_a_goodbye_tells_how_to_go_on(
    chat, monkeypatch
):
    monkeypatch.setenv("DFLASH_CHAT_AS", "scripts/chat")  # as that script says
    with chat("--max-tokens", "5") as terminal:
        terminal.type("a question" + ENTER)
        terminal.until(lambda screen: "Longest answer" in screen)
        terminal.type(CTRL_Z)
        stops = terminal.process.pid, os.WUNTRACED | os.WNOHANG
        terminal.until(lambda _: os.WIFSTOPPED(os.waitpid(*stops)[1]))
        terminal.until(lambda _: b"\x1b[?1049l" in terminal.raw)  # the shell has its screen
        stopped = len(terminal.raw)
        terminal.process.send_signal(signal.SIGCONT)  # as `fg` does
        terminal.until(lambda _: b"palette" in terminal.raw[stopped:])  # until then Ctrl+Q is XON
        terminal.type("half a")
        terminal.until(lambda screen: "half a" in screen)
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0
        assert "Saved as “a question”; scripts/chat --resume goes on." in terminal.text
    with chat("--resume") as terminal:
        terminal.until(lambda screen: "a question" in screen and "<-" in screen)
        terminal.type("/new" + ENTER)
        terminal.until(lambda screen: "Try one" in screen)
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0
        assert "Saved as" not in terminal.text, "where nothing was said there is nothing to tell"


def test_a_small_terminal_a_resize_a_large_paste_and_ctrl_c_do_no_harm(chat):
    with chat("--max-tokens", "50000", columns=40, lines=12) as terminal:
        terminal.until(lambda screen: "model <- DFlash" in screen)
        terminal.type("go" + ENTER)
        terminal.until(lambda screen: "tok/s" in screen)
        terminal.resize(120, 40)
        terminal.until(lambda screen: "by position" in screen)
        terminal.type(CTRL_C)
        terminal.until(lambda screen: "stopped here" in screen)
        terminal.type("\x1b[200~" + "many words " * 95_000 + "\x1b[201~")
        terminal.until(lambda screen: "[paste 1: 1,045,000 characters]" in screen)
        terminal.type(ENTER)
        terminal.until(lambda screen: "shorten the prompt" in screen)
        terminal.until(lambda screen: "[paste 1" in screen)
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text


@pytest.mark.parametrize("ending", ["a closed window", signal.SIGTERM, signal.SIGINT])
def test_the_answer_in_the_making_survives(chat, tmp_path, ending):
    with chat("--max-tokens", "50000") as terminal:
        terminal.type("a question" + ENTER)
        terminal.until(lambda screen: _context(screen) > 100)
        if ending == "a closed window":
            terminal.close()
            terminal.process.wait(90)  # nobody reads its exit code
        else:
            terminal.process.send_signal(ending)
            assert terminal.wait(90) == {signal.SIGTERM: 0, signal.SIGINT: 130}[ending]
            assert "Traceback" not in terminal.text
    question, answer = stored(tmp_path)
    assert question.content == "a question"
    assert answer.ending == "stopped" and len(answer.content) > 100


@pytest.mark.parametrize("moment", ["starting", "loading", "leaving"])
def test_no_process_outlives_its_terminal(chat, moment):
    with chat("--max-tokens", "50000") as terminal:
        if moment != "starting":
            terminal.until(lambda screen: "dflash-chat" in screen)
        if moment == "leaving":
            terminal.type("a question" + ENTER)
            terminal.until(lambda screen: _context(screen) > 50)
            terminal.type(CTRL_Q)
        terminal.close()
        if moment == "leaving":  # starts Textual's input anew
            terminal.process.send_signal(signal.SIGCONT)
        assert terminal.process.wait(90) is not None


def test_the_chat_is_light_where_the_terminal_says_so_late_and_no_key_comes_of_it(chat, tmp_path):
    with chat() as terminal:
        terminal.until(lambda screen: "<-" in screen)
        assert b"\x1b]11;?" in terminal.raw
        assert terminal.background < 0x80
        terminal.type("ab\x1b]11;rgb:ffff/ffff/ffff\x1b\\cd")
        screen = terminal.until(lambda screen: "abcd" in screen and terminal.background > 0x80)
        assert "rgb" not in screen
        terminal.type("\x15" + "/theme" + ENTER)
        terminal.until(lambda screen: "Kept in" in screen)
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0
    with chat() as terminal:
        terminal.until(lambda screen: "<-" in screen)
        assert b"\x1b]11;?" not in terminal.raw, "the user has chosen"
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0


HANGS = """import threading, dflash_chat.store as store
store.replace_text = lambda *_: threading.Event().wait()
"""


def test_leaving_waits_but_a_moment_for_a_folder_that_hangs(chat, tmp_path):
    with chat("--max-tokens", "5", columns=200, program=HANGS + START) as terminal:
        terminal.type("a question" + ENTER)
        terminal.until(lambda screen: "Longest answer" in screen)
        terminal.type(CTRL_Q)
        assert terminal.wait() == 2
        told = "".join(terminal.text.split())
    assert f"aquestioncouldnotbesaved:{tmp_path / 'talks'}doesnotanswer" in told


def test_a_hostile_conversation_leaves_the_terminal_as_it_was(chat, tmp_path):
    texts = [hostile_text(seed) for seed in range(20)]
    texts.append("see \x1b]52;c;b3duZWQ=\x07 and \x1b]2;owned\x07 and \x9b2J here")
    turns = [Turn(role, text) for text in texts for role in ("user", "assistant")]
    Store(tmp_path / "talks").save(Conversation(title=hostile_text("title"), turns=turns))
    with chat("--resume") as terminal:
        terminal.until(lambda screen: "<-" in screen)
        running = state(terminal.screen)
        terminal.type("/open" + ENTER)
        terminal.until(lambda screen: "Conversations" in screen)
        terminal.type(ESCAPE)
        terminal.until(lambda screen: "Conversations" not in screen)
        for kept in ("modes", "margins", "charsets", "tab stops", "saved", "size"):
            assert state(terminal.screen)[kept] == running[kept]
        terminal.type("/quit" + ENTER)
        assert terminal.wait() == 0
    assert "owned" not in terminal.screen.title, "what Textual says of the pointer is all it has"
    assert not any(begin + b"owned" in terminal.raw for begin in (b"\x1b]0;", b"\x1b]2;", b"\x9b"))
    assert b"b3duZWQ=" in terminal.raw and b"]52;c;b3duZWQ=\x07" not in terminal.raw


def test_a_fault_of_the_screen_is_one_sentence_that_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    broken = "from dflash_chat.status import Status; "
    broken += "Status.clear = lambda self, said='hello': 1 / 0; " + START
    options = ["--model", "./none", "--conversations", str(tmp_path / "talks")]
    with Terminal(options, tmp_path / "cache", program=broken) as terminal:
        terminal.until(lambda screen: "there is no folder" in screen)
        terminal.type("hello" + ENTER)
        assert terminal.wait() == 1
        assert "the chat stopped" in terminal.text
        assert "Traceback" not in terminal.text
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert "ZeroDivisionError" in log.read_text()
    assert "hello" not in log.read_text(), "which was asked, and is nobody else's business"


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--top-p", "3"], "top_p is 3.0"), ([], "give a question with --prompt")],
)
def test_what_cannot_be_is_refused_before_the_app_opens(monkeypatch, options, told):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(DFlashError, match=told):  # here output is no terminal
        main.run(options)


@pytest.mark.real
def test_the_default_pair_from_the_first_question_to_a_resumed_conversation(tmp_path):
    cache = tmp_path / "cache"
    (cache / "dflash-chat").mkdir(parents=True)
    model = fetch()
    (cache / "dflash-chat" / model.name).symlink_to(model)
    options = ["--conversations", str(tmp_path / "talks"), "--max-tokens", "200"]
    with Terminal(options, cache) as terminal:
        terminal.type("Name three rivers and say where each one flows." + ENTER)
        for _ in range(3):  # the numbers move
            last = _context(terminal.text)
            terminal.until(lambda screen, n=last: _context(screen) > n, 300)
        # An answer of 20 tokens says what drafts made of it, be it nothing.
        terminal.until(lambda screen: "per round" in screen or "plain decoding: " in screen, 300)
        terminal.type(ESCAPE)
        at = _context(terminal.text)
        screen = terminal.until(lambda screen: "stopped here" in screen)
        terminal.until(lambda screen: stored(tmp_path)[1].ending == "stopped")
        first = stored(tmp_path)[1]
        assert first.ending == "stopped"
        assert _context(screen) - at <= 40, "a few rounds at most between the key and the end"
        assert first.figures["generated_tokens"] < 200
        terminal.type("And how long are they?" + ENTER)
        # Stopped before it says something, a question goes back to be asked anew.
        terminal.until(lambda _: stored(tmp_path)[3:] and stored(tmp_path)[3].content, 300)
        terminal.type(ESCAPE)
        terminal.until(lambda _: stored(tmp_path)[3:] and stored(tmp_path)[3].figures, 300)
        terminal.type("/quit" + ENTER)
        assert terminal.wait() == 0
    turns = stored(tmp_path)
    assert [turn.role for turn in turns] == ["user", "assistant"] * 2
    before, after = (turn.figures for turn in turns[1::2])
    assert after["prompt_tokens"] > before["prompt_tokens"] + before["generated_tokens"]
    new = after["prompt_tokens"] - after["reused_tokens"]
    assert new < 30, "what the first turn computed is not computed again"
    with Terminal([*options, "--resume"], cache) as terminal:
        terminal.until(lambda screen: "how long are they?" in screen)
        terminal.type("/export " + str(tmp_path / "talk.md") + ENTER)
        terminal.until(lambda screen: "Written to" in screen)
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0
    exported = (tmp_path / "talk.md").read_text()
    assert turns[1].content.strip() in exported
    head = json.loads(next(Path(tmp_path / "talks").glob("*.jsonl")).read_text().splitlines()[0])
    assert head["model"] == "SmolLM2-135M-Instruct"


def _context(screen):
    """Tokens of the answer, 0 while the screen does not say."""
    found = re.search(r"· (\d+) tokens *$", screen, re.MULTILINE)
    return int(found[1]) if found else 0
