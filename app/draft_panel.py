"""The draft view: how the answer's tokens came to be, and the last round's tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from dflash_chat.tree_view import (
    ACCEPTED,
    FIRST,
    LINES,
    LOOKUP,
    REJECTED,
    SECOND,
    TARGET,
    DrawnTree,
    Line,
    Piece,
    draw,
    tint,
)

SHOWN = 400  # tokens of the answer
STYLES = {
    FIRST: "$text-success on $success-muted",
    SECOND: "$text-primary on $primary-muted",
    LOOKUP: "$text-warning on $warning-muted",
    TARGET: "$foreground",
    ACCEPTED: "$text-success",
    REJECTED: "$text-error",
    LINES: "$text-muted",
}
LEGEND: Line = [
    (" draft ", FIRST),
    (" ", LINES),
    (" second draft ", SECOND),
    (" ", LINES),
    (" lookup ", LOOKUP),
    (" target", TARGET),
]


class DraftPanel(Vertical):
    """Keeps the tokens of the answer; draws only while it is shown."""

    def __init__(self) -> None:
        super().__init__(id="draft")
        self._pieces: deque[Piece] = deque(maxlen=SHOWN)
        self._tree: DrawnTree | None = None

    def compose(self) -> ComposeResult:
        yield Static(styled([LEGEND]), id="legend")
        with VerticalScroll(id="tinted-scroll") as scroll:
            scroll.can_focus = False
            yield Static(id="tinted")
        yield Static(id="tree")

    def on_mount(self) -> None:
        self.display = False

    def on_resize(self) -> None:
        self.draw()

    def begin(self) -> None:
        """An answer begins."""
        self._pieces.clear()
        self._tree = None
        self.draw()

    def take(self, pieces: Sequence[Piece], tree: DrawnTree) -> None:
        """A round; shown by the next `draw`."""
        self._pieces.extend(pieces)
        self._tree = tree

    def draw(self) -> None:
        """Bring the panel up to date."""
        if not self.display or not self.is_mounted:
            return
        self.query_one("#tinted", Static).update(styled([tint(tuple(self._pieces), SHOWN)]))
        self.query_one("#tinted-scroll").scroll_end(animate=False)
        tree = self.query_one("#tree", Static)
        tree.display = self._tree is not None
        if self._tree is not None:
            lines = draw(self._tree, max(4, self.size.height // 2 - 2))
            if self._tree.reason:
                lines.append([(self._tree.reason, LINES)])
            tree.update(styled(lines))


def styled(lines: Sequence[Line]) -> Content:
    """Segments in the colours of the theme."""
    return Content("\n").join(
        Content.assemble(*((text, STYLES[kind]) for text, kind in line)) for line in lines
    )
