"""The conversation on screen: a window of message widgets, and the answer that is growing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from dflash_chat.conversation import ENDINGS, Turn
from dflash_chat.markdown import markdown_parser
from dflash_chat.mentions import folded
from dflash_chat.welcome import Welcome
from dflash_chat.window import Window
from dflash_mlx.client import SplitText, for_terminal, split_thinking

SHOWN = 4000  # characters of a question or a notice that are shown
MOST_NOTICES = 8
TokensOf = Callable[[str | None], Content | None]
_EDGE = 1  # rows from an edge at which more messages are mounted


def _cut(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return f"{text[:SHOWN]}…\n[{len(text):,} characters in all]"


class Question(Static):
    """What the user said, as it was typed; a very long text is cut on screen only."""

    def __init__(self, text: str) -> None:
        super().__init__(_cut(folded(text)), markup=False, classes="question")


class Notice(Static):
    """A sentence of the app itself, cut where it quotes too much. kind: "error" or "note"."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(_cut(text), markup=False, classes=f"notice {kind}")


class Reply(Vertical):
    """An answer, with its thoughts folded. shown: as much of it as there is so far."""

    def __init__(self, shown: SplitText, ending: str = "") -> None:
        super().__init__(classes="reply")
        self._shown, self._ending = shown, ending
        self._stream: MarkdownStream | None = None
        self._tokens = Static(classes="tokens")

    def compose(self) -> ComposeResult:
        with Collapsible(title=self._thought_title, classes="thought"):
            yield Static(self._shown.thought, markup=False, classes="thought-text")
        answer = for_terminal(self._shown.answer)
        yield Markdown(answer, parser_factory=markdown_parser, open_links=False)
        yield self._tokens
        yield Static(ENDINGS.get(self._ending, ""), classes="ending")

    def on_mount(self) -> None:
        self._show_parts()

    async def on_unmount(self) -> None:
        await self._end_stream()

    @property
    def _thought_title(self) -> str:
        return f"thought, {len(self._shown.thought.split())} words"

    async def grow(self, now: SplitText) -> None:
        """Show what has come behind what is shown; returns at once however long drawing takes."""
        before, self._shown = self._shown, now
        if now.thought != before.thought:
            self.query_one(Collapsible).title = self._thought_title
            self.query_one(".thought-text", Static).update(now.thought)
            self._show_parts()
        if new := now.answer[len(before.answer) :]:
            if self._stream is None:
                self._stream = Markdown.get_stream(self.query_one(Markdown))
            await self._stream.write(for_terminal(new))

    def show_tokens(self, tokens: Content | None) -> None:
        """Show the answer's tokens as they came to be in place of its text; None for the text."""
        if tokens is not None:
            self._tokens.update(tokens)
        self.set_class(tokens is not None, "as-tokens")
        if self.is_mounted:
            self._show_parts()

    async def finish(self, ending: str) -> None:
        """No more will come."""
        self._ending = ending
        await self._end_stream()
        self.query_one(".ending", Static).update(ENDINGS.get(ending, ""))
        self._show_parts()

    def outlive(self) -> None:
        """A question follows, so that nothing goes on with this answer any more."""
        ended, way, _ = ENDINGS.get(self._ending, "").partition(";")
        if way:
            self.query_one(".ending", Static).update(ended)

    async def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()

    def _show_parts(self) -> None:
        thought = bool(self._shown.thought.strip()) and not self.has_class("as-tokens")
        self.query_one(Collapsible).display = thought
        self.query_one(".ending").display = self._ending in ENDINGS


