"""The draft view: how the answer's tokens came to be, and the last round's tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from dflash_chat.naming import legend, source_style
from dflash_chat.tree_view import (
    ACCEPTED,
    LINES,
    REJECTED,
    DrawnTree,
    Line,
    Segment,
    draw,
    sources,
    tint,
)
from dflash_mlx import TextDelta

SHOWN = 400  # tokens of the answer
STYLES = {ACCEPTED: "$text-success", REJECTED: "$text-error", LINES: "$text-muted"}


class Tinted(Static):
    """The answer's last tokens; goes to their end once they have a new height, not before."""

    def on_resize(self) -> None:
        self.screen.query_one("#tinted-scroll", VerticalScroll).scroll_end(animate=False)


class DraftPanel(Vertical):
    """Keeps the last rounds of the answer; reads and draws them only while it is shown."""

    def __init__(self) -> None:
        super().__init__(id="draft")
        self._unread: deque[TextDelta] = deque(maxlen=SHOWN)
        self._pieces: deque[Segment] = deque(maxlen=SHOWN)
        self._last: TextDelta | None = None
        self._detokenizer: Any = None
        self._texts: dict[int, str] = {}

    def compose(self) -> ComposeResult:
        yield Static(styled([_legend()]), id="legend")
        with VerticalScroll(id="tinted-scroll") as scroll:
            scroll.can_focus = False
            yield Tinted(id="tinted")
        yield Static(id="tree")

    def on_mount(self) -> None:
        self.display = False

    def on_resize(self) -> None:
        self.draw()

    def begin(self) -> None:
        """An answer begins."""
        self._unread.clear()
        self._pieces.clear()
        self._texts.clear()
        self._last = self._detokenizer = None
        self.draw()

    def take(self, delta: TextDelta, tokenizer: Any) -> None:
        """A round; shown by the next `draw`. tokenizer: turns its tokens into text."""
        self._unread.append(delta)
        self._last, self._tokenizer = delta, tokenizer

    def draw(self) -> None:
        """Bring the panel up to date."""
        if not self.display or not self.is_mounted:
            return
        self._read()
        self.query_one("#tinted", Static).update(styled([tint(self._pieces)]))
        self.query_one("#tinted-scroll").scroll_end(animate=False)
        tree = self.query_one("#tree", Static)
        tree.display = self._last is not None
        if self._last is not None:
            drawn = DrawnTree.of(self._last, self._text_of)
            lines = draw(drawn, max(4, self.size.height // 2 - 2))
            if drawn.reason:
                lines.append([(drawn.reason, LINES)])
            tree.update(styled(lines))

    def _read(self) -> None:
        """Make text of the rounds that came since the last drawing."""
        while self._unread:
            if self._detokenizer is None:
                self._detokenizer = self._tokenizer.detokenizer
            for token, source in sources(self._unread.popleft()):
                self._detokenizer.add_token(token)
                self._pieces.append((self._detokenizer.last_segment, source))

    def _text_of(self, token: int) -> str:
        """A token alone, remembered: a round's tree has dozens."""
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


def _legend() -> Line:
    line: Line = []
    *drafts, (target, source) = legend()
    for label, draft in drafts:
        line += [(" ", LINES)] * bool(line) + [(f" {label} ", draft)]
    return [*line, (f" {target}", source)]


def styled(lines: Sequence[Line]) -> Content:
    """Segments in the colours of the theme."""
    return Content("\n").join(
        Content.assemble(*((text, STYLES.get(kind) or source_style(kind)) for text, kind in line))
        for line in lines
    )
