"""Pictures in the chat: `@picture.png` and dropped files, what is shown, saved and asked again."""

from __future__ import annotations

import pytest
from textual import events

from dflash_chat.store import Store, newest
from dflash_mlx.core.errors import DFlashError
from support.app_scripts import ScriptedBackend, in_chat, pair_of
from support.pictures import picture


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with pictures, of which one is broken."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my shot.png").write_bytes(picture("red", (9, 7)))
    (folder / "other.jpg").write_bytes(picture("blue", kind="JPEG"))
    (folder / "broken.png").write_bytes(picture()[:40])
    return folder


def sees(app, yes=True):
    app.pair = pair_of()
    app.pair.target.sees = yes


def content(request):
    return request.opened[-1]["content"]


@in_chat()
async def test_a_picture_goes_with_the_question_and_is_shown_as_a_label(chat, app, backend, here):
    sees(app)
    await chat.answered('What is on @"my shot.png" and @other.jpg?')
    first, second, words = content(backend.requests[0])
    assert (first["picture"].width, second["picture"].height) == (9, 6)
    assert words["text"] == 'What is on @"my shot.png" and @other.jpg?'
    assert "[my shot.png, 9 x 7 pixels]" in chat.text and "sha256" not in chat.text
    await chat.answered("And the other?")
    assert content(backend.requests[1]) == "And the other?"
    assert backend.requests[1].opened[0]["content"][0] == first, "earlier ones stay"


@in_chat()
async def test_a_dropped_picture_is_mentioned_and_other_pastes_are_texts(chat, app, backend, here):
    sees(app)
    for pasted in (f"'{here}/my shot.png' ", "/no/such.png"):
        app.post_message(events.Paste(pasted))
        await chat.pause()
    await chat.until(lambda: app.prompt.text == f'@"{here}/my shot.png" /no/such.png')


@in_chat()
async def test_a_picture_that_cannot_go_along_leaves_the_question_in_the_line(
    chat, app, backend, here
):
    sees(app)
    for question, word in (("a @broken.png", "damaged"), ("a @none.png", "no file none.png")):
        await chat.say(question)
        await chat.until(lambda word=word: word in "".join(chat.notices[-1:]))
        assert app.prompt.text == question
    sees(app, False)
    await chat.say("a @other.jpg")
    await chat.until(lambda: "does not see" in chat.notices[-1])
    assert app.prompt.text == "a @other.jpg" and not backend.requests


@in_chat(lambda: ScriptedBackend(["so"]))
async def test_a_saved_conversation_has_its_pictures_by_place_and_digest(chat, app, backend, here):
    sees(app)
    await chat.answered("What is on @other.jpg?")
    assert await app.keeper.finish(60)
    (file,) = app.store.folder.glob("*.jsonl")
    assert str(here / "other.jpg") in file.read_text() and "sha256" in file.read_text()
    opened = newest(Store(app.store.folder))
    app.album.clear()  # as after a restart
    await app.show_conversation(opened.conversation)
    await chat.shows("[other.jpg, 8 x 6 pixels]")
    await chat.answered("And?")
    assert backend.requests[-1].opened[0]["content"][0]["picture"].width == 8
    (here / "other.jpg").unlink()
    app.album.clear()
    with pytest.raises(DFlashError, match="other.jpg"):
        _ = backend.requests[-1].opened


@in_chat()
async def test_a_question_with_a_picture_is_edited_as_it_was_typed(chat, app, backend, here):
    sees(app)
    await chat.answered("What is on @other.jpg?")
    await chat.say("/edit")
    await chat.until(lambda: app.prompt.text)
    assert app.prompt.text == "What is on @other.jpg?"
    await chat.press("enter")
    await chat.until(lambda: len(backend.requests) == 2)
    assert len(content(backend.requests[1])) == 2, "once, not twice"
    await chat.is_over()
    app.prompt.pastes.__init__()  # as after a restart
    await chat.press("up")
    assert app.prompt.text == "What is on @other.jpg?"
    app.prompt.put("")
    await chat.say("/retry")
    await chat.until(lambda: len(backend.requests) == 3)
    assert len(content(backend.requests[2])) == 2


@in_chat(lambda: ScriptedBackend(["so"]))
async def test_what_is_exported_or_shared_tells_no_place_of_a_picture(chat, app, backend, here):
    sees(app)
    await chat.answered("What is on @other.jpg?")
    await chat.say("/export talk.md")
    await chat.until(lambda: (here / "talk.md").exists() and chat.notices)
    told = (here / "talk.md").read_text()
    assert "[other.jpg, 8 x 6 pixels]" in told and str(here) not in told
