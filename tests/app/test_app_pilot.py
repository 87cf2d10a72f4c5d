"""The chat under a pilot, on a scripted engine: send, stream, stop, and what goes wrong."""

import re
import threading

from textual import events
from textual.widgets import Collapsible

from dflash_mlx import DecodeConfig, DFlashError, PairConfig
from dflash_mlx.engine.pair import Capabilities
from support.app_scripts import (
    ANSWER,
    ScriptedBackend,
    answered,
    goes_on,
    in_chat,
    notices,
    rounds_of,
    say,
    screen_text,
    shown_answer,
    until,
)

PROBLEM = DFlashError("the prompt has 9000 tokens", "shorten the prompt")


def stored(app):
    """The turns of the one conversation on disk."""
    (entry,) = app.store.entries()
    return app.store.read(entry.file).conversation.turns


@in_chat(lambda: ScriptedBackend(gate=threading.Semaphore(0)))
async def test_an_answer_streams_in_and_is_saved(app, pilot, backend):
    await say(app, pilot, "What meets?")
    assert app.prompt.text == ""
    assert not app.query_one(Collapsible).display, "there is no thought to fold"
    lengths = []
    for n in range(1, 4):
        backend.gate.release()
        await until(lambda n=n: app.status.figures and app.status.figures["rounds"] == n, pilot)
        await until(lambda: not app.listener.dirty, pilot)
        lengths.append(len(shown_answer(app)))
    assert lengths == sorted(set(lengths)), "the text on screen grows"
    assert "~20.0 tok/s" in screen_text(app), "what plain decoding would do"
    backend.gate.release(100)
    await until(lambda: app.listener.job is None and app.conversation.turns[1:], pilot)
    assert shown_answer(app) == ANSWER
    question, answer = stored(app)
    assert (question.role, question.content) == ("user", "What meets?")
    assert (answer.role, answer.content) == ("assistant", ANSWER)
    assert answer.figures["tokens_per_second"] == 40.0


@in_chat(system="From the start.")
async def test_the_system_prompt_goes_with_every_question_and_enter_sends_all_its_lines(
    app, pilot, backend
):
    await say(app, pilot, "  \n ")
    assert backend.requests == [], "there is nothing to send"
    app.prompt.text = ""
    await pilot.press("a", "shift+enter", "b", "ctrl+j", "c", "enter")
    await until(lambda: backend.requests, pilot)
    assert backend.requests[0].messages[-1]["content"] == "a\nb\nc"
    await goes_on(app, pilot, backend)
    await say(app, pilot, "/system Be brief.")
    await answered(app, pilot)
    await say(app, pilot, "/system -")
    await answered(app, pilot)
    assert [q.system for q in backend.requests] == ["From the start.", "Be brief.", None]


