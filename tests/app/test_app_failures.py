"""What goes wrong in the chat is a sentence, and the chat goes on."""

import threading

import pytest
from textual import events

from dflash_mlx import DecodeConfig, DFlashError, PairConfig
from dflash_mlx.engine.pair import Means
from support.app_scripts import (
    ANSWER,
    ScriptedBackend,
    answered,
    drive,
    notices,
    rounds_of,
    say,
    screen_text,
    shown_answer,
    until,
)


def test_a_question_that_cannot_be_answered_comes_back_with_a_sentence(tmp_path):
    problem = DFlashError("the prompt has 9000 tokens", "shorten the prompt")

    async def steps(app, pilot, backend):
        await say(app, pilot, "too long")
        await until(lambda: notices(app), pilot)
        assert notices(app) == ["the prompt has 9000 tokens; shorten the prompt"]
        assert app.prompt.text == "too long"
        assert app.conversation.turns == []
        await answered(app, pilot, "shorter")
        assert shown_answer(app) == ANSWER

    drive(steps, tmp_path, ScriptedBackend([problem, ANSWER]))


def test_an_answer_that_breaks_keeps_what_was_said(tmp_path):
    broken = [*rounds_of(ANSWER)[:3], MemoryError("[malloc] Unable to allocate 9 bytes")]

    async def steps(app, pilot, backend):
        await say(app, pilot, "What meets?")
        await until(lambda: notices(app), pilot)
        assert "there is not enough memory" in notices(app)[0]
        assert app.conversation.turns[-1].ending == "failed"
        await answered(app, pilot, "again")

    drive(steps, tmp_path, ScriptedBackend([broken, ANSWER]))


def test_a_fault_is_a_sentence_that_names_its_log_and_the_app_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def steps(app, pilot, backend):
        await say(app, pilot, "What meets?")
        await until(lambda: notices(app), pilot)
        assert "something went wrong (ZeroDivisionError: by zero)" in notices(app)[0]
        assert "Traceback" not in screen_text(app)
        await answered(app, pilot, "again")

    drive(steps, tmp_path / "talks", ScriptedBackend([ZeroDivisionError("by zero"), ANSWER]))
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert "ZeroDivisionError" in log.read_text()
    assert log.name in str(log)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DFlashError("the drafter was made for another", "choose its own"), "choose its own."),
        (MemoryError(), "there is not enough memory (MemoryError: )"),
        (RuntimeError("[metal::malloc] Attempting to allocate"), "smaller or a quantised /model"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_a_sentence_and_another_can_be(tmp_path, error, sentence):
    async def steps(app, pilot, backend):
        assert sentence in notices(app)[0]
        assert app.info is None
        await say(app, pilot, "/model other/one")
        await until(lambda: app.info, pilot)
        assert backend.loaded[-1] == PairConfig(model="other/one")
        await answered(app, pilot)

    drive(steps, tmp_path, ScriptedBackend(loads=[error]))


def test_a_mistyped_model_offers_near_names_and_the_old_one_stays(tmp_path, monkeypatch):
    problem = DFlashError("'Qwen/Qwen3-4b' is neither a folder nor a public model", "check it")
    monkeypatch.chdir(tmp_path)

    async def steps(app, pilot, backend):
        backend.loads.append(problem)
        await say(app, pilot, "/model Qwen/Qwen3-4b")
        await until(lambda: notices(app), pilot)
        assert "Did you mean Qwen/Qwen3-4B" in notices(app)[0]
        assert "SmolLM2-135M-Instruct stays loaded" in notices(app)[0]
        await answered(app, pilot)

    drive(steps, tmp_path, ScriptedBackend())


def test_a_model_without_a_drafter_looks_up_n_grams_and_says_so(tmp_path):
    async def steps(app, pilot, backend):
        assert notices(app)[0].startswith("no drafter is known for M, so drafts are n-gram lookups")
        assert "/drafter" in notices(app)[0]
        assert "n-gram lookup" in screen_text(app)
        backend.means, backend.fallback = Means(1), ""
        await say(app, pilot, "/model with/drafter")
        await until(lambda: app.info.name == "with/drafter", pilot)
        assert "DFlash tree" in screen_text(app), "drafts again where there are drafters"
        assert len(notices(app)) == 1

    fallback = "no drafter is known for M, so drafts are n-gram lookups"
    drive(steps, tmp_path, ScriptedBackend(means=Means(0), fallback=fallback))


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_nothing_is_said_of_drafters_to_who_asked_for_none(tmp_path, method):
    async def steps(app, pilot, backend):
        assert notices(app) == []
        assert app.config.method == method

    backend = ScriptedBackend(means=Means(0), fallback="no drafter is known")
    drive(steps, tmp_path, backend, decode=DecodeConfig(method))


def test_a_folder_that_cannot_be_written_is_said_once_and_the_chat_goes_on(tmp_path):
    (tmp_path / "file").write_text("in the way")

    async def steps(app, pilot, backend):
        await answered(app, pilot, "one")
        assert len([n for n in notices(app) if "is not saved" in n]) == 1
        await answered(app, pilot, "two")
        assert not [n for n in notices(app) if "is not saved" in n]
        assert "--conversations" in app._unsaved
        assert len(app.conversation.turns) == 4

    drive(steps, tmp_path / "file" / "talks")


def test_a_paste_of_a_megabyte_is_a_label_and_is_sent_whole(tmp_path):
    text = "x" * 1_000_000

    async def steps(app, pilot, backend):
        app.post_message(events.Paste(text))
        await pilot.pause()
        assert app.prompt.text == "[paste 1: 1,000,000 characters]"
        await answered(app, pilot, app.prompt.text)
        assert backend.questions[0].messages[0]["content"] == text
        assert len(screen_text(app)) < 10_000
        await pilot.press("up")
        assert app.prompt.text == "[paste 1: 1,000,000 characters]"

    drive(steps, tmp_path)


def test_lines_that_are_pasted_stay_lines(tmp_path):
    async def steps(app, pilot, backend):
        app.post_message(events.Paste("one\ntwo"))
        await pilot.pause()
        assert app.prompt.text == "one\ntwo"
        assert backend.questions == []

    drive(steps, tmp_path)


@pytest.mark.parametrize("size", [(40, 12), (20, 6), (200, 60)])
def test_a_terminal_of_any_size_shows_the_answer_and_the_input(tmp_path, size):
    async def steps(app, pilot, backend):
        await answered(app, pilot)
        text = screen_text(app)
        assert "That is all." in text
        assert "40.0 tok/s" in text
        assert app.prompt.region.bottom <= size[1]
        assert app.prompt.size.height >= 1
        await pilot.press("f2")
        await pilot.pause()
        assert app.prompt.size.height >= 1

    drive(steps, tmp_path, size=size)


def test_the_terminal_may_be_resized_while_an_answer_streams(tmp_path):
    backend = ScriptedBackend(gate=threading.Semaphore(2))

    async def steps(app, pilot, backend):
        await say(app, pilot, "What meets?")
        await until(lambda: app.status.figures, pilot)
        for size in ((40, 12), (120, 40), (60, 20)):
            await pilot.resize_terminal(*size)
            backend.gate.release()
            await pilot.pause()
        backend.gate.release(100)
        await until(lambda: app.listener.job is None, pilot)
        assert shown_answer(app) == ANSWER

    drive(steps, tmp_path, backend)
