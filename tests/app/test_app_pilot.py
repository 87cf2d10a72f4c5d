"""The chat under a pilot, on a scripted engine: send, stream, stop, and what goes wrong."""

import re

from textual import events
from textual.widgets import Collapsible

from dflash_mlx import DecodeConfig, DFlashError, PairConfig
from dflash_mlx.engine.pair import Capabilities
from support.app_scripts import ANSWER, ScriptedBackend, gated, in_chat, rounds_of

PROBLEM = DFlashError("the prompt has 9000 tokens", "shorten the prompt")


@in_chat(lambda: gated(0))
async def test_an_answer_streams_in_and_is_saved(chat, app, backend):
    await chat.say("What meets?")
    assert app.prompt.text == ""
    assert not app.query_one(Collapsible).display, "there is no thought to fold"
    lengths = []
    for n in range(1, 4):
        backend.gate.release()
        await chat.reaches(n)
        await chat.until(lambda: not app.listener.dirty)
        lengths.append(len(chat.shown_answer))
    assert lengths == sorted(set(lengths)), "the text on screen grows"
    assert "x plain" not in chat.text, "too few tokens to compare"
    backend.gate.release(100)
    await chat.until(lambda: app.listener.job is None and app.conversation.turns[1:])
    assert chat.shown_answer == ANSWER
    question, answer = chat.saved
    assert (question.role, question.content) == ("user", "What meets?")
    assert (answer.role, answer.content) == ("assistant", ANSWER)
    assert answer.figures["tokens_per_second"] == 40.0


@in_chat(system="From the start.")
async def test_the_system_prompt_goes_with_questions_of_several_lines(chat, app, backend):
    await chat.say("  \n ")
    assert backend.requests == [], "there is nothing to send"
    app.prompt.text = ""
    await chat.press("a", "shift+enter", "b", "ctrl+j", "c", "enter")
    await chat.until(lambda: backend.requests)
    assert backend.requests[0].messages[-1]["content"] == "a\nb\nc"
    await chat.goes_on()
    await chat.say("/system Be brief.")
    await chat.answered()
    await chat.say("/system -")
    await chat.answered()
    assert [q.system for q in backend.requests] == ["From the start.", "Be brief.", None]


