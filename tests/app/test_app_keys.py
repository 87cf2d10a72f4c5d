"""The footer, which follows the moment; /continue; the draft view where it changed."""

import re

import pytest
from textual.binding import Binding

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.store import Store
from support.app_scripts import ANSWER, ScriptedBackend, gated, in_chat

COUNTED = "one two three four five six seven eight nine ten eleven twelve"


async def keys(chat, *there, gone=()):
    """Wait until the last line names these keys, and none of the others."""

    def told():
        line = chat.text.splitlines()[-1]
        return all(key in line for key in there) and not any(key in line for key in gone)

    await chat.until(told)


@in_chat(lambda: gated(1), size=(120, 30))
async def test_the_footer_tells_what_keys_do_now(chat, app, backend, monkeypatch):
    monkeypatch.setattr("dflash_chat.chat_app.MAC", False)
    always = "F2/^t who guessed", "^q leave", "^p palette"
    await keys(chat, *always, gone=("stop", "send", "complete", "figures", "race", "copy"))
    await chat.press("h")
    await keys(chat, "send", "^j new line", *always)
    await chat.press("backspace", "/")
    await keys(chat, "tab complete", "esc close")
    await chat.press("backspace")
    await chat.begun("What meets?")
    await keys(chat, "esc stop", "F3/^g figures", *always, gone=("send", "race"))
    await chat.goes_on()
    await keys(chat, "F4/^r race", "^o copy code", *always, gone=("stop",))
    backend.hold(0)
    await chat.say("/retry")
    await keys(chat, "esc stop", gone=("race",))
    await chat.goes_on()
    await keys(chat, "F4/^r race", gone=("stop",))
    await chat.press("f2", "tab")
    await keys(chat, "←→ rounds", "esc back", gone=("send",))
    await chat.press("escape", "h")
    await keys(chat, "send", gone=("rounds",))
    assert app.prompt.text == "h"


@in_chat()
async def test_a_macbook_is_told_letters_alone(chat, app, monkeypatch):
    race = Binding("ctrl+r", "", "")
    for mac, shown in ((True, "^r"), (False, "F4/^r")):
        monkeypatch.setattr("dflash_chat.chat_app.MAC", mac)
        assert app.get_key_display(race) == shown


@in_chat()
async def test_a_key_that_is_not_told_does_nothing(chat, app, backend):
    await chat.press("f3", "f4", "ctrl+o", "escape", "enter")
    assert app.screen is app.base and chat.notices == [] and backend.requests == []


# /continue


@in_chat(lambda: ScriptedBackend([COUNTED, " and so on.", "never"]))
async def test_a_cut_answer_is_written_on_in_its_place(chat, app, backend):
    await chat.say("/continue")
    assert "there is no answer yet" in chat.notices[-1]
    backend.hold(1)
    await chat.say("Count.")
    await chat.reaches(1)
    await chat.press("escape")
    await chat.goes_on()
    said = app.conversation.turns[1].content
    assert said and said != COUNTED and "/continue goes on" in chat.text
    backend.gate = None
    await chat.press("f2")
    await chat.say("/continue")
    await chat.until(lambda: app.conversation.turns[1:] and app.listener.job is None)
    assert [m["content"] for m in backend.requests[-1].messages] == ["Count.", said]
    assert [t.content for t in app.conversation.turns] == ["Count.", f"{said} and so on."]
    assert app.conversation.questions == ["Count."] and len(backend.requests) == 2
    assert chat.shown_answer == f"{said} and so on."
    pieces = app.draft.pieces_of(f"{said} and so on.")
    assert "".join(text for text, _ in pieces) == f"{said} and so on.", "and all by whom"
    assert re.sub(r"[▏\s]", "", f"{said} and so on.") in re.sub(r"[▏\s]", "", chat.text)
    await chat.until(lambda: [t.content for t in chat.saved] == ["Count.", f"{said} and so on."])
    await chat.say("/continue")
    assert "the last answer is whole" in chat.notices[-1]


