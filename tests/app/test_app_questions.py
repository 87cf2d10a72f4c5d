"""Questions that wait, are asked again or changed; answers that are kept while they grow."""

import threading

import pytest

from dflash_chat.conversation import UNFINISHED, Conversation, Turn
from dflash_chat.keeper import Keeper
from dflash_chat.prompt import Prompt
from dflash_chat.store import Store
from support.app_scripts import (
    ANSWER,
    ScriptedBackend,
    answered,
    begun,
    goes_on,
    in_chat,
    notices,
    rounds_of,
    say,
    screen_text,
    until,
)


def gated():
    return ScriptedBackend(gate=threading.Semaphore(1))


def saved(app):
    """The turns of the conversation on screen, as they are on disk."""
    store = Store(app.store.folder)
    if not store.holds(app.conversation):
        return []
    return store.read(store.file_of(app.conversation)).conversation.turns


def asked(backend):
    """The last question of every request."""
    return [request.messages[-1]["content"] for request in backend.requests]


async def settled(app, pilot, backend, requests):
    """Wait until so many questions were answered and what is on screen is on disk."""

    def there():
        turns = app.conversation.turns
        same = [(t.content, t.ending) for t in saved(app)] == [(t.content, t.ending) for t in turns]
        over = app.listener.job is None and turns and turns[-1].role == "assistant"
        return len(backend.requests) == requests and over and same

    await until(there, pilot)


BROKEN = [*rounds_of(ANSWER)[:2], MemoryError()]


# A question waits while an answer is written


@in_chat(gated)
async def test_questions_asked_meanwhile_wait_are_shown_and_sent_one_after_the_other(
    app, pilot, backend
):
    await begun(app, pilot, "first")
    for question in ("second", "third"):
        await say(app, pilot, question)
        assert app.prompt.text == ""
    for command in ("/retry", "/edit"):
        await say(app, pilot, command)
    assert all("Esc" in notice for notice in notices(app)) and len(notices(app)) == 2
    assert "waiting: second and 1 more" in screen_text(app)
    assert asked(backend) == ["first"]
    backend.gate.release(1000)
    await until(lambda: len(app.conversation.turns) == 6, pilot)
    assert asked(backend) == ["first", "second", "third"]
    assert len(backend.requests[2].messages) == 5, "each with the answers before it"
    assert "waiting" not in screen_text(app)


@in_chat(gated)
async def test_up_takes_waiting_questions_back_in_front_of_what_is_typed(app, pilot, backend):
    await begun(app, pilot, "first", "second", "third")
    await pilot.press("x", "up")
    assert app.prompt.text == "second\nthird\nx"
    assert "waiting" not in screen_text(app)
    await goes_on(app, pilot, backend)
    assert asked(backend) == ["first"]
    assert app.prompt.text == "second\nthird\nx"


@in_chat(gated)
async def test_escape_stops_the_answer_and_sends_nothing_that_waits(app, pilot, backend):
    await begun(app, pilot, "first", "second")
    await pilot.press("escape")
    await until(lambda: "stopping" in screen_text(app), pilot)
    backend.gate.release(1000)
    await until(lambda: app.listener.job is None and app.prompt.text, pilot)
    assert app.conversation.turns[-1].ending == "stopped"
    assert "stopping" not in screen_text(app)
    assert app.prompt.text == "second"
    assert asked(backend) == ["first"]


@in_chat(lambda: ScriptedBackend([BROKEN, ANSWER], gate=threading.Semaphore(1)))
async def test_an_answer_that_breaks_keeps_what_was_said_and_gives_back_what_waits(
    app, pilot, backend
):
    await begun(app, pilot, "first", "second")
    backend.gate.release(1000)
    await until(lambda: notices(app), pilot)
    assert "there is not enough memory" in notices(app)[0]
    assert app.conversation.turns[-1].ending == "failed" and app.conversation.turns[-1].content
    assert app.prompt.text == "second"
    assert asked(backend) == ["first"]
    await answered(app, pilot, "again")


