"""The whole program in a real pseudo-terminal."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_chat.conversation import UNFINISHED
from dflash_chat.store import Store
from dflash_mlx.models.default_model import fetch
from support.app_terminal import CTRL_C, CTRL_Q, ENTER, ESCAPE, ROOT, START, Terminal
from support.models import write_drafter, write_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny pair whose answers go on for as long as one likes: no token ends them."""
    root = tmp_path_factory.mktemp("pair")
    model = write_model(root / "model", max_position_embeddings=100_000, eos_token_id=999)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return ["--model", str(model), "--drafter", str(write_drafter(root / "drafter"))]


@pytest.fixture
def chat(pair, tmp_path):
    """Start the chat on the tiny pair; conversations stay from one start to the next."""

    def start(*options, columns=100, lines=30):
        folder = ["--conversations", str(tmp_path / "talks")]
        return Terminal([*pair, *folder, *options], tmp_path / "cache", columns, lines)

    return start


def stored(tmp_path):
    (entry,) = Store(tmp_path / "talks").entries()
    return Store(tmp_path / "talks").open(entry.file).conversation.turns


def test_a_kill_in_the_middle_of_an_answer_keeps_what_was_said_until_then(chat, tmp_path):
    with chat("--max-tokens", "20") as terminal:
        terminal.type("first question" + ENTER)
        terminal.until(lambda screen: "cut at max_tokens" in screen)
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
        screen = terminal.until(lambda screen: "broken off here" in screen)
        assert "damaged" not in screen
        terminal.type(CTRL_Q)
        assert terminal.wait() == 0


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


@pytest.mark.parametrize("ending", ["a closed window", "a shutdown"])
def test_the_answer_in_the_making_survives(chat, tmp_path, ending):
    with chat("--max-tokens", "50000") as terminal:
        terminal.type("a question" + ENTER)
        terminal.until(lambda screen: _context(screen) > 150)
        if ending == "a closed window":
            terminal.close()
        else:
            terminal.process.terminate()
        code = terminal.process.wait(90)
        assert code == 0 or ending == "a closed window", "after which nobody reads it"
    question, answer = stored(tmp_path)
    assert question.content == "a question"
    assert answer.ending == "stopped" and len(answer.content) > 100


def test_a_fault_of_the_screen_is_one_sentence_that_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    broken = "from dflash_chat.status import Status; Status.clear = lambda self: 1 / 0; " + START
    options = ["--model", "./none", "--conversations", str(tmp_path / "talks")]
    with Terminal(options, tmp_path / "cache", program=broken) as terminal:
        terminal.until(lambda screen: "there is no folder" in screen)
        terminal.type("hello" + ENTER)
        assert terminal.wait() == 1
        assert "the chat broke off" in terminal.text
        assert "Traceback" not in terminal.text
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert "ZeroDivisionError" in log.read_text()


def test_settings_that_cannot_be_are_refused_before_the_app_opens(tmp_path):
    with Terminal(["--top-p", "3"], tmp_path / "cache") as terminal:
        assert terminal.wait() == 2
        assert "top_p is 3.0" in terminal.text


def test_output_that_is_no_terminal_is_refused_with_a_next_step():
    main, side = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", START], stdin=side, capture_output=True, cwd=ROOT, check=False
    )
    os.close(main)
    os.close(side)
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"give a question with --prompt" in done.stderr


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
        terminal.type(ESCAPE)
        at = _context(terminal.text)
        screen = terminal.until(lambda screen: "stopped here" in screen)
        terminal.until(lambda screen: stored(tmp_path)[1].ending == "stopped")
        first = stored(tmp_path)[1]
        assert first.ending == "stopped"
        assert _context(screen) - at <= 40, "a few rounds at most between the key and the end"
        assert first.figures["generated_tokens"] < 200
        terminal.until(lambda screen: "x plain" in screen, 300)
        terminal.type("And how long are they?" + ENTER)
        asked = r"how long are they\?.*prefilled (\d+) of (\d+)"
        before = str(first.figures["prompt_tokens"])  # stands there until the next prefill

        def prefilled(screen):
            found = re.search(asked, screen, re.DOTALL)
            return found if found and found[2] != before else None

        found = prefilled(terminal.until(prefilled, 300))
        new, prompt = map(int, found.groups())
        assert prompt > first.figures["prompt_tokens"] + first.figures["generated_tokens"]
        assert new < 30, "what the first turn computed is not computed again"
        terminal.type("/quit" + ENTER)
        assert terminal.wait() == 0
    turns = stored(tmp_path)
    assert [turn.role for turn in turns] == ["user", "assistant"] * 2
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
    """Tokens of the context in use, 0 while the screen does not say."""
    found = re.search(r"ctx (\d+)/", screen)
    return int(found[1]) if found else 0
