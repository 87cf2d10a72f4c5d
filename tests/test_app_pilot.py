"""The chat under a pilot, on a scripted engine: send, stream, stop, fail, resume, commands."""

import asyncio
import threading

import pytest
from textual import events
from textual.widgets import Collapsible, Input, Markdown, OptionList, Static

from app_scripts import (
    ANSWER,
    ScriptedBackend,
    race_of,
    rounds_of,
    screen_text,
    scripted_app,
    until,
)
from dflash_chat.conversation import Turn
from dflash_chat.figures import Figures
from dflash_chat.messages import Verdict
from dflash_chat.open_screen import OpenScreen
from dflash_chat.picker import Candidate
from dflash_chat.race_screen import RaceScreen
from dflash_chat.screens import ConfirmScreen, RowsScreen
from dflash_chat.settings_screen import SettingsScreen
from dflash_chat.store import Store
from dflash_chat.transcript import MOST_NOTICES
from dflash_mlx import DecodeConfig, DFlashError, PairConfig


def drive(steps, folder, backend=None, size=(100, 30), **chat):
    """Run `steps(app, pilot, backend)` on a loaded app; nothing may have gone wrong inside."""

    async def run():
        app, used = scripted_app(folder, backend, **chat)
        async with app.run_test(size=size) as pilot:
            await until(lambda: not app.listener.waiting, pilot)
            await steps(app, pilot, used)
            await pilot.pause()
        assert app.return_code in (0, None)
        assert app.clean
        return app

    return asyncio.run(run())


async def say(app, pilot, text):
    app.prompt.text = text
    await pilot.press("enter")
    await pilot.pause()


async def answered(app, pilot, text="What meets?"):
    """Ask and wait for the whole answer."""
    before = len(app.conversation.turns)
    await say(app, pilot, text)
    await until(
        lambda: app.listener.job is None and len(app.conversation.turns) == before + 2, pilot
    )


def notices(app):
    return [str(notice.render()) for notice in app.query(".notice").results(Static)]


def shown_answer(app):
    return app.query(Markdown).last().source


# Send and stream


def test_an_answer_streams_in_and_is_saved(tmp_path):
    backend = ScriptedBackend(gate=threading.Semaphore(0))

    async def steps(app, pilot, backend):
        await say(app, pilot, "What meets?")
        assert app.prompt.text == ""
        lengths = []
        for n in range(1, 4):
            backend.gate.release()
            await until(lambda n=n: app.status.figures and app.status.figures.rounds == n, pilot)
            await until(lambda: not app.listener.dirty, pilot)
            lengths.append(len(shown_answer(app)))
        assert lengths == sorted(set(lengths)), "the text on screen grows"
        assert "40.0 tok/s | 2.00x plain" in screen_text(app)
        backend.gate.release(100)
        await until(lambda: app.listener.job is None and app.conversation.turns[1:], pilot)
        assert shown_answer(app) == ANSWER

    drive(steps, tmp_path, backend)
    (entry,) = Store(tmp_path).entries()
    turns = Store(tmp_path).open(entry.file).conversation.turns
    assert [(turn.role, turn.content) for turn in turns] == [
        ("user", "What meets?"),
        ("assistant", ANSWER),
    ]
    assert Figures.read(turns[1].figures).tokens_per_second == 40.0


def test_a_follow_up_sends_the_whole_conversation_and_shows_what_was_prefilled(tmp_path):
    async def steps(app, pilot, backend):
        await answered(app, pilot, "one two")
        await answered(app, pilot, "three")
        roles = [m["role"] for m in backend.questions[1].messages]
        assert roles == ["user", "assistant", "user"]
        assert backend.questions[1].messages[1]["content"] == ANSWER
        figures = app.status.figures
        assert f"prefilled {figures.new_tokens} of {figures.prompt_tokens}" in screen_text(app)
        assert figures.new_tokens < figures.prompt_tokens

    drive(steps, tmp_path)


