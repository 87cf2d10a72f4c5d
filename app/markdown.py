"""Markdown as answers are written in it: nothing that a model said is left out on the screen."""

from __future__ import annotations

import re
from itertools import takewhile

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_block.table import escapedSplit, table
from markdown_it.rules_core import StateCore

_LANGUAGE = re.compile(r"\s*[\w+#-]*\s*")


def markdown_parser() -> MarkdownIt:
    """A parser that takes no HTML for commands, and hides no more than the addresses of links."""
    parser = MarkdownIt("gfm-like", {"html": False}).disable("reference")
    parser.block.ruler.at("table", _whole_table, {"alt": ["paragraph", "reference"]})
    parser.core.ruler.push("info", _show_info)
    return parser


def _whole_table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A table, unless a row has more cells than its head: these would be dropped."""
    if not table(state, start, end, True):
        return False
    lines = (state.getLines(n, n + 1, state.blkIndent, False) for n in range(start, end))
    rows = [escapedSplit(line.strip()) for line in takewhile(str.strip, lines)]
    cells = [len(row) - (not row[0]) - (not row[-1]) for row in rows]  # an edge is no cell
    return max(cells) <= cells[0] and table(state, start, end, silent)


def _show_info(state: StateCore) -> None:
    """What else than its language stands at a block of code is shown as its first line."""
    for token in state.tokens:
        if token.type == "fence" and not _LANGUAGE.fullmatch(token.info):
            token.content = f"{token.info.strip()}\n{token.content}"
