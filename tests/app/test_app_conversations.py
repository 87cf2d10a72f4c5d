"""Conversations in the chat: resumed, listed, renamed, and very long."""

import asyncio

import pytest
from textual import events
from textual.widgets import Input, OptionList

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.open_screen import OpenScreen
from dflash_chat.screens import ConfirmScreen
from dflash_chat.store import Store
from dflash_chat.transcript import MOST_NOTICES
from dflash_chat.window import Window
from support.app_scripts import ANSWER, drive, fill_disk, gated, in_chat


def test_a_conversation_is_resumed_where_it_was(tmp_path):
    async def first(chat):
        await chat.answered("What meets?")

    async def second(chat, backend):
        assert "What meets?" in chat.text
        assert "That is all." in chat.text
        assert "of drafts accepted" in chat.text, "with the figures of its last answer"
        await chat.answered("And then?")
        assert len(backend.requests[0].messages) == 3

    drive(first, tmp_path)
    drive(second, tmp_path, resume=True)
    assert len(Store(tmp_path).entries()) == 1


def test_a_question_of_the_command_line_goes_on_with_what_is_resumed(tmp_path):
    async def asked(chat, backend):
        await chat.until(lambda: len(chat.saved) == 4)
        assert [m["content"] for m in backend.requests[0].messages][::2] == ["one", "And then?"]
        assert chat.app.prompt.text == ""

    async def behind(chat, app, backend):
        assert app.prompt.text == "lost\nAnd then?" and not backend.requests, "neither is lost"

    turns = [Turn("user", "one"), Turn("assistant", ANSWER)]
    for ending, steps in (([], asked), ([Turn("user", "lost")], behind)):
        Store(tmp_path).save(Conversation(turns=turns + ending))
        drive(steps, tmp_path, resume=True, first="And then?")


@pytest.fixture
def damaged(tmp_path):
    """Two questions, the second with half an answer, which a started chat resumes."""
    turns = [Turn("user", "one"), Turn("assistant", ANSWER), Turn("user", "lost")]
    store = Store(tmp_path / "talks")
    store.save(Conversation(turns=turns))
    (file,) = store.folder.iterdir()
    file.write_bytes(file.read_bytes() + b'{"role": "assistant", "content": "half')


@in_chat(lambda damaged: None, resume=True)
async def test_a_damaged_conversation_opens_with_the_question_that_was_lost(chat, app, backend):
    assert "is damaged; 3 messages were read" in chat.notices[0]
    assert app.prompt.text == "lost"
    await chat.press("enter")
    await chat.until(lambda: len(app.conversation.turns) == 4)
    assert [m["content"] for m in backend.requests[0].messages][-1] == "lost"


async def listed(chat, *questions):
    """Ask each in a conversation of its own, and open the list of them."""
    for question in questions:
        await chat.answered(question)
        if len(questions) > 1:
            await chat.say("/new")
            assert chat.app.conversation.turns == []
    await chat.say("/open")
    assert isinstance(chat.app.screen, OpenScreen)
    options = chat.app.screen.query_one(OptionList)
    await chat.until(lambda: entries_in(options) == len(questions))
    return options


def entries_in(options):
    """How many conversations are listed; what stands above those of a day is no option."""
    return sum(not option.disabled for option in options.options)


@in_chat(size=(80, 24))
async def test_conversations_are_listed_opened_renamed_and_deleted(chat, app):
    options = await listed(chat, "first talk", "second talk")
    assert "first talk" in chat.text and "second talk" in chat.text
    await chat.press("ctrl+r", "down", "ctrl+d")
    assert options.highlighted == 1 and isinstance(app.screen, OpenScreen), "a title is typed"
    await chat.press("escape", "down", "ctrl+r")
    app.screen.query_one("#title", Input).value = "Rivers"
    await chat.press("enter")
    await chat.shows("Rivers")
    options.highlighted = 2
    await chat.press("ctrl+d")
    assert isinstance(app.screen, ConfirmScreen)
    await chat.press("y")
    await chat.until(lambda: entries_in(options) == 1)
    await chat.press("enter")
    await chat.until(lambda: app.conversation.turns)
    assert app.conversation.shown_title == "Rivers"


@in_chat(size=(80, 24))
async def test_typing_in_the_list_finds_words_of_titles_and_texts_in_any_case(chat, app, backend):
    backend.answers = ["About Rivers: nothing.", "About Lakes: nothing."]
    options = await listed(chat, "Rivers of Mainz", "Lakes of Bern")
    for typed, found in (("NOTHING mainz", ["Rivers"]), ("of", ["Lakes", "Rivers"]), ("oslo", [])):
        app.screen.query_one("#search", Input).value = ""
        await chat.press(*("space" if c == " " else c for c in typed))
        await chat.until(lambda f=found: entries_in(options) == len(f))
        assert all(name in chat.text for name in found)
    assert "No conversation has all these words." in chat.text
    app.screen.query_one("#search", Input).value = ""
    await chat.press(*"bern", "backspace", *"n", "enter")
    await chat.until(lambda: app.conversation.turns)
    assert app.conversation.questions == ["Lakes of Bern"]