@in_chat(lambda: gated(0))
async def test_of_the_last_answer_alone_it_is_said_that_it_may_go_on(chat, app, backend):
    backend.gate.release(1)
    await chat.begun("Count.")
    await chat.press("escape")
    await chat.goes_on()
    ends = [ending.render().plain for ending in app.query(".ending")]
    assert ends == ["stopped here; /continue goes on"]
    backend.gate = None
    await chat.answered("Again.")
    assert [ending.render().plain for ending in app.query(".ending")] == ["stopped here", ""]
    await app.transcript.show(app.conversation.turns)
    assert [ending.render().plain for ending in app.query(".ending")] == ["stopped here", ""]


@pytest.fixture
def cut(tmp_path):
    """A conversation whose answer was cut, which a started chat resumes."""
    turns = [Turn("user", "Count."), Turn("assistant", COUNTED, "length")]
    Store(tmp_path / "talks").save(Conversation(turns=turns))


@in_chat(lambda cut: ScriptedBackend([" and so on.", "", ANSWER]), resume=True)
async def test_nobody_is_said_to_have_guessed_what_an_earlier_start_wrote(chat, app, backend):
    await chat.press("f2")
    await chat.say("/continue")
    whole = f"{COUNTED} and so on."
    await chat.until(lambda: len(chat.saved) == 2 and chat.saved[1].content == whole)
    assert app.draft.pieces_of(whole) == [] and "eleven" in chat.text
    for text in ("", ANSWER):
        await chat.answered("again")
        assert "".join(piece for piece, _ in app.draft.pieces_of(text)) == text
    assert app.draft.pieces_of(ANSWER)[0][1] != "lines"


@in_chat(lambda: gated(0))
async def test_a_cut_answer_is_never_lost_when_nothing_follows(chat, app, backend):
    backend.gate.release(1)
    await chat.begun("Count.")
    await chat.press("escape")
    await chat.goes_on()
    said = app.conversation.turns[1].content
    backend.hold(0)
    await chat.say("/continue")
    await chat.until(lambda: app.listener.job is not None and app.listener.job.begun.is_set())
    assert [turn.content for turn in app.listener.unfinished] == [said], "as it is saved meanwhile"
    await chat.press("escape")
    await chat.goes_on()
    turns = [(turn.content[: len(said)], turn.ending) for turn in app.conversation.turns]
    assert turns == [("Count.", ""), (said, "stopped")]


@in_chat(lambda cut: ScriptedBackend([ValueError("no memory"), " and so on."]), resume=True)
async def test_a_cut_answer_that_an_error_stopped_can_be_gone_on_with(chat, app, backend):
    await chat.say("/continue")
    await chat.until(lambda: "no memory" in "".join(chat.notices) and app.listener.job is None)
    assert [turn.content for turn in app.conversation.turns] == ["Count.", COUNTED]
    await chat.say("/continue")
    await chat.until(lambda: len(chat.saved) == 2 and chat.saved[1].content.endswith("so on."))


# What gives its room to what


@in_chat(lambda: gated(4), size=(80, 24))
async def test_the_tree_has_the_room_of_a_small_screen_and_the_prose_what_is_left(chat, app):
    await chat.press("f2")
    await chat.say("What meets?")
    await chat.reaches(4)
    await chat.until(lambda: not app.listener.dirty)
    assert "more lines" not in chat.text and "then" in chat.text
    assert "One pass" not in chat.text, "not the half of it either"
    assert re.search(r"Round \d of \d", chat.text)
    await chat.goes_on()
    await chat.shows("One pass of the large model")


@pytest.mark.parametrize("mistake", ["/nonsense", "/copy"])
def test_errors_go_with_the_next_question(mistake, tmp_path):
    @in_chat()
    async def steps(chat, app):
        await chat.say(mistake)
        assert chat.notices
        await chat.answered()
        assert chat.notices == [] and ANSWER[:3] in chat.text

    steps(tmp_path=tmp_path)