@in_chat(gated)
async def test_what_waits_when_the_user_leaves_is_in_the_line_the_next_time(app, pilot, backend):
    await begun(app, pilot, "first", "second", "third")
    kept = [turn.content for turn in app.listener.unfinished[-2:]]
    assert kept == ["second", "third"], "and what is saved meanwhile has them, too"
    app.run_worker(app.action_quit())
    await until(lambda: app._exit, pilot)
    backend.gate.release(1000)
    store = Store(app.store.folder)
    conversation = store.open(store.entries()[0].file).conversation
    assert conversation.take_unanswered() == "second\n\nthird"
    assert [turn.ending for turn in conversation.turns] == ["", "stopped"]


@in_chat(lambda: ScriptedBackend(prefills=[(10, 100), (20, 100)]))
async def test_stopping_is_said_until_the_prompt_is_left(app, pilot, backend):
    await say(app, pilot, "long prompt")
    await until(lambda: "10 of 100 tokens" in screen_text(app), pilot)
    await say(app, pilot, "and more")
    await pilot.press("ctrl+c")
    await until(lambda: "stopping" in screen_text(app), pilot)
    assert app.listener.job is not None
    await goes_on(app, pilot, backend)
    assert app.conversation.turns == []
    assert "stopping" not in screen_text(app) and "of 100 tokens" not in screen_text(app)
    assert app.prompt.text == "long prompt\nand more"


# An answer is saved while it grows


@in_chat(gated)
async def test_an_answer_is_on_disk_while_it_is_written_and_whole_at_its_end(
    app, pilot, backend, monkeypatch
):
    monkeypatch.setattr("dflash_chat.listener.SAVE_EVERY", 0.0)
    await say(app, pilot, "What meets?")
    await until(lambda: len(saved(app)) == 2, pilot)
    assert saved(app)[1] == Turn("assistant", rounds_of(ANSWER)[0].text, UNFINISHED)
    assert app.conversation.turns == [Turn("user", "What meets?")]
    await say(app, pilot, "/rename Rivers")
    assert len(saved(app)) == 2, "whatever else is saved meanwhile"
    backend.gate.release(1000)
    await settled(app, pilot, backend, 1)
    assert (saved(app)[1].content, saved(app)[1].ending) == (ANSWER, "stop")


@pytest.fixture
def killed(tmp_path):
    """A conversation whose program was killed while it answered."""
    turns = [Turn("user", "one"), Turn("assistant", "It is", UNFINISHED)]
    Store(tmp_path / "talks").save(Conversation(turns=turns))


@in_chat(lambda killed: None, resume=True)
async def test_an_answer_that_was_broken_off_says_so_and_can_be_asked_for_again(
    app, pilot, backend
):
    assert "It is" in screen_text(app)
    assert "broken off here; /retry" in screen_text(app)
    await say(app, pilot, "/retry")
    await settled(app, pilot, backend, 1)
    assert asked(backend) == ["one"]
    assert app.conversation.turns[1].content == ANSWER


@in_chat(gated)
async def test_two_windows_part_once_though_an_answer_is_saved_often(
    app, pilot, backend, monkeypatch
):
    monkeypatch.setattr("dflash_chat.listener.SAVE_EVERY", 0.0)
    await say(app, pilot, "mine")
    await until(lambda: len(saved(app)) == 2, pilot)
    other = Store(app.store.folder)
    theirs = other.open(other.file_of(app.conversation)).conversation
    theirs.turns.append(Turn("user", "theirs"))
    other.save(theirs)
    backend.gate.release(1000)
    await settled(app, pilot, backend, 1)
    questions = sorted(other.read(e.file).conversation.questions for e in other.entries())
    assert questions == [["mine"], ["mine", "theirs"]]
    assert saved(app)[1].content == ANSWER


# The last question again