def test_the_system_prompt_goes_with_every_question(tmp_path):
    async def steps(app, pilot, backend):
        await answered(app, pilot)
        await say(app, pilot, "/system Be brief.")
        await answered(app, pilot)
        await say(app, pilot, "/system -")
        await answered(app, pilot)
        assert [q.system for q in backend.questions] == ["From the start.", "Be brief.", None]

    drive(steps, tmp_path, system="From the start.")


def test_a_question_asked_while_another_is_answered_stays_in_the_line(tmp_path):
    backend = ScriptedBackend(gate=threading.Semaphore(1))

    async def steps(app, pilot, backend):
        await say(app, pilot, "first")
        await until(lambda: app.status.figures, pilot)
        await say(app, pilot, "second")
        assert app.prompt.text == "second"
        assert "an answer is being written" in notices(app)[-1]
        assert len(backend.questions) == 1
        backend.gate.release(100)
        await until(lambda: app.listener.job is None, pilot)

    drive(steps, tmp_path, backend)


def test_a_message_of_spaces_is_not_sent(tmp_path):
    async def steps(app, pilot, backend):
        await say(app, pilot, "  \n ")
        assert backend.questions == []
        assert app.conversation.turns == []

    drive(steps, tmp_path)


def test_shift_enter_makes_a_line_and_enter_sends_them_all(tmp_path):
    async def steps(app, pilot, backend):
        await pilot.press("a", "shift+enter", "b", "ctrl+j", "c", "enter")
        await until(lambda: backend.questions, pilot)
        assert backend.questions[0].messages[-1]["content"] == "a\nb\nc"
        await until(lambda: app.listener.job is None, pilot)

    drive(steps, tmp_path)


def test_up_and_down_walk_through_earlier_questions(tmp_path):
    async def steps(app, pilot, backend):
        await answered(app, pilot, "one")
        await answered(app, pilot, "two")
        app.prompt.text = "dra"
        await pilot.press("up")
        assert app.prompt.text == "two"
        await pilot.press("up", "up")
        assert app.prompt.text == "one"
        await pilot.press("down", "down")
        assert app.prompt.text == "dra"

    drive(steps, tmp_path)


def test_thoughts_are_folded_and_can_be_opened(tmp_path):
    backend = ScriptedBackend(["<think>first I wonder</think>Then I say."])

    async def steps(app, pilot, backend):
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

    drive(steps, tmp_path, backend)


def test_an_answer_without_thoughts_has_no_fold(tmp_path):
    async def steps(app, pilot, backend):
        await answered(app, pilot)
        assert not app.query_one(Collapsible).display

    drive(steps, tmp_path)


# Stop


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
def test_an_answer_stops_within_one_round_and_keeps_what_was_said(tmp_path, key):
    backend = ScriptedBackend(gate=threading.Semaphore(2))

    async def steps(app, pilot, backend):
        await say(app, pilot, "What meets?")
        await until(lambda: app.status.figures and app.status.figures.rounds == 2, pilot)
        await pilot.press(key)
        backend.gate.release(100)
        await until(lambda: app.listener.job is None, pilot)
        assert backend.rounds_run <= 3
        turn = app.conversation.turns[-1]
        assert turn.ending == "stopped"
        assert turn.content == "".join(r.text for r in rounds_of(ANSWER)[: backend.rounds_run])
        assert "stopped here" in screen_text(app)
        await answered(app, pilot, "go on")
        assert backend.questions[-1].messages[1]["content"] == turn.content

    drive(steps, tmp_path, backend)


def test_an_answer_stopped_before_its_first_word_gives_the_question_back(tmp_path):
    backend = ScriptedBackend(prefills=[(10, 100)])

    async def steps(app, pilot, backend):
        await say(app, pilot, "long prompt")
        await until(lambda: "10 of 100 tokens" in screen_text(app), pilot)
        await pilot.press("escape")
        backend.held.set()
        await until(lambda: app.listener.job is None, pilot)
        assert app.conversation.turns == []
        assert app.prompt.text == "long prompt"
        assert "tokens" not in screen_text(app)

    drive(steps, tmp_path, backend)


