"""Questions that wait, are asked again or changed; answers that are kept while they grow."""

import pytest

from dflash_chat.conversation import UNFINISHED, Conversation, Turn
from dflash_chat.keeper import Keeper
from dflash_chat.prompt import Prompt
from dflash_chat.store import Store
from support.app_scripts import ANSWER, ScriptedBackend, fill_disk, gated, in_chat, rounds_of


async def settled(chat, requests):
    """Wait until so many questions were answered and what is on screen is on disk."""
    app, backend = chat.app, chat.backend

    def there():
        turns = app.conversation.turns
        same = [(t.content, t.ending) for t in chat.saved] == [(t.content, t.ending) for t in turns]
        over = app.listener.job is None and turns and turns[-1].role == "assistant"
        return len(backend.requests) == requests and over and same

    await chat.until(there)


BROKEN = [*rounds_of(ANSWER)[:2], MemoryError()]


# A question waits while an answer is written


@in_chat(lambda: gated(1))
async def test_questions_asked_meanwhile_wait_and_are_sent_in_order(chat, app, backend):
    await chat.begun("first")
    for question in ("second", "third"):
        await chat.say(question)
        assert app.prompt.text == ""
    for command in ("/retry", "/edit"):
        await chat.say(command)
    assert all("Esc" in notice for notice in chat.notices) and len(chat.notices) == 2
    assert "waiting, up takes back: second · third" in chat.text
    assert backend.asked == ["first"]
    backend.gate.release(1000)
    await chat.until(lambda: len(app.conversation.turns) == 6)
    assert backend.asked == ["first", "second", "third"]
    assert len(backend.requests[2].messages) == 5, "each with the answers before it"
    assert "waiting" not in chat.text


@in_chat(lambda: gated(1))
async def test_up_takes_waiting_questions_back_in_front_of_what_is_typed(chat, app, backend):
    await chat.begun("first", "second", "third")
    await chat.press("x", "up")
    assert app.prompt.text == "second\nthird\nx"
    assert "waiting" not in chat.text
    await chat.goes_on()
    assert backend.asked == ["first"]
    assert app.prompt.text == "second\nthird\nx"


@in_chat(lambda: gated(1))
async def test_escape_stops_the_answer_and_sends_nothing_that_waits(chat, app, backend):
    await chat.begun("first", "second")
    await chat.press("escape")
    await chat.shows("stopping")
    backend.gate.release(1000)
    await chat.until(lambda: app.listener.job is None and app.prompt.text)
    assert app.conversation.turns[-1].ending == "stopped"
    assert "stopping" not in chat.text
    assert app.prompt.text == "second"
    assert backend.asked == ["first"]


@in_chat(lambda: gated(1, answers=[BROKEN, ANSWER]))
async def test_an_answer_that_breaks_gives_back_what_waits(chat, app, backend):
    await chat.begun("first", "second")
    backend.gate.release(1000)
    await chat.until(lambda: chat.notices)
    assert "there is not enough memory" in chat.notices[0]
    assert app.conversation.turns[-1].ending == "failed" and app.conversation.turns[-1].content
    assert app.prompt.text == "second"
    assert backend.asked == ["first"]
    await chat.answered("again")


@in_chat(lambda: gated(1))
async def test_what_waits_when_the_user_leaves_is_in_the_line_the_next_time(chat, app, backend):
    await chat.begun("first", "second", "third")
    kept = [turn.content for turn in app.listener.unfinished[-2:]]
    assert kept == ["second", "third"], "and what is saved meanwhile has them, too"
    app.run_worker(app.action_quit())
    await chat.until(lambda: app._exit)
    backend.gate.release(1000)
    store = Store(app.store.folder)
    conversation = store.open(store.entries()[0].file).conversation
    assert conversation.take_unanswered() == "second\n\nthird"
    assert [turn.ending for turn in conversation.turns] == ["", "stopped"]


@in_chat(lambda: ScriptedBackend(prefills=[(10, 100), (20, 100)]))
async def test_stopping_is_said_until_the_prompt_is_left(chat, app):
    await chat.say("long prompt")
    await chat.shows("10 of 100 tokens")
    await chat.say("and more")
    await chat.press("ctrl+c")
    await chat.shows("stopping")
    assert app.listener.job is not None
    await chat.goes_on()
    assert app.conversation.turns == []
    assert "stopping" not in chat.text and "of 100 tokens" not in chat.text
    assert app.prompt.text == "long prompt\nand more"


# An answer is saved while it grows


