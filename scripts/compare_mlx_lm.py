"""Plain decoding here against mlx-lm's own generation: same weights, prompt, dtype and BLAS.

Whole answers, prefill and detokenising included, in turn A B B A, as a median of paired ratios:

    .venv/bin/python scripts/compare_mlx_lm.py --pairs 20
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import NamedTuple

from dflash_mlx import DecodeConfig, Session, load, prompt_tokens  # isort: skip  # loads the BLAS

import mlx.core as mx
from mlx_lm.generate import stream_generate

from dflash_mlx.models.default_model import fetch
from dflash_mlx.models.formats.gguf_target import load_gguf
from dflash_mlx.session.answer import collect

PROMPT = "Janet has 3 apples and buys 5 more. How many apples does she have? Explain in detail."


class Timed(NamedTuple):
    """An answer and how long it took."""

    seconds: float
    tokens: list[int]


class Ours:
    """This library."""

    def __init__(self) -> None:
        self.pair = load()

    def answer(self, prompt: list[int], tokens: int) -> Timed:
        """One answer, from the prompt to the last character."""
        begin = time.perf_counter()
        session = Session(self.pair, DecodeConfig(method="none", max_tokens=tokens))
        answer = collect(session.stream(prompt))
        return Timed(time.perf_counter() - begin, list(answer.tokens))


class Theirs:
    """mlx-lm, on a model of its own without our hooks."""

    def __init__(self) -> None:
        dequantize = mx.default_device() == mx.Device(mx.cpu)
        self.model, self.tokenizer, _ = load_gguf(fetch(), dequantize)

    def answer(self, prompt: list[int], tokens: int) -> Timed:
        """One answer, from the prompt to the last character."""
        begin = time.perf_counter()
        responses = stream_generate(self.model, self.tokenizer, prompt, max_tokens=tokens)
        generated = [response.token for response in responses]
        return Timed(time.perf_counter() - begin, generated)


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description="Plain decoding against mlx-lm's generation.")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    ours, theirs = Ours(), Theirs()
    prompt = prompt_tokens(ours.pair.tokenizer, PROMPT)
    ours.answer(prompt, 8), theirs.answer(prompt, 8)
    ratios, equal = [], 0
    for i in range(arguments.pairs):
        order = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        results = {run: run.answer(prompt, arguments.tokens) for run in order}
        ratios.append(results[ours].seconds / results[theirs].seconds)
        equal += results[ours].tokens == results[theirs].tokens
    print(f"seconds per answer, ours / mlx-lm, {len(ratios)} pairs: median {median(ratios):.3f},")
    print(f"lowest {min(ratios):.3f}, highest {max(ratios):.3f}; tokens equal in {equal} pairs")


if __name__ == "__main__":
    main()