def test_ctrl_c_copies_a_selection_and_otherwise_tells_how_to_leave(tmp_path):
    async def steps(app, pilot, backend):
        app.prompt.text = "copy me"
        await pilot.press("ctrl+c")
        assert [n.message for n in app._notifications] == ["Ctrl+Q or /quit leaves."]
        app.prompt.select_all()
        await pilot.press("ctrl+c")
        assert app.clipboard == "copy me"

    drive(steps, tmp_path)


def test_leaving_in_the_middle_of_an_answer_keeps_it(tmp_path):
    backend = ScriptedBackend(gate=threading.Semaphore(2))

    async def steps(app, pilot, backend):
        await say(app, pilot, "What meets?")
        await until(lambda: app.status.figures and app.status.figures.rounds == 2, pilot)
        backend.gate.release(100)
        await pilot.press("ctrl+q")

    drive(steps, tmp_path, backend)
    (entry,) = Store(tmp_path).entries()
    turns = Store(tmp_path).open(entry.file).conversation.turns
    assert len(turns) == 2
    assert turns[1].content.startswith("Two rivers")


# Fail


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


def test_a_model_without_a_drafter_decodes_plainly_and_says_so(tmp_path):
    async def steps(app, pilot, backend):
        assert "No drafter is known" in notices(app)[0]
        assert app.config.method == "none"
        assert "plain decoding" in screen_text(app)

    drive(steps, tmp_path, ScriptedBackend(drafters=0))


def test_a_folder_that_cannot_be_written_is_said_once_and_the_chat_goes_on(tmp_path):
    (tmp_path / "file").write_text("in the way")

    async def steps(app, pilot, backend):
        await answered(app, pilot, "one")
        await answered(app, pilot, "two")
        texts = [n for n in notices(app) if "is not saved" in n]
        assert len(texts) <= 1
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


# Conversations


def test_a_conversation_is_resumed_where_it_was(tmp_path):
    async def first(app, pilot, backend):
        await answered(app, pilot, "What meets?")

    async def second(app, pilot, backend):
        assert "What meets?" in screen_text(app)
        assert "That is all." in screen_text(app)
        assert "40.0 tok/s" in screen_text(app), "with the figures of its last answer"
        await answered(app, pilot, "And then?")
        assert len(backend.questions[0].messages) == 3

    drive(first, tmp_path)
    drive(second, tmp_path, resume=True)
    assert len(Store(tmp_path).entries()) == 1


def test_a_question_whose_answer_was_lost_is_back_in_the_line(tmp_path):
    async def first(app, pilot, backend):
        await answered(app, pilot, "one")
        app.conversation.turns.append(Turn("user", "lost"))
        await app.save()

    async def second(app, pilot, backend):
        assert app.prompt.text == "lost"
        await pilot.press("enter")
        await until(lambda: len(app.conversation.turns) == 4, pilot)
        assert [m["content"] for m in backend.questions[0].messages][-1] == "lost"

    drive(first, tmp_path)
    drive(second, tmp_path, resume=True)


def test_a_damaged_conversation_opens_as_far_as_it_goes_and_says_so(tmp_path):
    async def first(app, pilot, backend):
        await answered(app, pilot, "one")
        await answered(app, pilot, "two")

    async def second(app, pilot, backend):
        assert "is damaged; 3 messages were read" in notices(app)[0]
        assert app.prompt.text == "two"

    drive(first, tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-30])
    drive(second, tmp_path, resume=True)


def test_conversations_are_listed_opened_renamed_and_deleted(tmp_path):
    async def steps(app, pilot, backend):
        for question in ("first talk", "second talk"):
            await answered(app, pilot, question)
            await say(app, pilot, "/new")
        assert app.conversation.turns == []
        await say(app, pilot, "/open")
        assert isinstance(app.screen, OpenScreen)
        assert app.screen.query_one(OptionList).option_count == 2
        await pilot.press("down", "r")
        app.screen.query_one(Input).value = "Rivers"
        await pilot.press("enter")
        assert "Rivers" in screen_text(app)
        app.screen.query_one(OptionList).highlighted = 1
        await pilot.press("d")
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("y")
        assert app.screen.query_one(OptionList).option_count == 1
        await pilot.press("enter")
        await until(lambda: app.conversation.turns, pilot)
        assert app.conversation.shown_title == "Rivers"

    drive(steps, tmp_path)