@in_chat(lambda: gated(1))
async def test_an_answer_is_on_disk_while_it_is_written(chat, app, backend, monkeypatch):
    monkeypatch.setattr("dflash_chat.listener.SAVE_EVERY", 0.0)
    await chat.say("What meets?")
    await chat.until(lambda: len(chat.saved) == 2)
    assert chat.saved[1] == Turn("assistant", rounds_of(ANSWER)[0].text, UNFINISHED)
    assert app.conversation.turns == [Turn("user", "What meets?")]
    await chat.say("/rename Rivers")
    assert len(chat.saved) == 2, "whatever else is saved meanwhile"
    backend.gate.release(1000)
    await settled(chat, 1)
    assert (chat.saved[1].content, chat.saved[1].ending) == (ANSWER, "stop")


@pytest.fixture
def killed(tmp_path):
    """A conversation whose program was killed while it answered."""
    turns = [Turn("user", "one"), Turn("assistant", "It is", UNFINISHED)]
    Store(tmp_path / "talks").save(Conversation(turns=turns))


@in_chat(lambda killed: None, resume=True)
async def test_an_answer_that_was_broken_off_says_so_and_can_be_asked_for_again(chat, app, backend):
    assert "It is" in chat.text
    assert "stopped here; /retry answers again, /continue goes on" in chat.text
    await chat.say("/retry")
    await settled(chat, 1)
    assert backend.asked == ["one"]
    assert app.conversation.turns[1].content == ANSWER


@in_chat(lambda: gated(1))
async def test_two_windows_part_once(chat, app, backend, monkeypatch):
    monkeypatch.setattr("dflash_chat.listener.SAVE_EVERY", 0.0)
    await chat.say("mine")
    await chat.until(lambda: len(chat.saved) == 2)
    other = Store(app.store.folder)
    theirs = other.open(other.file_of(app.conversation)).conversation
    theirs.turns.append(Turn("user", "theirs"))
    other.save(theirs)
    backend.gate.release(1000)
    await settled(chat, 1)
    questions = sorted(other.read(e.file).conversation.questions for e in other.entries())
    assert questions == [["mine"], ["mine", "theirs"]]
    assert chat.saved[1].content == ANSWER


# The last question again


@in_chat(lambda: ScriptedBackend(["one", "two", "three"]))
async def test_retry_answers_again_and_keeps_the_old_answer_as_a_conversation(chat, app, backend):
    await chat.answered("first")
    await chat.answered("second")
    await chat.say("/retry")
    await settled(chat, 3)
    assert backend.requests[2].messages == backend.requests[1].messages
    assert [turn.content for turn in app.conversation.turns] == ["first", "one", "second", "three"]
    stored = {e.title: app.store.read(e.file).conversation for e in app.store.entries()}
    assert {name: talk.turns[-1].content for name, talk in stored.items()} == {
        "first": "two",
        "first (2)": "three",
    }
    assert "/temperature" in chat.notices[-1], "greedy answers do not change"
    await chat.say("/temperature 0.7")
    await chat.say("/retry")
    await settled(chat, 4)
    assert chat.notices == [], "and sampled ones do"
    app.system = "\ud800"
    await chat.say("/retry")
    assert app.prompt.text == "second" and chat.notices, "it can no longer be sent"


@in_chat(lambda: ScriptedBackend(["one", "two"]))
async def test_a_line_that_was_sent_is_not_sent_again_by_the_same_key(chat, app):
    app.prompt.put("first")
    for _ in range(2):
        app.prompt.post_message(Prompt.Sent("first", "first"))
    await settled(chat, 1)
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
async def test_edit_puts_the_last_question_back_and_what_followed_stays(chat, app):
    for number, (wrong, right) in enumerate((("frst", "first"), ("secnd", "second")), start=1):
        await chat.answered(wrong)
        await chat.say("/edit")
        await chat.until(lambda w=wrong: app.prompt.text == w)
        assert wrong not in "".join(turn.content for turn in app.conversation.turns)
        await chat.say(right)
        await settled(chat, 2 * number)
    assert app.conversation.questions == ["first", "second"]
    kept = {e.title: app.store.read(e.file).conversation.questions for e in app.store.entries()}
    assert sorted(kept.values()) == [["first", "secnd"], ["first", "second"], ["frst"]]
    assert kept["frst"] == ["frst"], "an edited first question names its conversation anew"


@in_chat()
async def test_nothing_is_asked_again_that_cannot_be_kept(chat, app, monkeypatch):
    await chat.say("/retry")
    assert "ask something first" in chat.notices[-1]
    await chat.answered("first")

    fill_disk(monkeypatch)
    for number, command in enumerate(("/retry", "/edit"), start=1):
        await chat.say(command)
        await chat.until(lambda n=number: str(chat.notices).count("No space left") == n)
    monkeypatch.undo()
    assert [turn.content for turn in app.conversation.turns] == ["first", ANSWER]


def test_a_branch_counts_on_and_takes_no_year_for_a_count():
    for title, following in (("a", "a (2)"), ("a (2)", "a (3)"), ("a (2024)", "a (2024) (2)")):
        turns = [Turn("user", "q"), Turn("assistant", "x")]
        assert Conversation(title=title, turns=turns).before_last_question().title == following