@in_chat(size=(100, 50))
async def test_a_follow_up_prefills_its_end_and_up_finds_old_questions(chat, app, backend):
    for question in ("one", "two", "two"):
        await chat.answered(question)
    messages = backend.requests[1].messages
    assert [m["content"] for m in messages] == ["one", ANSWER, "two"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    prompt, reused = (app.status.figures[n] for n in ("prompt_tokens", "reused_tokens"))
    assert 0 < reused < prompt
    await chat.press("f3")
    await chat.pause()
    assert re.search(rf"reused from earlier turns +{reused}\b", chat.text)
    await chat.press("escape")
    app.prompt.text = "dra"
    await chat.press("up")
    assert app.prompt.text == "two"
    await chat.press("up", "up")
    assert app.prompt.text == "one"
    await chat.press("down", "down", "down")
    assert app.prompt.text == "dra"


@in_chat(lambda: ScriptedBackend(["<think>first I wonder</think>Then I say."]))
async def test_thoughts_are_folded_and_can_be_opened(chat, app):
    await chat.answered()
    fold = app.query_one(Collapsible)
    assert fold.display
    assert fold.collapsed
    assert "3 words" in fold.title
    assert chat.shown_answer == "Then I say."
    assert "wonder" not in chat.text
    fold.collapsed = False
    await chat.pause()
    assert "first I wonder" in chat.text
    assert app.conversation.turns[1].content.startswith("<think>")


# Stop


@in_chat()
async def test_an_answer_stops_within_one_round_and_keeps_what_was_said(chat, app, backend):
    for key in ("escape", "ctrl+c"):
        backend.rounds_run = 0
        backend.hold(2)
        await chat.say("What meets?")
        await chat.reaches(2)
        await chat.press(key)
        await chat.until(lambda: app.listener.job.cancelled.is_set())
        await chat.goes_on()
        assert backend.rounds_run <= 3
        turn = app.conversation.turns[-1]
        assert turn.ending == "stopped"
        assert turn.content == "".join(r.text for r in rounds_of(ANSWER)[: backend.rounds_run])
        assert "stopped here" in chat.text
    await chat.answered("go on")
    assert backend.requests[-1].messages[3]["content"] == turn.content


@in_chat()
async def test_a_question_stopped_while_the_model_loads_is_given_back_at_once(chat, app, backend):
    backend.waits = "load"
    await chat.say("/model other/one")
    await chat.say("hello")
    await chat.press("escape")
    await chat.until(lambda: app.prompt.text == "hello")
    assert app.listener.job is None
    assert "loading other/one" in chat.text, "still under way"
    backend.held.set()
    await chat.until(lambda: app.pair.target.name == "other/one")
    await chat.answered("hello")
    assert len(backend.requests) == 1, "what was stopped is never begun"


@in_chat(lambda: ScriptedBackend(prefills=[(10, 100)]))
async def test_a_question_without_an_answer_yet_survives_leaving(chat, app, backend):
    await chat.say("long prompt")
    await chat.shows("10 of 100 tokens")
    app.run_worker(app.action_quit())
    await chat.until(lambda: app._exit)
    backend.held.set()
    assert [turn.content for turn in chat.saved] == ["long prompt"]


@in_chat()
async def test_ctrl_c_copies_a_selection_and_lines_that_are_pasted_stay_lines(chat, app, backend):
    app.prompt.text = "copy me"
    await chat.press("ctrl+c")
    assert [n.message for n in app._notifications] == ["Ctrl+Q or /quit leaves."]
    app.prompt.select_all()
    await chat.press("ctrl+c")
    assert app.clipboard == "copy me"
    text = "x" * 1_000_000
    for pasted, shown in (("one\ntwo", "one\ntwo"), (text, "[paste 1: 1,000,000 characters]")):
        app.prompt.text = ""
        app.post_message(events.Paste(pasted))
        await chat.pause()
        assert app.prompt.text == shown
        assert backend.requests == []
    await chat.answered(app.prompt.text)
    assert backend.requests[0].messages[0]["content"] == text, "a megabyte is sent whole"
    assert len(chat.text) < 10_000
    await chat.press("up")
    assert app.prompt.text == "[paste 1: 1,000,000 characters]"
    app.prompt.put("y" * 1_000_000)  # a question of a conversation from elsewhere
    assert len(app.prompt.text) < 60


# What goes wrong is a sentence, and the chat goes on


@in_chat(lambda: ScriptedBackend([PROBLEM, ZeroDivisionError("by zero"), ANSWER]))
async def test_what_goes_wrong_is_a_sentence(chat, app, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for sentence in (str(PROBLEM), "something went wrong (ZeroDivisionError: by zero)"):
        await chat.say("What meets?")
        await chat.until(lambda s=sentence: s in "".join(chat.notices))
        assert app.prompt.text == "What meets?" and app.conversation.turns == []
    assert "Traceback" not in chat.text
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert "ZeroDivisionError" in log.read_text()
    await chat.answered("again")


FOREIGN = DFlashError("the drafter was made for another", "choose its own")
METAL = RuntimeError("[metal::malloc] Attempting to allocate")


@in_chat(lambda: ScriptedBackend(loads=[FOREIGN, MemoryError(), METAL]))
async def test_a_model_that_cannot_be_loaded_is_a_sentence_and_another_can_be(
    chat, app, backend, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for number, sentence in enumerate(
        ("choose its own.", "there is not enough memory (MemoryError: )", "or a quantised /model")
    ):
        await chat.until(lambda n=number: len(chat.notices) == n + 1)
        assert sentence in chat.notices[-1]
        assert app.pair is None
        await chat.say("/model other/one")
    await chat.until(lambda: app.pair)
    assert backend.loaded[-1] == PairConfig(model="other/one")
    await chat.answered()
    mistyped = "'Qwen/Qwen3-4b' is neither a folder nor a public model"
    backend.loads.append(DFlashError(mistyped, "check it"))
    await chat.say("/model Qwen/Qwen3-4b")
    await chat.until(lambda: mistyped in str(chat.notices))
    assert "Did you mean Qwen/Qwen3-4B" in chat.notices[-1]
    assert "other/one stays loaded" in chat.notices[-1]
    await chat.answered()


UNDRAFTED = "no drafter is known for M, so drafts come from prompt lookup"


def undrafted():
    return ScriptedBackend(capabilities=Capabilities(), fallback=UNDRAFTED)


@in_chat(undrafted)
async def test_a_model_without_a_drafter_looks_up_n_grams_and_says_so(chat, app, backend):
    assert chat.notices[0].startswith(UNDRAFTED)
    assert "/drafter" in chat.notices[0]
    assert "prompt lookup" in chat.text
    backend.capabilities, backend.fallback = Capabilities(("dflash",)), ""
    await chat.say("/model with/drafter")
    await chat.until(lambda: app.pair.target.name == "with/drafter")
    assert "DFlash tree" in chat.text, "drafts again where there are drafters"
    assert len(chat.notices) == 1


@in_chat(undrafted, decode=DecodeConfig("ngram"))
async def test_nothing_is_said_of_drafters_to_who_asked_for_none(chat, app):
    assert chat.notices == []
    assert app.config.method == "ngram"


@in_chat(size=(20, 6))
async def test_a_terminal_of_any_size_shows_the_answer_and_the_input(chat, app):
    await chat.answered()
    assert "That is all." in chat.text
    assert "40.0 tok/s" in chat.text
    assert app.prompt.region.bottom <= 6
    assert app.prompt.size.height >= 1
    await chat.press("f2")
    await chat.pause()
    assert app.prompt.size.height >= 1
