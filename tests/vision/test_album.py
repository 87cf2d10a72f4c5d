"""Lines that stand for the pictures of questions: saved, shown, typed again, and opened."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.vision import album
from dflash_mlx.vision.album import Album, bare, dropped, has_picture, shown
from support.pictures import picture


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "my shot, 2.png"
    found.write_bytes(picture("red", (9, 7)))
    return found


def asked(question: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": question}]


def test_a_line_names_the_picture_and_is_taken_away_or_shortened(file):
    question = "what is it?" + Album().line(file)
    assert str(file.resolve()) in question and has_picture(question)
    assert bare(question) == "what is it?"
    assert shown(question) == "what is it?\n[my shot, 2.png, 9 x 7 pixels]"
    assert str(file.parent) not in shown(question) and not has_picture(shown(question))


def test_pictures_come_before_the_words_of_their_question(file):
    book = Album()
    question = "what is it?" + 2 * book.line(file)
    (message,) = book.opened(asked(question))
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]
    assert message["content"][0]["picture"].width == 9
    assert message["content"][-1]["text"] == "what is it?"
    assert book.opened(asked("words")) == asked("words")
    assert book.opened(asked(question, "assistant")) == asked(question, "assistant")


def test_a_picture_stays_in_memory_and_a_later_start_says_what_became_of_its_file(file):
    book = Album()
    question = asked("what is it?" + book.line(file))
    file.write_bytes(picture("blue", (9, 7)))
    assert book.opened(question)[0]["content"][0]["picture"].pixels().getpixel((0, 0))[0] == 255
    with pytest.raises(DFlashError, match="not the picture"):
        Album().opened(question)
    file.unlink()
    with pytest.raises(DFlashError, match="my shot, 2.png"):
        Album().opened(question)
    book.clear()
    with pytest.raises(DFlashError, match="No such file"):
        book.opened(question)
    file.write_bytes(picture("red", (9, 7)))
    assert Album().opened(question)[0]["content"][0]["type"] == "image"


def test_no_more_than_a_limit_of_pictures_stays_in_memory(file, monkeypatch):
    monkeypatch.setattr(album, "KEPT", 1)
    book = Album()
    first = asked(book.line(file))
    book.opened(first)
    file.write_bytes(picture("blue"))
    book.line(file)
    with pytest.raises(DFlashError, match="not the picture"):
        book.opened(first)


@pytest.mark.parametrize("spelled", ["'{}'", '"{}"', "{escaped}", "file://{quoted}", "'{}' '{}'"])
def test_the_names_of_dropped_pictures_become_mentions(file, spelled):
    name, many = str(file), 2 if " " in spelled else 1
    text = spelled.format(name, name, escaped=name.replace(" ", r"\ "), quoted=quote(name))
    assert dropped(text + " ") == many * f'@"{name}" '


@pytest.mark.parametrize(
    "text", ["", "words", "/no/such.png", "shot.png", "'unclosed", "\0.png", "/etc/passwd", "a\nb"]
)
def test_other_pastes_stay_what_they_are(text):
    assert dropped(text) == ""