def test_a_conversation_deleted_in_the_list_leaves_the_screen(tmp_path):
    async def steps(app, pilot, backend):
        await answered(app, pilot, "gone")
        await say(app, pilot, "/open")
        await pilot.press("d", "y", "escape")
        await until(lambda: not app.conversation.turns, pilot)
        assert "gone" not in screen_text(app)

    drive(steps, tmp_path)
    assert Store(tmp_path).entries() == []


def test_rename_delete_and_export_work_on_the_conversation_on_screen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def steps(app, pilot, backend):
        await answered(app, pilot, "Why?")
        await say(app, pilot, "/rename Big Question")
        assert "Big Question" in screen_text(app)
        await say(app, pilot, "/export")
        assert "# Big Question" in (tmp_path / "big-question.md").read_text()
        await say(app, pilot, "/export big-question.md")
        assert "exists already" in notices(app)[-1]
        await say(app, pilot, "/delete")
        await pilot.press("n")
        assert app.conversation.turns
        await say(app, pilot, "/delete")
        await pilot.press("y")
        await until(lambda: not app.conversation.turns, pilot)

    drive(steps, tmp_path / "talks")
    assert Store(tmp_path / "talks").entries() == []


# Commands and screens


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/modle x", "there is no command /modle; try /model"),
        ("/rename", "type /rename title"),
        ("/temperature warm", "temperature is 'warm'; type a number"),
        ("/temperature -1", "temperature is -1.0; choose"),
        ("/method magic", "method is 'magic'; choose one of"),
        ("/stats", "there is no answer yet; ask something first"),
        ("/race", "nothing has been asked yet"),
    ],
)
def test_a_command_that_cannot_be_run_says_what_to_do(tmp_path, line, sentence):
    async def steps(app, pilot, backend):
        await say(app, pilot, line)
        assert sentence in notices(app)[-1]
        await answered(app, pilot)

    drive(steps, tmp_path)


def test_method_and_temperature_hold_for_the_next_answer(tmp_path):
    async def steps(app, pilot, backend):
        await say(app, pilot, "/method ngram")
        await say(app, pilot, "/temperature 0.7")
        await answered(app, pilot)
        config = backend.questions[0].config
        assert (config.method, config.sampling.temperature) == ("ngram", 0.7)
        assert "n-gram lookup" in screen_text(app)

    drive(steps, tmp_path)


def test_settings_show_every_option_and_apply_together(tmp_path):
    async def steps(app, pilot, backend):
        await say(app, pilot, "/settings")
        screen = app.screen
        assert isinstance(screen, SettingsScreen)
        texts = " ".join(str(s.render()) for s in screen.query(Static))
        assert "stop after this many tokens" in texts
        assert "keep the k most likely tokens" in texts
        screen.query_one("#set-max_tokens", Input).value = "many"
        await pilot.press("ctrl+s")
        assert "max_tokens is 'many'; type a whole number" in screen_text(app)
        screen.query_one("#set-max_tokens", Input).value = "7"
        screen.query_one("#set-top_p", Input).value = "3"
        await pilot.press("ctrl+s")
        assert "top_p is 3.0" in screen_text(app)
        screen.query_one("#set-top_p", Input).value = "0.9"
        screen.query_one("#set-stop", Input).value = "END, ###"
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert (app.config.max_tokens, app.config.sampling.top_p) == (7, 0.9)
        assert app.config.stop == ("END", "###")
        assert app.config.method == "d2sd"

    drive(steps, tmp_path)


def test_settings_left_with_escape_change_nothing(tmp_path):
    async def steps(app, pilot, backend):
        before = app.config
        await say(app, pilot, "/settings")
        app.screen.query_one("#set-max_tokens", Input).value = "7"
        await pilot.press("escape")
        assert app.config is before
        await say(app, pilot, "/settings")
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert app.config == before, "saving unchanged settings changes nothing either"

    drive(steps, tmp_path, decode=DecodeConfig(method="d2sd", budget=8, stop=("a",)))


