"""A picture of the last answer, to show to others: SVG and PNG, in the colours of the chat."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any
from unicodedata import bidirectional

from platformdirs import user_pictures_path
from rich.cells import cell_len
from textual.content import Content

from dflash_chat.conversation import Turn
from dflash_chat.draft_panel import style_of
from dflash_chat.figures import read_figures, speed, times_plain
from dflash_chat.naming import TARGET, legend, short_name
from dflash_chat.store import free_stem, named_file, write_new
from dflash_chat.terminal import assembled
from dflash_chat.tree_view import SPECIAL, Segment
from dflash_mlx.client import DFlashError, describe_machine, split_thinking

WIDTH, ANSWER_LINES, QUESTION_LINES = 80, 36, 4  # columns; lines at most
_FORMATS = "svg", "png"
_SIZE, _COLUMN, _ROW = 11, 6.622 / 72, 16.5 / 72  # points of the letters; inches
_FONTS = "DejaVu Sans Mono", "DejaVu Sans"  # matplotlib brings them along
_NO_FONTS = re.compile("last ?resort|color emoji", re.IGNORECASE)  # boxes; bitmaps
_UNFIT = re.compile(
    "[\ud800-\udfff\ufffe\uffff\u200d\ufe0f]"
)  # no text; joins what no font here joins
_ENDS = re.compile(f"</think>|{SPECIAL}final{SPECIAL}")  # of thoughts, as tokens tell them
_WORD, _MUTED, _BOLD, _MARK = "$foreground", "$secondary", "bold $foreground", "bold $text-primary"


def card(question: str, answer: Turn, tokens: Sequence[Segment], model: str) -> list[Content]:
    """What a picture shows, in lines of at most WIDTH columns. tokens: none where not known."""
    shown = tokens or [(split_thinking(answer.content).answer, TARGET)]
    whole, said = "".join(text for text, _ in shown), []
    thought = max((end.end() for end in _ENDS.finditer(whole)), default=0)  # not shown
    for text, source in shown:
        said.append((text[max(thought, 0) :], style_of(source)))
        thought -= len(text)
    lines = [*_lines([(question, _BOLD)], QUESTION_LINES), Content()]
    lines += [*_lines(said, ANSWER_LINES), Content()]
    figures, machine = read_figures(answer.figures or {}), describe_machine()
    if (ratio := times_plain(figures)) and "~" not in ratio:  # measured
        lines.append(Content.styled(f"{ratio}x as fast as plain decoding", f"large {_MARK}"))
    if figures["generated_tokens"]:
        passes = f"{figures['mean_accepted']:.1f} tokens a pass of the large model"
        told = f"{speed(figures['tokens_per_second'])} tokens a second · {passes}"
        lines.append(Content.styled(told, _BOLD))
    sources = [source for _, source in tokens]
    guessed = f"{1 - sources.count(TARGET) / max(len(sources), 1):.0%} of the tokens were guessed"
    told = guessed if sources else "Who guessed is not known"
    marks = [(label, style_of(source)) for label, source in legend() if source in sources]
    memory = f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GB"
    made = f"  {short_name(model)[:60]} · {machine['processor']}, {memory}"
    facts = [
        [(f"{told}; each token is the large model's own choice.", _WORD)],
        [part for mark in marks for part in (mark, ("  ", _WORD))],
        [("dflash-chat", _MARK), (made, _MUTED)],
    ]
    return lines + [line for fact in facts for line in _lines(fact, ANSWER_LINES)]


def share(lines: Sequence[Content], name: str, title: str, colours: Mapping[str, str]) -> str:
    """Draw a card into two new files; a sentence that says where they are. It takes seconds.

    name: of the files, "" for the title among the user's pictures. colours: of the theme.
    DFlashError without matplotlib, and where files exist or cannot be written.
    """
    folder = user_pictures_path() if os.access(user_pictures_path(), os.W_OK) else None
    stem = re.sub(r"(/|\.svg|\.png)$", "", name) or free_stem(title, folder, _FORMATS)
    files = [named_file(f"{stem}.{ending}") for ending in _FORMATS]
    try:
        pictures, lacking = _drawn(lines, colours)
    except ImportError:
        step = f"type '{sys.executable}' -m pip install matplotlib in a shell, then /share again"
        raise DFlashError("a picture needs matplotlib, which is not installed", step) from None
    write_new(dict(zip(files, pictures, strict=True)))
    boxes = f" Boxes stand for what no font here has: {' '.join(lacking)}" if lacking else ""
    return f"The picture is {' and '.join(str(file.resolve()) for file in files)}.{boxes}"


def _lines(parts: Sequence[Segment], most: int) -> list[Content]:
    fit = assembled((_UNFIT.sub("", text), style) for text, style in parts)
    lines = fit.rstrip().wrap(WIDTH)
    more = Content.styled(f"… {len(lines) - most + 1} more lines", _MUTED)
    return lines if len(lines) <= most else [*lines[: most - 1], more]


def _drawn(lines: Sequence[Content], colours: Mapping[str, str]) -> tuple[list[bytes], list[str]]:
    """The picture in each format, and the characters that no font here has."""
    from matplotlib import rc_context, rcParamsDefault
    from matplotlib.figure import Figure

    fonts, lacking = _fonts({c for line in lines for c in line.plain if c.isprintable()})
    own: Any = {"font.family": fonts, "text.parse_math": False, "text.hinting": "none"}
    files = [BytesIO() for _ in _FORMATS]
    with rc_context(rcParamsDefault | own):
        inches = (WIDTH + 4) * _COLUMN, (len(lines) + 2) * _ROW
        figure = Figure(inches, dpi=200, facecolor=colours["background"])
        axes = figure.add_axes((0, 0, 1, 1), xlim=(-2, WIDTH + 2), ylim=(len(lines) + 1, -1))
        axes.set_axis_off()
        for row, column, text, style in _placed(lines):
            letters, *ground = (colours[name] for name in re.findall(r"\$([\w-]+)", style))
            if ground:
                wide = [(column, cell_len(text) - 0.1)]
                axes.broken_barh(wide, (row, 0.9), color=ground, linewidth=0)
            size, side = _SIZE * (1 + ("large" in style)), "right" if column == WIDTH else "left"
            weight = "bold" if "bold" in style else "normal"
            axes.text(column, row + 0.7, text, c=letters, size=size, weight=weight, ha=side)
        for file, ending in zip(files, _FORMATS, strict=True):
            figure.savefig(file, format=ending)
    return [file.getvalue() for file in files], lacking


def _placed(lines: Sequence[Content]) -> Iterator[tuple[int, int, str, str]]:
    """Row, column, text and style of each word; a line with letters to the left is one word."""
    for row, line in enumerate(lines):
        ways = [way for c in line.plain if (way := bidirectional(c)) in ("L", "R", "AL")]
        if set(ways) - {"L"}:
            yield row, 0 if ways[0] == "L" else WIDTH, line.plain, _WORD
            continue
        for start, end, style in line.spans:
            apart = not {"large", "on"} & set(str(style).split())  # else a gap would be seen
            word = r"\S+" if apart else r"\S+( \S+)*"
            for found in re.finditer(word, line.plain[start:end]):
                yield row, cell_len(line.plain[: start + found.start()]), found[0], str(style)


def _fonts(letters: set[str]) -> tuple[list[str], list[str]]:
    """Families that have the letters, and the letters that none here has."""
    from matplotlib.font_manager import fontManager, get_font

    files = {font.name: font.fname for font in fontManager.ttflist}
    found, lacking = list[str](), letters
    for name in dict.fromkeys((*_FONTS, *files)):
        if lacking and not _NO_FONTS.search(name):
            has = lacking & set(map(chr, get_font(files[name]).get_charmap()))
            found, lacking = found + [name] * bool(has), lacking - has
    return found, sorted(lacking)
