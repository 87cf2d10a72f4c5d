"""Answers in channels, as gpt-oss writes them, told as those of other models are.

That is with thoughts between `<think>` and `</think>`, which is what a chat shows and keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dflash_mlx.engine.delta import BEGIN, END, Delta, split_thinking
from dflash_mlx.session.calls import THOUGHT
from dflash_mlx.session.forms import Form
from dflash_mlx.session.reading import AnswerReader
from dflash_mlx.session.templates import Message

_HEADER, _NEXT = "<|channel|>{}<|message|>", "<|end|><|start|>assistant"


def without_thoughts(messages: Sequence[Message]) -> list[Message]:
    """A conversation without the model's thoughts, which its template would refuse or repeat."""
    return [
        {**each, "content": split_thinking(each["content"], inside=False).answer}
        if each["role"] == "assistant"
        else each
        for each in messages
    ]


def in_channels(text: str) -> str:
    """The beginning of an answer whose thoughts are marked, in the channels that it came in."""
    thought, ends, words = text.removeprefix(BEGIN).partition(END)
    if not text.startswith(BEGIN):
        thought, ends, words = "", END, text
    said = _HEADER.format("analysis") + thought if thought else ""
    if ends:
        said += (_NEXT if thought else "") + _HEADER.format("final") + words
    return said


def marked(deltas: Iterable[Delta], form: Form, said: str = "") -> Iterator[Delta]:
    """Deltas with marks of thoughts in their texts. said: in channels, what they go on from."""
    reader = AnswerReader(form=form)
    before = reader.feed(said)
    in_thought = bool(before) and before[-1].kind == THOUGHT
    for delta in deltas:
        parts, text = reader.feed(delta.text), ""
        if delta.finish_reason is not None:
            parts += reader.finish(delta.finish_reason != "stop")
        for part in parts:
            if in_thought is not (part.kind == THOUGHT):
                text, in_thought = text + (END if in_thought else BEGIN), not in_thought
            text += part.text
        yield replace(delta, text=text)
