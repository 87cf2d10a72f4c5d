"""Prompts as small templates of the two usual shapes render them, with and without thinking."""

from __future__ import annotations

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer

from dflash_mlx.engine.delta import opens_thought
from dflash_mlx.session.templates import prompt_tokens
from support.models import write_tokenizer

TURNS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.split('</think>')[-1] }}{% if not loop.last %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
)
SHAPES = {  # what stands after the last turn when thinking is on, off and left to the template
    "thinks on its own": (
        TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
        "<think></think>{% endif %}{% endif %}",
        {True: "", False: "<think></think>", None: ""},
    ),
    "opens the thought": (
        TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
        "<think></think>{% else %}<think>{% endif %}{% endif %}",
        {True: "<think>", False: "<think></think>", None: "<think>"},
    ),
}


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_ends_as_the_template_argument_asks(tmp_path, shape, thinking):
    template, endings = SHAPES[shape]
    write_tokenizer(tmp_path, template)
    file = str(tmp_path / "tokenizer.json")
    tokens = Tokenizer.from_file(file)
    tokens.add_tokens(["<think>", "</think>"])  # without them mlx-lm turns thinking off
    tokens.save(file)
    tokenizer = load_tokenizer(tmp_path)
    said = [("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d")]
    messages = [{"role": role, "content": content} for role, content in said]
    arguments = None if thinking is None else {"enable_thinking": thinking}
    prompt, ending = prompt_tokens(tokenizer, messages, template=arguments), endings[thinking]
    assert tokenizer.decode(prompt) == f"[user]a [assistant]c [user]d[assistant]{ending}"
    assert opens_thought(tokenizer, prompt) == (ending == "<think>")
