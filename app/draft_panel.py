"""The draft view: how the answer's tokens came to be, and the tree of any of its rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_chat.figures import counted
from dflash_chat.naming import ALONE, TARGET, legend, source_shape, source_style
from dflash_chat.terminal import assembled
from dflash_chat.tree_view import (
    ACCEPTED,
    END,
    LINES,
    NO,
    REJECTED,
    YES,
    DrawnTree,
    Line,
    Segment,
    draw,
    sources,
    symbol,
    tint,
)
from dflash_mlx.client import Delta, find_method

SHOWN = 2000  # tokens of an answer
KNOWN = 10_000  # tokens of an answer, for its picture
ANSWERS = 50  # whose tokens are known
KEPT = 1000  # rounds that one can go back to
_ROUNDS = Binding.Group("rounds", compact=True)
STYLES = {ACCEPTED: "bold $text-success", REJECTED: "$text-error", LINES: "$secondary"}


class Origins:
    """The last tokens of an answer and where they came from; made into text when it is asked for.

    tokenizer: of the model that answers. said: of the answer, by nobody knows whom.
    """

    def __init__(self, tokenizer: Any, said: str = "") -> None:
        self._tokenizer = tokenizer
        self._detokenizer: Any = None
        self._unread: deque[tuple[int, str]] = deque(maxlen=KNOWN)
        self._pieces: deque[Segment] = deque([(said, LINES)] if said else (), maxlen=KNOWN)

    def add(self, delta: Delta) -> None:
        self._unread.extend(sources(delta))

    def pieces(self) -> list[Segment]:
        """The tokens as text, each with its source."""
        detokenizer = self._detokenizer = self._detokenizer or self._tokenizer.detokenizer
        while self._unread:
            token, source = self._unread.popleft()
            detokenizer.add_token(token)
            text = detokenizer.last_segment
            self._pieces.append((_sign(self._tokenizer, token, text) or text, source))
        return list(self._pieces)


class DraftPanel(Vertical, can_focus=True):
    """Keeps the rounds of the answer, and the tokens of those before; draws while it is shown."""

    BINDINGS = [
        Binding("left", "step(-1)", "round before", group=_ROUNDS),
        Binding("right", "step(1)", "round after", group=_ROUNDS),
        Binding("home", "step(-1000)", "first round", show=False),
        Binding("end", "step(1000)", "newest round", show=False),
        Binding("escape", "leave", "back"),
    ]

    def __init__(self) -> None:
        super().__init__(id="draft")
        self._origins: Origins | None = None  # of the answer in the making
        self._said = ""  # before its first token
        self._answers: dict[str, Origins] = {}  # by their text, the newest last
        self._rounds: deque[Delta] = deque(maxlen=KEPT)
        self._heard = 0  # rounds in all
        self._back = 0  # how many rounds before the newest is shown
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="legend")
        yield Static(id="tree")
        yield Static(id="why", markup=False)

    def on_mount(self) -> None:
        self.display = False
        self.border_subtitle = "the large model decides on every token"

    def on_resize(self) -> None:
        self.draw()

    def action_step(self, rounds: int) -> None:
        self._back = min(max(self._back - rounds, 0), max(len(self._rounds) - 1, 0))
        self.draw()

    def action_leave(self) -> None:
        self.screen.query_one("#prompt").focus()

    @property
    def shown(self) -> Delta | None:
        """The round whose tree is drawn, None before the first."""
        return self._rounds[-1 - self._back] if self._rounds else None

    def begin(self, said: str = "") -> None:
        """An answer begins, or one of which so much was said goes on."""
        self._rounds.clear()
        self._texts.clear()
        self._origins, self._said = self._answers.pop(said, None) if said else None, said
        self._heard = self._back = 0
        self.draw()

    def end(self, text: str) -> None:
        """It is over; `text` is all of it."""
        if self._origins is not None:
            self._answers.pop(text, None)
            self._answers[text] = self._origins
            for oldest in [*self._answers][:-ANSWERS]:
                del self._answers[oldest]
        self._origins = None

    def take(self, delta: Delta, tokenizer: Any) -> None:
        """A round; shown by the next `draw`. tokenizer: turns its tokens into text."""
        if self._origins is None:
            self._origins = Origins(tokenizer, self._said)
        self._tokenizer = tokenizer
        self._origins.add(delta)
        self._rounds.append(delta)
        self._heard += 1
        if self._back:  # stay where the reader is
            self._back = min(self._back + 1, len(self._rounds) - 1)

    def tokens_of(self, text: str | None) -> Content | None:
        """The tokens of an answer by origin, None where they are not known.

        text: of the answer, None for the one in the making.
        """
        origins = self._origins if text is None else self._answers.get(text)
        if origins is None:
            return None
        return styled([tint(origins.pieces()[-SHOWN:])], self.app.no_color)

    def pieces_of(self, text: str) -> list[Segment]:
        """The tokens of an answer with their sources, none where not all are known."""
        known = self._answers[text].pieces() if text in self._answers else []
        lost = len(known) == KNOWN or any(source == LINES for _, source in known)
        return [] if lost else known

    def draw(self) -> None:
        if not self.display or not self.is_mounted:
            return
        tree, why = self.query_one("#tree", Static), self.query_one("#why", Static)
        tree.display, why.display = bool(self._rounds), True
        self.border_title = self._heading()
        if (delta := self.shown) is None:
            why.update("Ask something: its rounds are drawn here.")
            return
        legend, width = self.query_one("#legend", Static), max(self.size.width, 20)
        legend.update(styled(_legend(delta), self.app.no_color))
        room = self.size.height - legend.size.height - tree.styles.margin.height
        drawn = draw(DrawnTree.of(delta, self._text_of), max(4, room), width)
        tree.update(styled(drawn, self.app.no_color))
        said = f"{round_sentence(delta)} {delta.proposal.reason}".strip()
        why.update(said)
        why.display = len(drawn) + len(said) // width + 2 <= room  # the tree comes first

    def _heading(self) -> str:
        """Which round this is, and how to get to others; the first token has none of its own."""
        if not self._rounds:
            return ""
        opening = self._heard > len(self._rounds) or len(self._rounds[0].accepted.tree) == 1
        newest = self._heard - opening
        at = newest - self._back
        which = f"Round {at} of {newest}" if at else "Reading the question"
        return f"{which}, Tab and ← → show others"

    def _text_of(self, token: int) -> str:
        """A token alone, remembered: a round's tree has dozens."""
        if token not in self._texts:
            text = self._tokenizer.decode([token])
            self._texts[token] = _sign(self._tokenizer, token, text) or text
        return self._texts[token]