@in_chat(size=(100, 50))
async def test_a_follow_up_prefills_its_end_and_up_and_down_walk_through_questions(
    app, pilot, backend
):
    for question in ("one", "two", "two"):
        await answered(app, pilot, question)
    messages = backend.requests[1].messages
    assert [m["content"] for m in messages] == ["one", ANSWER, "two"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    prompt, reused = (app.status.figures[n] for n in ("prompt_tokens", "reused_tokens"))
    assert 0 < reused < prompt
    await pilot.press("f3")
    await pilot.pause()
    assert re.search(rf"of these known already +{reused}\b", screen_text(app))
    await pilot.press("escape")
    app.prompt.text = "dra"
    await pilot.press("up")
    assert app.prompt.text == "two"
    await pilot.press("up", "up")
    assert app.prompt.text == "one"
    await pilot.press("down", "down", "down")
    assert app.prompt.text == "dra"


@in_chat(lambda: ScriptedBackend(["<think>first I wonder</think>Then I say."]))
async def test_thoughts_are_folded_and_can_be_opened(app, pilot, backend):
    await answered(app, pilot)
    fold = app.query_one(Collapsible)
    assert fold.display
    assert fold.collapsed
    assert "3 words" in fold.title
    assert shown_answer(app) == "Then I say."
    assert "wonder" not in screen_text(app)
    fold.collapsed = False
    await pilot.pause()
    assert "first I wonder" in screen_text(app)
    assert app.conversation.turns[1].content.startswith("<think>")


# Stop


@in_chat()
async def test_an_answer_stops_within_one_round_and_keeps_what_was_said(app, pilot, backend):
    for key in ("escape", "ctrl+c"):
        backend.gate, backend.rounds_run = threading.Semaphore(2), 0
        await say(app, pilot, "What meets?")
        await until(lambda: app.status.figures and app.status.figures["rounds"] == 2, pilot)
        await pilot.press(key)
        await until(lambda: app.listener.job.cancelled.is_set(), pilot)
        await goes_on(app, pilot, backend)
        assert backend.rounds_run <= 3
        turn = app.conversation.turns[-1]
        assert turn.ending == "stopped"
        assert turn.content == "".join(r.text for r in rounds_of(ANSWER)[: backend.rounds_run])
        assert "stopped here" in screen_text(app)
    await answered(app, pilot, "go on")
    assert backend.requests[-1].messages[3]["content"] == turn.content


@in_chat()
async def test_a_question_stopped_while_the_model_loads_is_given_back_at_once(app, pilot, backend):
    backend.waits = "load"
    await say(app, pilot, "/model other/one")
    await say(app, pilot, "hello")
    await pilot.press("escape")
    await until(lambda: app.prompt.text == "hello", pilot)
    assert app.listener.job is None
    assert "loading other/one" in screen_text(app), "still under way"
    backend.held.set()
    await until(lambda: app.pair.target.name == "other/one", pilot)
    await answered(app, pilot, "hello")
    assert len(backend.requests) == 1, "what was stopped is never begun"


@in_chat(lambda: ScriptedBackend(prefills=[(10, 100)]))
async def test_a_question_without_an_answer_yet_survives_leaving(app, pilot, backend):
    await say(app, pilot, "long prompt")
    await until(lambda: "10 of 100 tokens" in screen_text(app), pilot)
    app.run_worker(app.action_quit())
    await until(lambda: app._exit, pilot)
    backend.held.set()
    assert [turn.content for turn in stored(app)] == ["long prompt"]


@in_chat()
async def test_ctrl_c_copies_a_selection_and_lines_that_are_pasted_stay_lines(app, pilot, backend):
    app.prompt.text = "copy me"
    await pilot.press("ctrl+c")
    assert [n.message for n in app._notifications] == ["Ctrl+Q or /quit leaves."]
    app.prompt.select_all()
    await pilot.press("ctrl+c")
    assert app.clipboard == "copy me"
    text = "x" * 1_000_000
    for pasted, shown in (("one\ntwo", "one\ntwo"), (text, "[paste 1: 1,000,000 characters]")):
        app.prompt.text = ""
        app.post_message(events.Paste(pasted))
        await pilot.pause()
        assert app.prompt.text == shown
        assert backend.requests == []
    await answered(app, pilot, app.prompt.text)
    assert backend.requests[0].messages[0]["content"] == text, "a megabyte is sent whole"
    assert len(screen_text(app)) < 10_000
    await pilot.press("up")
    assert app.prompt.text == "[paste 1: 1,000,000 characters]"
    app.prompt.put("y" * 1_000_000)  # a question of a conversation from elsewhere
    assert len(app.prompt.text) < 60


# What goes wrong is a sentence, and the chat goes on


@in_chat(lambda: ScriptedBackend([PROBLEM, ZeroDivisionError("by zero"), ANSWER]))
async def test_what_goes_wrong_is_a_sentence_and_a_fault_names_its_log(
    app, pilot, backend, monkeypatch, tmp_path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for sentence in (str(PROBLEM), "something went wrong (ZeroDivisionError: by zero)"):
        await say(app, pilot, "What meets?")
        await until(lambda s=sentence: s in "".join(notices(app)), pilot)
        assert app.prompt.text == "What meets?" and app.conversation.turns == []
    assert "Traceback" not in screen_text(app)
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert "ZeroDivisionError" in log.read_text()
    await answered(app, pilot, "again")


FOREIGN = DFlashError("the drafter was made for another", "choose its own")
METAL = RuntimeError("[metal::malloc] Attempting to allocate")


@in_chat(lambda: ScriptedBackend(loads=[FOREIGN, MemoryError(), METAL]))
async def test_a_model_that_cannot_be_loaded_is_a_sentence_and_another_can_be(app, pilot, backend):
    for number, sentence in enumerate(
        ("choose its own.", "there is not enough memory (MemoryError: )", "or a quantised /model")
    ):
        await until(lambda n=number: len(notices(app)) == n + 1, pilot)
        assert sentence in notices(app)[-1]
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


def undrafted():
    return ScriptedBackend(capabilities=Capabilities(), fallback=UNDRAFTED)


@in_chat(undrafted)
async def test_a_model_without_a_drafter_looks_up_n_grams_and_says_so(app, pilot, backend):
    assert notices(app)[0].startswith(UNDRAFTED)
    assert "/drafter" in notices(app)[0]
    assert "n-gram lookup" in screen_text(app)
    backend.capabilities, backend.fallback = Capabilities(("dflash",)), ""
    await say(app, pilot, "/model with/drafter")
    await until(lambda: app.pair.target.name == "with/drafter", pilot)
    assert "DFlash tree" in screen_text(app), "drafts again where there are drafters"
    assert len(notices(app)) == 1


@in_chat(undrafted, decode=DecodeConfig("ngram"))
async def test_nothing_is_said_of_drafters_to_who_asked_for_none(app, pilot, backend):
    assert notices(app) == []
    assert app.config.method == "ngram"


@in_chat(size=(20, 6))
async def test_a_terminal_of_any_size_shows_the_answer_and_the_input(app, pilot, backend):
    await answered(app, pilot)
    assert "That is all." in screen_text(app)
    assert "40.0 tok/s" in screen_text(app)
    assert app.prompt.region.bottom <= 6
    assert app.prompt.size.height >= 1
    await pilot.press("f2")
    await pilot.pause()
    assert app.prompt.size.height >= 1
