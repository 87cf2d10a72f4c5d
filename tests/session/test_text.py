"""Thoughts are told from the answer, however their text arrives."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_mlx import SplitText, ThinkingReader, split_thinking


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("plain", "", "plain"),
        ("<think>why</think>so", "why", "so"),
        ("a<think>b</think>c<think>d</think>e", "bd", "ace"),
        ("<think>never closed", "never closed", ""),
        ("opened before</think>so", "opened before", "so"),
        ("1 < 2 <thin> air", "", "1 < 2 <thin> air"),
        ("ends with <thi", "", "ends with <thi"),
    ],
)
def test_thoughts_are_told_from_the_answer(text, thought, answer):
    assert split_thinking(text) == SplitText(thought, answer)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is slow, not wrong
@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "a", "</"])), st.data())
def test_thoughts_are_told_the_same_however_the_text_is_cut(parts, data):
    text = "".join(parts)
    reader, read, at = ThinkingReader(), SplitText(), 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        read += reader.feed(text[at : at + size])
        at += size
    read += reader.finish()
    whole = ThinkingReader()
    assert read == whole.feed(text) + whole.finish()
