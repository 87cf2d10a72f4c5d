"""Constraints for tests: over the toys' four tokens, and over a tiny tokenizer's characters."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from mlx_lm.utils import load_tokenizer

from dflash_mlx.core.config import StructureConfig
from dflash_mlx.engine.grammar import Constraint, Grammars
from support.models import EOS, write_tokenizer

LETTERS, END = "abc", 3  # tokens 0, 1 and 2 of the toys, and their end token
_LONGEST = 7  # text that is looked at for what a toy answer may become
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}


class _Toy:
    """Four tokens, as llguidance asks for them."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = END, None
    tokens = [*(letter.encode() for letter in LETTERS), b"</s>"]
    special_token_ids = [END]

    def __call__(self, text: Any) -> list[int]:
        return [LETTERS.index(c) for c in (text if isinstance(text, str) else text.decode())]


def toy_constraint(pattern: str, start: int = 3, drafts: bool = True) -> Constraint:
    """A constraint of letters behind `start` tokens."""
    matcher = LLMatcher(LLTokenizer(_Toy()), LLMatcher.grammar_from_regex(pattern), log_level=0)
    return Constraint(matcher, start, drafts)


def toy_allowed(pattern: str) -> Callable[[tuple[int, ...]], set[int]]:
    """The tokens that may follow an answer, none behind its end, found by trying all texts."""

    @lru_cache
    def texts() -> frozenset[str]:
        every = (product(LETTERS, repeat=n) for n in range(_LONGEST + 1))
        joined = ("".join(letters) for some in every for letters in some)
        return frozenset(text for text in joined if re.fullmatch(pattern, text))

    @lru_cache
    def allowed(answer: tuple[int, ...]) -> set[int]:
        if END in answer:
            return set()
        said = "".join(LETTERS[token] for token in answer)
        longer = {t[len(said)] for t in texts() if t.startswith(said) and len(t) > len(said)}
        tokens = {LETTERS.index(letter) for letter in longer}
        return tokens | {END} if tokens and said in texts() else tokens

    return allowed


def tiny_tokenizer(folder: Path) -> Any:
    """mlx-lm's wrapper around a tokenizer of characters, with as many as tiny models have."""
    write_tokenizer(folder)
    return load_tokenizer(folder, eos_token_ids=[EOS])


def constraint(tokenizer: Any, start: int = 0, **structure: Any) -> Constraint:
    """A constraint on the texts of a tokenizer."""
    matcher = Grammars(tokenizer, "tiny").matcher(StructureConfig(**structure))
    return Constraint(matcher, start)
