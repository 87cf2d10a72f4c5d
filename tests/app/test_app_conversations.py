"""Conversations in the chat: resumed, listed, renamed, and very long."""

import asyncio
import threading

import pytest
from textual import events
from textual.widgets import Input, OptionList

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.open_screen import OpenScreen
from dflash_chat.screens import ConfirmScreen
from dflash_chat.store import Store
from dflash_chat.transcript import MOST_NOTICES
from dflash_chat.window import Window
from support.app_scripts import (
    ANSWER,
    ScriptedBackend,
    answered,
    begun,
    drive,
    goes_on,
    in_chat,
    notices,
    say,
    screen_text,
    until,
)


def test_a_conversation_is_resumed_where_it_was(tmp_path):
    async def first(app, pilot, backend):
        await answered(app, pilot, "What meets?")

    async def second(app, pilot, backend):
        assert "What meets?" in screen_text(app)
        assert "That is all." in screen_text(app)
        assert "40.0 tok/s" in screen_text(app), "with the figures of its last answer"
        await answered(app, pilot, "And then?")
        assert len(backend.requests[0].messages) == 3

    drive(first, tmp_path)
    drive(second, tmp_path, resume=True)
    assert len(Store(tmp_path).entries()) == 1


@pytest.fixture
def damaged(tmp_path):
    """Two questions, the second with half an answer, which a started chat resumes."""
    turns = [Turn("user", "one"), Turn("assistant", ANSWER), Turn("user", "lost")]
    store = Store(tmp_path / "talks")
    store.save(Conversation(turns=turns))
    (file,) = store.folder.iterdir()
    file.write_bytes(file.read_bytes() + b'{"role": "assistant", "content": "half')


@in_chat(lambda damaged: None, resume=True)
async def test_a_damaged_conversation_opens_as_far_as_it_goes_with_the_question_that_was_lost(
    app, pilot, backend
):
    assert "is damaged; 3 messages were read" in notices(app)[0]
    assert app.prompt.text == "lost"
    await pilot.press("enter")
    await until(lambda: len(app.conversation.turns) == 4, pilot)
    assert [m["content"] for m in backend.requests[0].messages][-1] == "lost"


async def listed(app, pilot, *questions):
    """Ask each in a conversation of its own, and open the list of them."""
    for question in questions:
        await answered(app, pilot, question)
        if len(questions) > 1:
            await say(app, pilot, "/new")
            assert app.conversation.turns == []
    await say(app, pilot, "/open")
    assert isinstance(app.screen, OpenScreen)
    options = app.screen.query_one(OptionList)
    await until(lambda: options.option_count == len(questions), pilot)
    return options


@in_chat(size=(80, 24))
async def test_conversations_are_listed_opened_renamed_and_deleted(app, pilot, backend):
    options = await listed(app, pilot, "first talk", "second talk")
    assert "first talk" in screen_text(app) and "second talk" in screen_text(app)
    await pilot.press("ctrl+r", "down", "ctrl+d")
    assert options.highlighted == 0 and isinstance(app.screen, OpenScreen), "a title is typed"
    await pilot.press("escape", "down", "ctrl+r")
    app.screen.query_one("#title", Input).value = "Rivers"
    await pilot.press("enter")
    await until(lambda: "Rivers" in screen_text(app), pilot)
    options.highlighted = 1
    await pilot.press("ctrl+d")
    assert isinstance(app.screen, ConfirmScreen)
    await pilot.press("y")
    await until(lambda: options.option_count == 1, pilot)
    await pilot.press("enter")
    await until(lambda: app.conversation.turns, pilot)
    assert app.conversation.shown_title == "Rivers"


@in_chat(size=(80, 24))
async def test_typing_in_the_list_finds_words_of_titles_and_texts_in_any_case(app, pilot, backend):
    backend.answers = ["About Rivers: nothing.", "About Lakes: nothing."]
    options = await listed(app, pilot, "Rivers of Mainz", "Lakes of Bern")
    for typed, found in (("NOTHING mainz", ["Rivers"]), ("of", ["Lakes", "Rivers"]), ("oslo", [])):
        app.screen.query_one("#search", Input).value = ""
        await pilot.press(*("space" if c == " " else c for c in typed))
        await until(lambda f=found: options.option_count == len(f), pilot)
        assert all(name in screen_text(app) for name in found)
    assert "No conversation has all these words." in screen_text(app)
    app.screen.query_one("#search", Input).value = ""
    await pilot.press(*"bern", "backspace", *"n", "enter")
    await until(lambda: app.conversation.turns, pilot)
    assert app.conversation.questions == ["Lakes of Bern"]


@in_chat()
async def test_a_conversation_deleted_in_the_list_leaves_the_screen(app, pilot, backend):
    await listed(app, pilot, "gone")
    await pilot.press("ctrl+d", "y", "escape")
    await until(lambda: not app.conversation.turns, pilot)
    assert "gone" not in screen_text(app)
    assert app.store.entries() == []
    await until(lambda: backend.forgotten == 1, pilot)


