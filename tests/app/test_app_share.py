"""The picture of the last answer that `/share` draws for others."""

from __future__ import annotations

import errno
import os
import re
import sys
from xml.etree import ElementTree

import pytest
from PIL import Image

from dflash_chat import share as sharing
from dflash_chat.conversation import Conversation, Turn
from dflash_chat.draft_panel import DraftPanel
from dflash_chat.share import ANSWER_LINES, QUESTION_LINES, WIDTH, card, share
from dflash_chat.themes import THEMES
from dflash_mlx.client import DFlashError
from support.app_scripts import ANSWER, WORDS, ScriptedBackend, in_chat, rounds_of
from support.hostile import CONTROL, hostile_text

pytestmark = pytest.mark.filterwarnings("ignore:Glyph")
COLOURS = {name: theme.to_color_system().generate() for name, theme in THEMES.items()}
FIGURES = {
    "method": "d2sd",
    "tokens_per_second": 41.3,
    "times_plain": 2.5,
    "mean_accepted": 4.7,
    "generated_tokens": 120,
    "modes": "12 plain, 40 tree",
    "accepted_by_position": [0.8, 0.6],
}


def lines_of(text, sources=("first",), figures=(), question="Why?", model="M"):
    """A card whose words come from `sources` in turn."""
    words = re.findall(r"\s?\S+|\s", text)
    tokens = [(word, sources[i % len(sources)]) for i, word in enumerate(words) if sources]
    return card(question, Turn("assistant", text, "", {**FIGURES, **dict(figures)}), tokens, model)


def texts(lines):
    return [line.plain for line in lines]


def drawn(folder, lines, theme="dark"):
    """The SVG's root, the SVG as text, and the PNG."""
    said = share(lines, str(folder / "card"), "", COLOURS[theme])
    svg, png = folder / "card.svg", folder / "card.png"
    assert str(svg) in said and str(png) in said
    return ElementTree.fromstring(svg.read_text()), svg.read_text(), Image.open(png)


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_each_token_has_the_colour_of_who_guessed_it_and_the_legend_names_them(tmp_path, theme):
    lines = lines_of("Two rivers meet in Mainz", ("first", "target", "lookup"))
    _, svg, png = drawn(tmp_path, lines, theme)
    colours = COLOURS[theme]
    found = {name: svg.count(colours[name].lower()) for name in ("primary-muted", "accent-muted")}
    assert found == {"primary-muted": 2 + 1, "accent-muted": 1 + 1}, "words, and the label"
    assert colours["warning-muted"].lower() not in svg, "nobody's second draft"
    assert "<text" not in svg and 'href="#' in svg, "letters are in the file"
    assert png.width > 1200
    assert f"#{png.convert('RGB').getpixel((2, 2))[0]:02x}" == colours["background"][:3].lower()
    marks = next(text for text in texts(lines) if "draft" in text)
    assert marks.split("  ")[:3] == ["draft", "earlier text", "not guessed"]
    assert any("60% of the tokens were guessed" in text for text in texts(lines))


def test_speed_is_told_as_measured_and_no_ratio_that_is_not():
    told = texts(lines_of("Because."))
    assert "2.5x as fast as plain decoding" in told
    assert "41.3 tokens a second · 4.7 tokens a pass of the large model" in told
    assert any(text.startswith("dflash-chat  M · ") for text in told)
    for figures in ({"modes": "3 plain, 40 tree"}, {"generated_tokens": 19}, {"times_plain": 1.04}):
        assert not [text for text in texts(lines_of("x", figures=figures)) if "as fast" in text]
    assert not [
        text for text in texts(card("a", Turn("assistant", "b"), [], "M")) if "second" in text
    ]


def test_an_answer_whose_tokens_nobody_knows_is_drawn_without_colours(tmp_path):
    lines = lines_of("<think>no</think>Because it is so.", ())
    assert "Because it is so." in texts(lines)
    assert any("Who guessed is not known" in text for text in texts(lines))
    _, svg, _ = drawn(tmp_path, lines)
    assert COLOURS["dark"]["primary-muted"].lower() not in svg


def test_thoughts_and_folders_of_the_user_are_not_shown():
    told = texts(lines_of("<think> secret plan </think> So it is.", model="/home/me/models/Small"))
    assert not [text for text in told if "secret" in text or "home" in text]
    assert "So it is." in [text.strip() for text in told]