@in_chat()
async def test_rename_delete_and_export(chat, app, backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    await chat.answered("Why?")
    await chat.say("/rename Big Question")
    assert "Big Question" in chat.text
    await chat.say("/export")
    await chat.until(lambda: "Written to" in chat.notices[-1])
    assert "# Big Question" in (tmp_path / "big-question.md").read_text()
    assert not backend.forgotten
    for name, problem in (
        ("big-question.md", "exists already"),
        ("~no-such-user/talk.md", "; name "),
        ("x" * 5000, "xxx"),
        ("no/such/folder/talk.md", "no/such/folder"),
    ):
        await chat.say(f"/export {name}")
        await chat.until(lambda p=problem: p in chat.notices[-1])
    await chat.say("/delete")
    assert app.screen.query_one(".dialog").size.height < 5, "a small question is a small box"
    await chat.press("n")
    assert app.conversation.turns
    await chat.say("/delete")
    await chat.press("y")
    await chat.until(lambda: not app.conversation.turns)
    assert app.store.entries() == []
    await chat.until(lambda: backend.forgotten == 1)
    await listed(chat, "gone")
    await chat.press("ctrl+d", "y", "escape")
    await chat.until(lambda: not app.conversation.turns)
    assert "gone" not in chat.text, "deleted in the list it leaves the screen, too"
    assert app.store.entries() == []
    await chat.until(lambda: backend.forgotten == 2)


def long_talk(count):
    return [
        Turn("user" if i % 2 == 0 else "assistant", f"m{i} " + "word " * 400) for i in range(count)
    ]


async def widgets(chat, count):
    chat.app.conversation.turns[:] = long_talk(count)
    await chat.app.transcript.show(chat.app.conversation.turns)
    await chat.pause()
    return len(chat.app.query("*"))


@in_chat()
async def test_a_conversation_of_500_messages_costs_no_more_than_a_short_one(chat, app):
    short = await widgets(chat, 40)
    long = await widgets(chat, 500)
    assert long == short
    assert "… 470 earlier messages" in str(app.query_one("#earlier").render())
    bottom = app.transcript.scroll_y
    await chat.press("pageup")
    await chat.until(lambda: app.transcript.scroll_y < bottom)
    for page in range(1, 4):
        app.transcript.scroll_home(animate=False)
        await chat.until(lambda n=page: app.transcript.window.start == 470 - 15 * n)
        assert len(app.query("*")) <= long + 2
    await chat.press("a")
    assert app.prompt.text == "a"
    await chat.answered("and now")
    assert app.transcript.window.at_end
    assert "That is all." in chat.text
    assert len(app.query("*")) <= long + 20


@in_chat(lambda: gated(1))
async def test_scrolling_up_stays_there_while_an_answer_streams(chat, app):
    app.conversation.turns[:] = long_talk(100)
    await app.transcript.show(app.conversation.turns)
    await chat.begun("What meets?")
    app.transcript.scroll_home(animate=False)
    await chat.until(lambda: not app.transcript.window.at_end)
    place = app.transcript.window
    assert 0 < app.transcript.scroll_y < app.transcript.max_scroll_y
    await chat.goes_on()
    assert app.transcript.window.start == place.start
    assert app.conversation.turns[-1].content == ANSWER

    def at_the_end():
        app.transcript.scroll_end(animate=False)
        return "That is all." in chat.text

    await chat.until(at_the_end)


@in_chat(lambda: gated(1))
async def test_a_page_may_be_turned_while_the_answer_is_drawn(chat, app):
    transcript = app.transcript
    app.conversation.turns[:] = long_talk(60)
    await transcript.show(app.conversation.turns)
    await chat.begun("What meets?")
    for turn in (Window.earlier, Window.later):
        page = asyncio.create_task(transcript._turn_page(turn))
        while not page.done():
            transcript.receive("and ")
            await transcript.draw()
            await asyncio.sleep(0)
        await page
    await chat.goes_on()
    assert "and and" in app.conversation.turns[-1].content


@pytest.fixture
def blocked(tmp_path):
    """A file where the folder of the conversations should be."""
    (tmp_path / "talks").write_text("in the way")


@in_chat(lambda blocked: None)
async def test_a_folder_that_cannot_be_written_is_said_once(chat, app, backend):
    await chat.answered("only in memory")
    assert len([n for n in chat.notices if "is not saved" in n]) == 1
    assert "--conversations" in chat.notices[-1]
    await chat.say("/open")
    assert "cannot read" in chat.text
    await chat.press("escape")
    await chat.until(lambda: app.screen is app.base)
    await chat.answered("still here?")
    assert not [n for n in chat.notices if "is not saved" in n]
    assert len(backend.requests[-1].messages) == 3


@in_chat()
async def test_a_title_that_cannot_be_saved_is_said_and_enter_pressed_twice_opens_once(
    chat, app, monkeypatch
):
    await listed(chat, "first talk")
    fill_disk(monkeypatch)
    await chat.press("ctrl+r")
    app.screen.query_one("#title", Input).value = "Rivers"
    await chat.press("enter")
    await chat.shows("cannot write to")
    monkeypatch.undo()
    app.screen.query_one(OptionList).focus()
    for _ in range(2):
        app.post_message(events.Key("enter", "\r"))
    await chat.until(lambda: app.screen is app.base)
    await chat.answered("goes on")
    for _ in range(MOST_NOTICES + 5):
        await chat.say("/nonsense")
    assert len(app.query(".notice")) == MOST_NOTICES, "they do not pile up"
