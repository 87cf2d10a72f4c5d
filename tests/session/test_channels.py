"""A chat with a model that answers in channels shows its thoughts as those of other models."""

from __future__ import annotations

import pytest

from dflash_mlx.client import DecodeConfig, Question, Responder
from dflash_mlx.engine.delta import Delta
from dflash_mlx.session.channels import in_channels, marked, without_thoughts
from dflash_mlx.session.forms import FORMS
from support.serving import actor_pair

HARMONY = FORMS[-1]
ANALYSIS = "<|channel|>analysis<|message|>Hm."
FINAL = "<|channel|>final<|message|>It is 3."
RAW = f"{ANALYSIS}<|end|><|start|>assistant{FINAL}"
TOLD = "<think>Hm.</think>It is 3."
# As the template of gpt-oss: calls in channels, and no marks of thoughts in a text.
TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}"
    "{% if '<think>' in m.content %}{{ raise_exception('thoughts') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("said", ["", ANALYSIS[:-1], RAW[:-4]])
def test_thoughts_stand_between_marks_wherever_an_answer_goes_on(size, said):
    text = RAW[len(said) :]
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    reasons = [*[None] * (len(pieces) - 1), "stop"]
    both = zip(pieces, reasons, strict=True)
    deltas = [Delta(text, (), None, why, None, 0, None) for text, why in both]
    found = "".join(delta.text for delta in marked(deltas, HARMONY, said))
    begun = {"": "", ANALYSIS[:-1]: "<think>Hm", RAW[:-4]: TOLD[:-4]}[said]
    assert begun + found == TOLD


@pytest.mark.parametrize("length", [9, len("<think>Hm.</think>"), len(TOLD)])
def test_the_beginning_of_an_answer_is_written_as_the_model_has_it(length):
    assert RAW.startswith(in_channels(TOLD[:length])) and in_channels("It is 3.") == FINAL


def test_only_the_model_s_own_thoughts_are_left_out_of_a_conversation():
    talk = [{"role": role, "content": TOLD} for role in ("user", "assistant")]
    talk.append({"role": "assistant", "content": (quoted := "</think> ends a thought.")})
    assert [each["content"] for each in without_thoughts(talk)] == [TOLD, "It is 3.", quoted]


def test_a_chat_has_a_second_turn_and_goes_on_with_an_answer():
    seen = []
    responder = Responder(actor_pair(lambda prompt: seen.append(prompt) or RAW, TEMPLATE))

    def ask(*texts):
        roles = "user", "assistant"
        talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        asked = Question(tuple(talk), None, DecodeConfig("none", max_tokens=200))
        return "".join(delta.text for delta in responder.answer(asked))

    assert ask("a") == TOLD
    assert ask("a", TOLD, "b") == TOLD
    assert seen[-1] == "[user]a[assistant]It is 3.[user]b"
    assert ask("a", TOLD[:-4]) == TOLD[-4:]