def test_of_an_answer_in_channels_only_the_final_one_is_shown():
    raw = ["◇", "analysis", "◇", "secret", "◇", "◇", "assistant", "◇", "final", "◇", "So it is."]
    answer = Turn("assistant", "<think>secret</think>So it is.", "", FIGURES)
    told = texts(card("Why?", answer, [(text, "first") for text in raw], "M"))
    assert "So it is." in told and "secret" not in "".join(told)


def test_a_long_answer_shows_its_beginning_and_says_how_much_more_there_is():
    told = texts(lines_of("\n".join(f"line {n}" for n in range(2000)), question="why " * 500))
    assert "line 0" in told and f"line {ANSWER_LINES - 2}" in told
    assert f"line {ANSWER_LINES - 1}" not in told
    assert f"… {2000 - ANSWER_LINES + 1} more lines" in told
    assert len(told) < ANSWER_LINES + QUESTION_LINES + 12
    assert max(map(len, told)) <= WIDTH


@pytest.mark.parametrize("seed", range(6))
def test_whatever_an_answer_says_is_drawn_and_nothing_of_it_is_obeyed(tmp_path, seed):
    text = hostile_text(seed) + "\ud800 \ufffe $x^{2$ \\frac -- ]]> --> <b>&amp;"
    lines = lines_of(text, question=text, model=text)
    assert not CONTROL.search("".join(texts(lines)).replace("\t", ""))
    root, svg, png = drawn(tmp_path, lines)
    assert root.tag.endswith("svg") and "<script" not in svg and png.height > 100
    said = "".join("".join(texts(lines_of(text, question=""))).split())
    letters = [c for c in text if c.isalnum() and c.isascii()]
    assert len(letters) <= len(re.findall(r"[a-zA-Z0-9]", said)), "every letter is there"


def test_lines_that_run_to_the_left_are_drawn_whole_and_from_the_right():
    persian, hebrew = "می\u200cخواهم بروم", "שלום"
    lines = lines_of(f"{persian}\nEnglish with {hebrew}\nplain words")
    placed = [part[1:3] for part in sharing._placed(lines[2:5])]
    assert placed[:2] == [(WIDTH, persian), (0, f"English with {hebrew}")]
    assert placed[2:] == [(0, "plain"), (6, "words")]


def test_a_font_that_is_here_is_found_and_characters_without_one_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "_FONTS", ("DejaVu Sans Mono",))
    monkeypatch.setattr(sharing, "_NO_FONTS", re.compile("^(?!DejaVu)"))
    fonts, lacking = sharing._fonts({"a", "ש", "漢"})
    assert fonts[0] == "DejaVu Sans Mono" and len(fonts) == 2 and lacking == ["漢"]
    said = share(lines_of("漢字 and a"), str(tmp_path / "card"), "", COLOURS["dark"])
    assert said.endswith("Boxes stand for what no font here has: 字 漢")


def test_wide_letters_take_two_columns_and_joined_ones_do_not_overlap():
    lines = lines_of("漢字 and 👩\u200d👩\u200d👧 x")
    placed = {text: column for _, column, text, _ in sharing._placed(lines[2:3])}
    assert placed == {"漢字": 0, "and": 5, "👩👩👧": 9, "x": 16}