def test_the_model_picker_loads_what_is_chosen(tmp_path, monkeypatch):
    listed = [
        Candidate("built in", PairConfig(), "built in", 10**9),
        Candidate("./own", PairConfig("./own", "./own-drafter"), "local folder", 5 * 10**9),
    ]
    monkeypatch.setattr("dflash_chat.picker_screen.candidates", lambda here: listed)
    monkeypatch.setattr("dflash_chat.memory.available", lambda: 2 * 10**9)

    async def steps(app, pilot, backend):
        await say(app, pilot, "/model")
        options = app.screen.query_one(OptionList)
        await until(lambda: options.option_count == 2, pilot)
        assert "needs 1.00 GB of 2.00 GB" in screen_text(app)
        assert "does not fit" in screen_text(app)
        await pilot.press("down", "enter")
        await until(lambda: len(backend.loaded) == 2, pilot)
        assert backend.loaded[1] == PairConfig("./own", "./own-drafter")
        await say(app, pilot, "/model")
        await until(lambda: app.screen.query(OptionList).first().option_count == 2, pilot)
        await pilot.press("tab")
        app.screen.query_one(Input).value = "typed/name"
        await pilot.press("enter")
        await until(lambda: len(backend.loaded) == 3, pilot)
        assert backend.loaded[2] == PairConfig("typed/name")

    drive(steps, tmp_path)


def test_help_and_figures_open_over_the_chat_and_close(tmp_path):
    async def steps(app, pilot, backend):
        await say(app, pilot, "/help")
        assert isinstance(app.screen, RowsScreen)
        assert "/temperature [number]" in screen_text(app)
        await pilot.press("escape")
        await answered(app, pilot)
        await pilot.press("f3")
        await pilot.pause()
        assert "2.00 times as fast" in screen_text(app)
        await pilot.press("f3")
        assert app.screen is app.base

    drive(steps, tmp_path, size=(100, 40))


def test_the_palette_has_every_command(tmp_path):
    async def steps(app, pilot, backend):
        titles = [command.title for command in app.get_system_commands(app.screen)]
        assert "/race [question]" in titles
        assert "/rename title" in titles
        await pilot.press("ctrl+p")
        await pilot.press(*"theme")
        await until(lambda: "light or dark" in screen_text(app), pilot)
        before = app.theme
        await pilot.press("enter", "enter")
        await until(lambda: app.theme != before, pilot)

    drive(steps, tmp_path)


def test_a_theme_is_chosen_at_the_start_and_changed_with_a_command(tmp_path):
    async def steps(app, pilot, backend):
        assert app.theme == "textual-light"
        await say(app, pilot, "/theme")
        assert app.theme == "textual-dark"

    drive(steps, tmp_path, theme="light")


def test_the_draft_view_shows_origins_and_the_last_tree(tmp_path):
    async def steps(app, pilot, backend):
        await answered(app, pilot)
        assert "second draft" not in screen_text(app)
        await pilot.press("f2")
        await pilot.pause()
        text = screen_text(app)
        assert "second draft" in text
        assert "✗·wrong" in text
        assert "tree of 6 pays" in text
        await say(app, pilot, "/draft")
        assert "second draft" not in screen_text(app)

    drive(steps, tmp_path, size=(120, 40))


def test_a_race_runs_on_the_last_question_and_ends_with_a_verdict(tmp_path):
    verdict = Verdict("All 12 tokens are the same. 2.00 times as fast.", True)

    async def steps(app, pilot, backend):
        await answered(app, pilot, "What meets?")
        backend.race_steps = [*race_of(ANSWER, 12), verdict]
        await say(app, pilot, "/race")
        await until(lambda: isinstance(app.screen, RaceScreen) and app.screen.over, pilot)
        text = screen_text(app)
        assert "12 tokens  0.3 s  40.0 tok/s  done" in text
        assert "12 tokens  0.6 s  20.0 tok/s  done" in text
        assert "All 12 tokens are the same" in text
        assert [m["content"] for m in backend.questions[-1].messages] == ["What meets?"]
        await pilot.press("escape")
        await answered(app, pilot, "on")
        assert len(app.conversation.turns) == 4, "a race leaves no trace in the conversation"

    drive(steps, tmp_path, size=(120, 40))


