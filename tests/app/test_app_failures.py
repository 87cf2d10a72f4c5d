"""What goes wrong in the chat is a sentence, and the chat goes on."""

import pytest
from textual import events

from dflash_mlx import DecodeConfig, DFlashError, PairConfig
from dflash_mlx.engine.pair import Means
from support.app_scripts import (
    ANSWER,
    ScriptedBackend,
    answered,
    drive,
    in_chat,
    notices,
    rounds_of,
    say,
    screen_text,
    shown_answer,
    until,
)

PROBLEM = DFlashError("the prompt has 9000 tokens", "shorten the prompt")
FULL = MemoryError("[malloc] Unable to allocate 9 bytes")


@in_chat(lambda: ScriptedBackend([PROBLEM, ANSWER]))
async def test_a_question_that_cannot_be_answered_comes_back_with_a_sentence(app, pilot, backend):
    await say(app, pilot, "too long")
    await until(lambda: notices(app), pilot)
    assert notices(app) == [str(PROBLEM)]
    assert app.prompt.text == "too long"
    assert app.conversation.turns == []
    await answered(app, pilot, "shorter")
    assert shown_answer(app) == ANSWER


@in_chat(lambda: ScriptedBackend([[*rounds_of(ANSWER)[:3], FULL], ANSWER]))
async def test_an_answer_that_breaks_keeps_what_was_said(app, pilot, backend):
    await say(app, pilot, "What meets?")
    await until(lambda: notices(app), pilot)
    assert "there is not enough memory" in notices(app)[0]
    assert app.conversation.turns[-1].ending == "failed"
    await answered(app, pilot, "again")


@in_chat(lambda: ScriptedBackend([ZeroDivisionError("by zero"), ANSWER]))
async def test_a_fault_is_a_sentence_that_names_its_log_and_the_app_goes_on(
    app, pilot, backend, monkeypatch, tmp_path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    await say(app, pilot, "What meets?")
    await until(lambda: notices(app), pilot)
    assert "something went wrong (ZeroDivisionError: by zero)" in notices(app)[0]
    assert "Traceback" not in screen_text(app)
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert "ZeroDivisionError" in log.read_text()
    await answered(app, pilot, "again")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DFlashError("the drafter was made for another", "choose its own"), "choose its own."),
        (MemoryError(), "there is not enough memory (MemoryError: )"),
        (RuntimeError("[metal::malloc] Attempting to allocate"), "smaller or a quantised /model"),
    ],
)
@in_chat(lambda error: ScriptedBackend(loads=[error]))
async def test_a_model_that_cannot_be_loaded_is_a_sentence_and_another_can_be(
    app, pilot, backend, sentence
):
    assert sentence in notices(app)[0]
    assert app.pair is None
    await say(app, pilot, "/model other/one")
    await until(lambda: app.pair, pilot)
    assert backend.loaded[-1] == PairConfig(model="other/one")
    await answered(app, pilot)


@in_chat()
async def test_a_mistyped_model_offers_near_names_and_the_old_one_stays(
    app, pilot, backend, monkeypatch, tmp_path
):
    problem = DFlashError("'Qwen/Qwen3-4b' is neither a folder nor a public model", "check it")
    monkeypatch.chdir(tmp_path)
    backend.loads.append(problem)
    await say(app, pilot, "/model Qwen/Qwen3-4b")
    await until(lambda: notices(app), pilot)
    assert "Did you mean Qwen/Qwen3-4B" in notices(app)[0]
    assert "SmolLM2-135M-Instruct stays loaded" in notices(app)[0]
    await answered(app, pilot)


UNDRAFTED = "no drafter is known for M, so drafts are n-gram lookups"


@in_chat(lambda: ScriptedBackend(means=Means(0), fallback=UNDRAFTED))
async def test_a_model_without_a_drafter_looks_up_n_grams_and_says_so(app, pilot, backend):
    assert notices(app)[0].startswith(UNDRAFTED)
    assert "/drafter" in notices(app)[0]
    assert "n-gram lookup" in screen_text(app)
    backend.means, backend.fallback = Means(1), ""
    await say(app, pilot, "/model with/drafter")
    await until(lambda: app.pair.target.name == "with/drafter", pilot)
    assert "DFlash tree" in screen_text(app), "drafts again where there are drafters"
    assert len(notices(app)) == 1


@in_chat(lambda: ScriptedBackend(means=Means(0), fallback=UNDRAFTED), decode=DecodeConfig("ngram"))
async def test_nothing_is_said_of_drafters_to_who_asked_for_none(app, pilot, backend):
    assert notices(app) == []
    assert app.config.method == "ngram"


@in_chat()
async def test_lines_that_are_pasted_stay_lines_and_a_megabyte_is_a_label_and_sent_whole(
    app, pilot, backend
):
    text = "x" * 1_000_000
    for pasted, shown in (("one\ntwo", "one\ntwo"), (text, "[paste 1: 1,000,000 characters]")):
        app.prompt.text = ""
        app.post_message(events.Paste(pasted))
        await pilot.pause()
        assert app.prompt.text == shown
        assert backend.requests == []
    await answered(app, pilot, app.prompt.text)
    assert backend.requests[0].messages[0]["content"] == text
    assert len(screen_text(app)) < 10_000
    await pilot.press("up")
    assert app.prompt.text == "[paste 1: 1,000,000 characters]"


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
