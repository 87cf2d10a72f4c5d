"""The text of an answer in its parts, as it streams: thoughts, words and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_mlx.engine.delta import BEGIN, END, begun
from dflash_mlx.engine.thoughts import Thoughts
from dflash_mlx.session.calls import CALL, THOUGHT, WORDS, CallReader, Part, whole_call
from dflash_mlx.session.forms import PARSER_FAULTS, Form

HEADER = "header"  # of a message
_NONE = (-1, "")
_BODY = "<|message|>"  # of a message with a header, as OpenAI's harmony has them
_ENDS = dict.fromkeys(("<|end|>", "<|return|>", "<|start|>", "<|channel|>"), HEADER)


class AnswerReader:
    """Reads one answer."""

    def __init__(
        self,
        tokenizer: Any = None,  # without one everything is words
        form: Form | None = None,  # of calls
        tools: Sequence[Mapping[str, Any]] = (),  # without any, nothing is a call
        in_thought: bool = False,  # the chat template opened a thought
        one_call: bool = False,  # the answer is over with its first call
        streams: bool = False,  # arguments are told as they are made, not whole and checked
    ) -> None:
        self.called = False  # there was a call
        self.is_over = False  # nothing more is read
        self._tokenizer, self.thoughts = tokenizer, Thoughts.begun(in_thought)
        self._form, self._tools = form or Form(), [*tools]
        self._known = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
        self._how = streams, one_call
        self._reader: CallReader | None = None
        # What is read now, and by what is being read the marks that end it and what they begin.
        self._kind = THOUGHT if in_thought else WORDS
        starts = {BEGIN: THOUGHT, **({self._form.mark: CALL} if tools else {})}
        self._marks = {WORDS: {} if tokenizer is None else starts, THOUGHT: {END: WORDS}}
        if self._form.has_channels:
            self._kind, self._marks = HEADER, {WORDS: _ENDS, THOUGHT: _ENDS, HEADER: {_BODY: WORDS}}
        self._words = self._kind if self._form.has_channels else WORDS  # behind a call
        self._raw = ""  # the mark of the call that is read
        self._held = ""  # text of which it is not certain what it is
        self._last = ""  # the kind of the last part

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """What is certain by now; among these tokens those of thoughts are counted."""
        for token in tokens if self._tokenizer is not None else ():
            self.thoughts = self.thoughts.after(token, self._tokenizer)
        self._held += text
        return _together(self._read())

    def finish(self, cut: bool = False) -> list[Part]:
        """What was held back; half a call is words, and nothing where a limit has cut it."""
        parts = _together(self._read(finished=True, cut=cut))
        held, self._held = self._held, ""
        is_half = cut and len(held) > 1 and self._form.mark.startswith(held)
        if self.is_over or is_half or (self._kind == HEADER and held.startswith("<|")):
            return parts
        return [*parts, *self._told(held)]

    def _read(self, finished: bool = False, cut: bool = False) -> Iterator[Part]:
        """Take what is certain from what is held, up to the next mark and beyond."""
        while not self.is_over:
            if self._kind == CALL:
                yield from self._calls(finished, cut)
                if self._kind == CALL:
                    return
                continue
            marks = self._marks[self._kind]
            at, mark = min(
                filter(self._may, ((self._held.find(m), m) for m in marks)), default=_NONE
            )
            certain = at if mark else len(self._held) - begun(self._held, tuple(marks))
            text, self._held = self._held[:certain], self._held[certain + len(mark) :]
            if self._kind != HEADER:
                yield from self._told(text)
            elif not mark:
                self._held = text + self._held
            if not mark:
                return
            kind = marks[mark]
            if self._kind == HEADER and "to=functions." in text and self._known:
                kind, self._held, self._raw = CALL, text + mark + self._held, ""
            elif kind == CALL:
                self._raw = mark if self._form.start else ""
                self._held = mark[len(self._raw) :] + self._held
            elif self._kind == HEADER and "analysis" in text:
                kind = THOUGHT
            self._kind = kind

    def _may(self, place: tuple[int, str]) -> bool:
        """Whether a mark begins something: one that is common in texts does not behind words."""
        (at, mark), form = place, self._form
        often = mark == form.mark and not form.start.strip("[")
        return at >= 0 and (self._is_first(at) or not often)

    def _is_first(self, at: int) -> bool:
        """Whether there are no words before a place in what is held."""
        return self._last != WORDS and not self._held[:at].strip()

    def _calls(self, finished: bool, cut: bool) -> Iterator[Part]:
        """Calls, as far as they are certain; what is none is words, and what was told stays."""
        if self._reader is None:
            self._reader = CallReader(self._form, self._known, *self._how)
        reader, form = self._reader, self._form
        try:
            if reader.is_broken or not form.is_known:
                raise ValueError("a call has another form")
            for part in reader.read(self._held, finished):
                self.called, self._last = True, CALL
                yield part
            if reader.is_over:
                self._held = self._held[reader.at :]
                self._reader, self._kind, self.is_over = None, self._words, self._how[1]
            return
        except PARSER_FAULTS:
            reader.is_broken = True
        end = form.end.strip() if form.end.strip() in self._held else ""
        if not (end or finished or (form.parse is None and not form.end)):
            return
        inside = self._held.partition(end)[0] if end else self._held
        self._held = self._held[len(inside) + len(end) :]
        self._reader, self._kind = None, self._words
        if reader.is_told:
            self.is_over = self._how[1]
        else:
            yield from self._otherwise(inside, end, cut)

    def _otherwise(self, inside: str, end: str, cut: bool) -> Iterator[Part]:
        """What mlx-lm's parser makes of a call in another form; words where it is none."""
        parse, one = self._form.parse, self._how[1]
        try:
            found = parse(inside, self._tools) if parse is not None else [None]
            found = found if isinstance(found, list) else [found]
            required = [self._known[each["name"]].get("required") or () for each in found]
            both = zip(found, required, strict=True)
            calls = [whole_call(each["name"], each.get("arguments", {}), r) for each, r in both]
        except PARSER_FAULTS:
            yield from self._told("" if cut and not end else self._raw + inside + end)
            return
        for call in calls[:1] if one else calls:
            self.called, self._last = True, CALL
            yield call
        self.is_over = one and bool(calls)

    def _told(self, text: str) -> Iterator[Part]:
        """Words or some of a thought; line breaks between parts of two kinds are neither."""
        kind = WORDS if self._kind == HEADER else self._kind
        begins = self._last != kind and (self._last or kind == THOUGHT)
        if text := text.lstrip("\n") if begins else text:
            self._last = kind
            yield Part(kind, text)


class SchemaReader(AnswerReader):
    """Reads an answer whose words follow a schema: no mark inside them begins anything."""

    def _may(self, place: tuple[int, str]) -> bool:
        return super()._may(place) and (self._kind != WORDS or self._is_first(place[0]))


def _together(parts: Iterator[Part]) -> list[Part]:
    """With pieces of one call joined."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind == CALL and found[-1].identity == part.identity:
            part = replace(part, text=found.pop().text + part.text)
        found.append(part)
    return found