@in_chat()
async def test_rename_delete_and_export_work_on_the_conversation_on_screen(
    app, pilot, backend, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    await answered(app, pilot, "Why?")
    await say(app, pilot, "/rename Big Question")
    assert "Big Question" in screen_text(app)
    await say(app, pilot, "/export")
    await until(lambda: "Written to" in notices(app)[-1], pilot)
    assert "# Big Question" in (tmp_path / "big-question.md").read_text()
    assert not backend.forgotten
    for name, problem in (
        ("big-question.md", "exists already"),
        ("~no-such-user/talk.md", "; name "),
        ("x" * 5000, "xxx"),
        ("no/such/folder/talk.md", "no/such/folder"),
    ):
        await say(app, pilot, f"/export {name}")
        await until(lambda p=problem: p in notices(app)[-1], pilot)
    await say(app, pilot, "/delete")
    assert app.screen.query_one(".dialog").size.height < 5, "a small question is a small box"
    await pilot.press("n")
    assert app.conversation.turns
    await say(app, pilot, "/delete")
    await pilot.press("y")
    await until(lambda: not app.conversation.turns, pilot)
    assert app.store.entries() == []
    await until(lambda: backend.forgotten, pilot)


def long_talk(count):
    return [
        Turn("user" if i % 2 == 0 else "assistant", f"m{i} " + "word " * 400) for i in range(count)
    ]


async def widgets(app, pilot, count):
    app.conversation.turns[:] = long_talk(count)
    await app.transcript.show(app.conversation.turns)
    await pilot.pause()
    return len(app.query("*"))


@in_chat()
async def test_a_conversation_of_500_messages_costs_no_more_than_a_short_one(app, pilot, backend):
    short = await widgets(app, pilot, 40)
    long = await widgets(app, pilot, 500)
    assert long == short
    assert "… 470 earlier messages" in str(app.query_one("#earlier").render())
    bottom = app.transcript.scroll_y
    await pilot.press("pageup")
    await until(lambda: app.transcript.scroll_y < bottom, pilot)
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


@in_chat(lambda: ScriptedBackend(gate=threading.Semaphore(1)))
async def test_scrolling_up_stays_there_while_an_answer_streams(app, pilot, backend):
    app.conversation.turns[:] = long_talk(100)
    await app.transcript.show(app.conversation.turns)
    await begun(app, pilot, "What meets?")
    app.transcript.scroll_home(animate=False)
    await until(lambda: not app.transcript.window.at_end, pilot)
    place = app.transcript.window
    assert 0 < app.transcript.scroll_y < app.transcript.max_scroll_y
    await goes_on(app, pilot, backend)
    assert app.transcript.window.start == place.start
    assert app.conversation.turns[-1].content == ANSWER

    def at_the_end():
        app.transcript.scroll_end(animate=False)
        return "That is all." in screen_text(app)

    await until(at_the_end, pilot, 60)


@in_chat(lambda: ScriptedBackend(gate=threading.Semaphore(1)))
async def test_a_page_may_be_turned_while_the_answer_is_drawn(app, pilot, backend):
    transcript = app.transcript
    app.conversation.turns[:] = long_talk(60)
    await transcript.show(app.conversation.turns)
    await begun(app, pilot, "What meets?")
    for turn in (Window.earlier, Window.later):
        page = asyncio.create_task(transcript._turn_page(turn))
        while not page.done():
            transcript.receive("and ")
            await transcript.draw()
            await asyncio.sleep(0)
        await page
    await goes_on(app, pilot, backend)
    assert "and and" in app.conversation.turns[-1].content


@pytest.fixture
def blocked(tmp_path):
    """A file where the folder of the conversations should be."""
    (tmp_path / "talks").write_text("in the way")


@in_chat(lambda blocked: None)
async def test_a_folder_that_cannot_be_written_is_said_once_and_the_chat_goes_on(
    app, pilot, backend
):
    await answered(app, pilot, "only in memory")
    assert len([n for n in notices(app) if "is not saved" in n]) == 1
    assert "--conversations" in notices(app)[-1]
    await say(app, pilot, "/open")
    assert "cannot read" in screen_text(app)
    await pilot.press("escape")
    await until(lambda: app.screen is app.base, pilot)
    await answered(app, pilot, "still here?")
    assert not [n for n in notices(app) if "is not saved" in n]
    assert len(backend.requests[-1].messages) == 3


@in_chat()
async def test_a_title_that_cannot_be_saved_is_said_and_enter_pressed_twice_opens_once(
    app, pilot, backend, monkeypatch
):
    def full(_):
        raise OSError(28, "No space left on device")

    await listed(app, pilot, "first talk")
    monkeypatch.setattr("os.fsync", full)
    await pilot.press("ctrl+r")
    app.screen.query_one("#title", Input).value = "Rivers"
    await pilot.press("enter")
    await until(lambda: "cannot write to" in screen_text(app), pilot)
    monkeypatch.undo()
    app.screen.query_one(OptionList).focus()
    for _ in range(2):
        app.post_message(events.Key("enter", "\r"))
    await until(lambda: app.screen is app.base, pilot)
    await answered(app, pilot, "goes on")
    for _ in range(MOST_NOTICES + 5):
        await say(app, pilot, "/nonsense")
    assert len(app.query(".notice")) == MOST_NOTICES, "they do not pile up"