def test_a_race_can_be_stopped_and_can_fail(tmp_path):
    backend = ScriptedBackend(gate=threading.Semaphore(3))

    async def steps(app, pilot, backend):
        backend.race_steps = race_of(ANSWER, 12)
        await say(app, pilot, "/race What meets?")
        await until(lambda: "2 tokens" in screen_text(app), pilot)
        await pilot.press("ctrl+c")
        assert app.screen is app.base
        backend.gate.release(100)
        backend.race_steps = [DFlashError("the method is none", "choose another /method")]
        await say(app, pilot, "/race again")
        await until(lambda: "choose another /method" in screen_text(app), pilot)
        await pilot.press("escape")
        await answered(app, pilot)

    drive(steps, tmp_path, backend)


def test_what_is_printed_while_loading_is_shown_as_progress(tmp_path):
    hold = threading.Event()

    class Slow(ScriptedBackend):
        def load(self, config):
            hold.wait(10)
            return super().load(config)

    async def run():
        app, _ = scripted_app(tmp_path, Slow())
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            assert "loading SmolLM2" in screen_text(app)
            app.read_output("\r unpacking:  45%|████      | 44.1M/98.4M")
            await until(lambda: "unpacking" in screen_text(app), pilot)
            assert "45%" in screen_text(app)
            hold.set()
            await until(lambda: app.info and not app.listener.waiting, pilot)
            app.read_output("a warning from a library\n")
            await pilot.pause()
            assert "unpacking" not in screen_text(app)
            assert "warning" not in screen_text(app)

    asyncio.run(run())


# Long conversations


def long_talk(count):
    return [
        Turn("user" if i % 2 == 0 else "assistant", f"m{i} " + "word " * 400) for i in range(count)
    ]


def test_a_conversation_of_500_messages_costs_no_more_than_a_short_one(tmp_path):
    async def widgets(app, pilot, count):
        app.conversation.turns[:] = long_talk(count)
        await app.transcript.show(app.conversation.turns)
        await pilot.pause()
        return len(app.query("*"))

    async def steps(app, pilot, backend):
        short = await widgets(app, pilot, 40)
        long = await widgets(app, pilot, 500)
        assert long == short
        assert "… 470 earlier messages" in str(app.query_one("#earlier").render())
        for page in range(1, 4):
            app.transcript.scroll_home(animate=False)
            await until(lambda n=page: app.transcript.window.start == 470 - 15 * n, pilot)
            assert len(app.query("*")) <= long + 2
        await pilot.press("a")
        assert app.prompt.text == "a"
        await answered(app, pilot, "and now")
        assert app.transcript.window.at_end
        assert "That is all." in screen_text(app)
        assert len(app.query("*")) <= long + 20

    drive(steps, tmp_path)


def test_scrolling_up_keeps_the_place_and_stays_there_while_an_answer_streams(tmp_path):
    backend = ScriptedBackend(gate=threading.Semaphore(1))

    async def steps(app, pilot, backend):
        app.conversation.turns[:] = long_talk(100)
        await app.transcript.show(app.conversation.turns)
        await say(app, pilot, "What meets?")
        await until(lambda: app.status.figures, pilot)
        app.transcript.scroll_home(animate=False)
        await until(lambda: not app.transcript.window.at_end, pilot)
        place = app.transcript.window
        assert 0 < app.transcript.scroll_y < app.transcript.max_scroll_y
        backend.gate.release(100)
        await until(lambda: app.listener.job is None, pilot)
        assert app.transcript.window.start == place.start
        assert app.conversation.turns[-1].content == ANSWER
        for _ in range(5):
            app.transcript.scroll_end(animate=False)
            await pilot.pause(0.05)
        assert "That is all." in screen_text(app)

    drive(steps, tmp_path, backend)


def test_notices_do_not_pile_up(tmp_path):
    async def steps(app, pilot, backend):
        for _ in range(MOST_NOTICES + 5):
            await say(app, pilot, "/nonsense")
        assert len(app.query(".notice")) == MOST_NOTICES

    drive(steps, tmp_path)