def _sign(tokenizer: Any, token: int, text: str) -> str | None:
    return symbol(text, token in getattr(tokenizer, "eos_token_ids", ()))


def round_sentence(delta: Delta) -> str:
    """What a round checked and kept, in words."""
    drafted, kept = len(delta.accepted.tree) - 1, len(delta.accepted.path) - 1
    if not drafted:
        return "No drafted token was checked: one pass of the large model, one token."
    checked = f"One pass of the large model checked {counted(drafted, 'drafted token')}"
    gained = f"so {counted(kept + 1, 'token')} for one pass"
    told = f"{checked}: {kept} accepted, and one added by the model itself, {gained}."
    return f"{told}{_recalled(delta, time.time())}"


def _recalled(delta: Delta, now: float) -> str:
    """How many accepted tokens were said in earlier conversations, and when the latest of these."""
    tree = delta.accepted.tree
    said = [tree.said[node] for node in delta.accepted.path if tree.said and tree.said[node]]
    if not said:
        return ""
    minutes = max(0, int(now - max(said)) // 60)
    ago = next(((n, unit) for n, unit in ((minutes // 1440, "day"), (minutes // 60, "hour")) if n),
               (minutes, "minute"))  # fmt: skip
    return f" {counted(len(said), 'token')} said before, {counted(*ago)} ago."


def _legend(delta: Delta) -> list[Line]:
    mine = {source.name for source in find_method(delta.statistics.method).sources}
    origins: Line = [("guessed by", LINES)]
    for label, source in legend():
        if source in mine:
            origins += [(" ", LINES), (f" {label} ", source)]
    signs: Line = [(f"{ALONE}  ", TARGET), (YES, ACCEPTED), (" accepted  ", LINES)]
    signs += [(NO, REJECTED), (" rejected  ", LINES), (f"{END} end", LINES)]
    return [origins, signs] if mine else [signs]


def styled(lines: Sequence[Line], shapes: bool = False) -> Content:
    """Segments in the colours of the theme. shapes: underlined and slanted, too, as `NO_COLOR`."""
    styles = ([(text, style_of(kind, shapes)) for text, kind in line] for line in lines)
    return Content("\n").join(map(assembled, styles))


def style_of(kind: str, shapes: bool = False) -> str:
    """The style of a segment by what it is."""
    if kind in STYLES:
        return STYLES[kind]
    return f"{source_style(kind)} {source_shape(kind)}".strip() if shapes else source_style(kind)