@in_chat(lambda: ScriptedBackend(["one", "two", "three"]))
async def test_retry_answers_again_and_keeps_the_old_answer_as_a_conversation(app, pilot, backend):
    await answered(app, pilot, "first")
    await answered(app, pilot, "second")
    await say(app, pilot, "/retry")
    await settled(app, pilot, backend, 3)
    assert backend.requests[2].messages == backend.requests[1].messages
    assert [turn.content for turn in app.conversation.turns] == ["first", "one", "second", "three"]
    stored = {e.title: app.store.read(e.file).conversation for e in app.store.entries()}
    assert {name: talk.turns[-1].content for name, talk in stored.items()} == {
        "first": "two",
        "first (2)": "three",
    }
    assert "/temperature" in notices(app)[-1], "greedy answers do not change"
    await say(app, pilot, "/temperature 0.7")
    await say(app, pilot, "/retry")
    await settled(app, pilot, backend, 4)
    assert notices(app) == [], "and sampled ones do"
    app.system = "\ud800"
    await say(app, pilot, "/retry")
    assert app.prompt.text == "second" and notices(app), "it can no longer be sent"


@in_chat(lambda: ScriptedBackend(["one", "two"]))
async def test_a_line_that_was_sent_is_not_sent_again_by_the_same_key(app, pilot, backend):
    app.prompt.put("first")
    for _ in range(2):
        app.prompt.post_message(Prompt.Sent("first", "first"))
    await settled(app, pilot, backend, 1)
    assert [turn.content for turn in app.conversation.turns] == ["first", "one"]
    assert app.prompt.waiting == []


def test_a_conversation_that_another_window_answered_is_not_deleted(tmp_path):
    ours, theirs = Store(tmp_path), Store(tmp_path)
    ours.save(Conversation(turns=[Turn("user", "q")]))
    (entry,) = ours.entries()
    opened = ours.open(entry.file).conversation
    answered = theirs.open(entry.file).conversation
    answered.turns.append(Turn("assistant", "a"))
    theirs.save(answered)
    opened.turns.clear()
    Keeper(ours).save(opened).result(60)
    assert [turn.content for turn in ours.read(entry.file).conversation.turns] == ["q", "a"]


@in_chat()
async def test_edit_puts_the_last_question_back_and_what_followed_stays(app, pilot, backend):
    for number, (wrong, right) in enumerate((("frst", "first"), ("secnd", "second")), start=1):
        await answered(app, pilot, wrong)
        await say(app, pilot, "/edit")
        await until(lambda w=wrong: app.prompt.text == w, pilot)
        assert wrong not in "".join(turn.content for turn in app.conversation.turns)
        await say(app, pilot, right)
        await settled(app, pilot, backend, 2 * number)
    assert app.conversation.questions == ["first", "second"]
    kept = {e.title: app.store.read(e.file).conversation.questions for e in app.store.entries()}
    assert sorted(kept.values()) == [["first", "secnd"], ["first", "second"], ["frst"]]
    assert kept["frst"] == ["frst"], "an edited first question names its conversation anew"


@in_chat()
async def test_nothing_is_asked_again_that_cannot_be_kept(app, pilot, backend, monkeypatch):
    await say(app, pilot, "/retry")
    assert "ask something first" in notices(app)[-1]
    await answered(app, pilot, "first")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for number, command in enumerate(("/retry", "/edit"), start=1):
        await say(app, pilot, command)
        await until(lambda n=number: str(notices(app)).count("No space left") == n, pilot)
    monkeypatch.undo()
    assert [turn.content for turn in app.conversation.turns] == ["first", ANSWER]


def test_a_branch_counts_on_and_takes_no_year_for_a_count():
    for title, following in (("a", "a (2)"), ("a (2)", "a (3)"), ("a (2024)", "a (2024) (2)")):
        turns = [Turn("user", "q"), Turn("assistant", "x")]
        assert Conversation(title=title, turns=turns).before_last_question().title == following