class Transcript(VerticalScroll):
    """Shows a window of the turns, so that long conversations cost no more than short ones."""

    can_focus = False

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.window = Window()
        self._turns: Sequence[Turn] = ()
        self._live: str | None = None  # the answer in the making, whether or not it is on screen
        self._live_reply: Reply | None = None
        self._tokens_of: TokensOf | None = None
        self._moving = False
        self.welcome = Welcome()

    def compose(self) -> ComposeResult:
        yield Static(id="floor")  # an anchored container would put short content at its bottom
        yield self.welcome
        yield Static(id="earlier", classes="marker")
        yield Static(id="later", classes="marker")

    def on_mount(self) -> None:
        self._mark()
        self.anchor()

    async def show(self, turns: Sequence[Turn]) -> None:
        """Show the end of `turns`, a list that the caller goes on appending to."""
        async with self.lock:
            self._turns = turns
            self._live = self._live_reply = None
            self.window = Window()
            await self.query("#transcript > .question, #transcript > .reply, .notice").remove()
            await self.follow()

    async def follow(self) -> None:
        """Go to the newest message, drawing what was appended."""
        async with self.lock:
            await self._move(self.window.newest(self._total))
        self.anchor(self._total > 0)
        if not self._total:
            self.scroll_home(animate=False)

    async def begin(self, said: str = "") -> None:
        """An answer begins behind the turns. said: what there is of it already."""
        self._live = said
        await self.query(".notice").remove()
        await self.follow()

    def receive(self, text: str) -> None:
        """A round's text; drawn by the next `draw`."""
        if self._live is not None:
            self._live += text

    async def draw(self, ended: bool = False) -> None:
        """Bring the growing answer on screen up to date. ended: nothing more will come."""
        async with self.lock:  # else the page may be turned, and the reply gone or not yet there
            if self._live is not None and self._live_reply is not None:
                await self._live_reply.grow(split_thinking(self._live, inside=False, ended=ended))
                self._live_reply.show_tokens(self._tokens(None))

    def tint(self, tokens_of: TokensOf | None) -> None:
        """Show answers as the tokens that they are made of, where these are known; None: as text.

        tokens_of: gives the tokens by the answer's text, or None for the answer in the making.
        """
        self._tokens_of = tokens_of
        for index, widget in enumerate(self._message_widgets(), self.window.start):
            if isinstance(widget, Reply):
                live = index == len(self._turns)
                widget.show_tokens(self._tokens(None if live else self._turns[index].content))

    def _tokens(self, text: str | None) -> Content | None:
        return self._tokens_of(text) if self._tokens_of is not None else None

    async def end(self, ending: str) -> str:
        """The answer is over, and the caller appends it to the turns; returns its text."""
        async with self.lock:
            if self._live is None:
                return ""
            await self.draw(ended=True)
            if self._live_reply is not None:
                await self._live_reply.finish(ending)
            text, self._live, self._live_reply = self._live, None, None
            return text

    async def notice(self, text: str, kind: str = "note") -> None:
        """A sentence at the end; the oldest ones go."""
        for old in [*self.query(".notice")][: 1 - MOST_NOTICES]:
            await old.remove()
        await self.mount(Notice(text, kind))
        self.anchor()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._moving or not self.is_mounted:
            return
        if new_value <= _EDGE and new_value < old_value and self.window.start > 0:
            self._moving = True
            self.call_later(self._turn_page, Window.earlier)
        elif new_value >= self.max_scroll_y - _EDGE and not self.window.at_end:
            self._moving = True
            self.call_later(self._turn_page, Window.later)

    @property
    def _total(self) -> int:
        return len(self._turns) + (self._live is not None)

    async def _turn_page(self, turn: Callable[[Window], Window]) -> None:
        """Move the window, keeping on screen what was there.

        The lock, because the app changes the conversation from another message queue.
        """
        try:
            async with self.lock:
                await self._move_to(turn(self.window))
        finally:
            self._moving = False

    async def _move_to(self, window: Window) -> None:
        if window == self.window:
            return
        kept = self._message_widgets()[0 if window.start < self.window.start else -1]
        await self._move(window)
        if kept.is_attached:
            top = window.start == self.window.start and kept is not self._last_widget()
            self.scroll_to_widget(kept, animate=False, top=top, immediate=True)

    async def _move(self, window: Window) -> None:
        """Mount and remove widgets until the window is on screen."""
        before, self.window = self.window, window
        old, new = range(before.start, before.end), range(window.start, window.end)
        widgets = dict(zip(old, self._message_widgets(), strict=False))
        gone = [widgets[i] for i in old if i not in new and i in widgets]
        with self.app.batch_update():
            await self.remove_children(gone)
            if self._live_reply in gone:
                self._live_reply = None
            first = [self._widget(i) for i in new if i < old.start]
            last = [self._widget(i) for i in new if i >= max(old.start, len(widgets) + old.start)]
            if first:
                await self.mount_all(first, after="#earlier")
            if last:
                await self.mount_all(last, before="#later")
        for index, widget in enumerate(self._message_widgets(), window.start):
            if isinstance(widget, Reply) and index < self._total - 1:
                widget.outlive()
        self._mark()

    def _widget(self, index: int) -> Widget:
        if index == len(self._turns):
            assert self._live is not None
            self._live_reply = Reply(split_thinking(self._live, inside=False, ended=False))
            return self._live_reply
        turn = self._turns[index]
        if turn.role == "user":
            return Question(turn.content)
        reply = Reply(split_thinking(turn.content), turn.ending)
        reply.show_tokens(self._tokens(turn.content))
        return reply

    def _message_widgets(self) -> list[Widget]:
        return [child for child in self.children if isinstance(child, Question | Reply)]

    def _last_widget(self) -> Widget | None:
        return next(reversed(self._message_widgets()), None)

    def _mark(self) -> None:
        """Say how many messages are not shown; what to do where there are none at all."""
        self.welcome.display = self._total == 0
        hidden = {"earlier": self.window.start, "later": self.window.total - self.window.end}
        for name, number in hidden.items():
            marker = self.query_one(f"#{name}", Static)
            marker.update(f"… {number} {name} messages")
            marker.display = number > 0