# Where the files go


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """The user's folder for pictures, which is not the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "Pictures"
    monkeypatch.setattr(sharing, "user_pictures_path", lambda: folder)
    monkeypatch.setattr(sharing, "_drawn", lambda *_: ([b"svg", b"png"], []))
    return folder


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_pictures_go_to_the_users_pictures_under_new_names(pictures):
    pictures.mkdir()
    for _ in range(2):
        share((), "", "Why? /etc", {})
    (pictures / "why-etc-3.png").write_bytes(b"mine")
    said = share((), "", "Why? /etc", {})
    assert str(pictures / "why-etc-4.png") in said
    assert names(pictures) == sorted(
        [f"why-etc{n}.{kind}" for n in ("", "-2", "-4") for kind in ("png", "svg")]
        + ["why-etc-3.png"]
    )


@pytest.mark.parametrize("made", [False, True])
def test_without_a_folder_for_pictures_they_go_to_the_current_one(pictures, monkeypatch, made):
    if made:  # but nothing may be written there; root may write anywhere
        pictures.mkdir()
        monkeypatch.setattr(os, "access", lambda *_: False)
    share((), "", "Why?", {})
    assert names(pictures.parent / "here") == ["why.png", "why.svg"]


@pytest.mark.parametrize("name", ["card", "card.svg", "card.png", "card/"])
def test_a_name_is_that_of_both_files_and_nothing_is_overwritten(pictures, name):
    here = pictures.parent / "here"
    share((), name, "Why?", {})
    assert names(here) == ["card.png", "card.svg"]
    (here / "card.svg").unlink()
    with pytest.raises(DFlashError, match=r"card\.png exists already"):
        share((), name, "Why?", {})
    assert names(here) == ["card.png"] and (here / "card.png").read_bytes() == b"png"


@pytest.mark.parametrize("name", ["no/such/card", "x" * 5000, "~no-such-user/card", "file/x"])
def test_a_name_that_cannot_be_is_refused_with_the_next_step(pictures, name):
    here = pictures.parent / "here"
    (here / "file").write_text("")
    with pytest.raises(DFlashError, match="file"):
        share((), name, "Why?", {})
    assert names(here) == ["file"]


def test_a_disk_that_fills_up_leaves_neither_file(pictures, monkeypatch):
    calls = []

    def full(_):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DFlashError, match="No space left"):
        share((), "card", "Why?", {})
    assert names(pictures.parent / "here") == []


def test_without_matplotlib_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DFlashError, match="matplotlib") as refused:
        share((), str(tmp_path / "card"), "", COLOURS["dark"])
    assert sys.executable in str(refused.value) and "pip install" in str(refused.value)
    assert names(tmp_path) == []


# In the chat


@in_chat(lambda: ScriptedBackend([ANSWER]))
async def test_the_last_answer_is_shared_with_its_tokens(chat, app, tmp_path, monkeypatch):
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sharing, "_drawn", lambda lines, _: seen.append(lines) or ([b""] * 2, []))
    await chat.say("/share card")
    await chat.shows("there is no answer yet")
    await chat.answered("What meets?")
    await chat.say("/share card")
    await chat.until(lambda: "The picture is" in chat.notices[-1])
    assert str(tmp_path / "card.png") in chat.notices[-1].replace("\n", "")
    (lines,) = seen
    assert {"What meets?", "1. the *Rhine*"} <= set(texts(lines))
    assert any("tokens were guessed" in text for text in texts(lines))
    await chat.say("/share card")
    await chat.shows("exists already")
    await app.show_conversation(Conversation(turns=[Turn("assistant", "Of old.")]))
    await chat.say("/share old")
    await chat.until(lambda: len(seen) == 2)
    assert "Of old." in texts(seen[1])
    assert any("Who guessed is not known" in text for text in texts(seen[1]))


@in_chat(lambda: ScriptedBackend(["word " * 3000]))
async def test_of_an_answer_longer_than_the_draft_view_the_beginning_is_known(chat, app):
    await chat.answered("Go on")
    answer = app.conversation.turns[-1].content
    assert "".join(text for text, _ in app.draft.pieces_of(answer)) == answer


def test_what_went_on_from_words_of_an_earlier_start_has_no_colours():
    for said, known in (("", True), ("Of old: ", False)):
        panel = DraftPanel()
        panel.begin(said)
        for delta in rounds_of("the Rhine and the Main"):
            panel.take(delta, WORDS)
        panel.end(f"{said}the Rhine and the Main")
        assert bool(panel.pieces_of(f"{said}the Rhine and the Main")) == known


def test_words_of_the_token_that_ends_a_thought_stay_and_a_label_is_one_piece(tmp_path):
    tokens = [("<think>so", "first"), ("</think>Two", "second"), (" rivers", "target")]
    lines = card("Why?", Turn("assistant", "".join(text for text, _ in tokens)), tokens, "M")
    assert "Two rivers" in texts(lines) and not [text for text in texts(lines) if "think" in text]
    split = card("Why?", Turn("assistant", "x"), [("a</th", "first"), ("ink>B", "first")], "M")
    assert "B" in texts(split)
    pieces = [text for _, _, text, style in sharing._placed(lines) if " on " in style]
    assert "Two" in pieces and "second draft" in pieces
