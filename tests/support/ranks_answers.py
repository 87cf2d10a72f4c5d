"""What a tiny pair answers, in all the ways there are; as a program the first of several ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.drafters.methods import METHODS
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.read import WHOLE, TargetReader
from dflash_mlx.session.session import Session
from dflash_mlx.train.answers import Answers, Job
from dflash_mlx.verifier.pass_times import PassTimes
from support.pairs import full_pair

PROMPT = [7, 3, 9, 4, 4, 9, 7, 3, 9, 4]
TOKENS = 16


def pair_of(model: Path, drafters: Path, reader: TargetReader = WHOLE) -> Pair:
    """The target of `model` with a drafter of every family, whose files go to `drafters`."""
    config = PairConfig(str(model), "none", kernels="off")
    pair = load_pair(config, DecodeConfig("none"), reader=reader)
    pair.target.pass_times = PassTimes((1, 96), (1.0, 3.0))
    return full_pair(drafters, pair.target, pair.tokenizer)


def everything(pair: Pair) -> dict[str, Any]:
    """Tokens by how they were made."""
    found: dict[str, Any] = {}
    drawn = SamplingConfig(0.8, seed=5)
    # Assistants read the keys of a target of Gemma 4, whose layers mlx-lm does not share out
    methods = [m.name for m in METHODS.values() if not m.is_control and m.family != "assistant"]
    for method in methods:
        for name, config in {
            method: DecodeConfig(method, max_tokens=TOKENS),
            f"{method}, drawn": DecodeConfig(method, max_tokens=TOKENS, sampling=drawn),
        }.items():
            found[name] = _answer(Session(pair, config), PROMPT)
    exact = Session(pair, DecodeConfig("dflash", max_tokens=TOKENS, exact=True))
    found["exact"] = _answer(exact, PROMPT)
    talk = Session(pair, DecodeConfig("ddtree", max_tokens=TOKENS), PrefixCache(1 << 30))
    first = _answer(talk, PROMPT)
    found["next turn"] = _answer(talk, [*PROMPT, *first, 8, 8, 3])
    found["another turn"] = _answer(talk, [*PROMPT, *first[:5], 2, 6])
    found["reused"] = talk.state.position
    many = Answers(pair, "dflash", 3)
    many.waiting.extend(Job(i, tuple(PROMPT[i:]), TOKENS, SamplingConfig(0.0)) for i in range(5))
    done = [each for step in many.run() for each in step]
    found["several"] = [e.tokens for e in sorted(done, key=lambda e: int(e.key))]
    return found


def _answer(session: Session, prompt: list[int]) -> list[int]:
    return [token for delta in session.stream(prompt) for token in delta.tokens]


def main(words: Sequence[str], reader: TargetReader) -> None:
    """Write what is found to a file. words: model, a folder for drafters, the file."""
    model, drafters, out = map(Path, words)
    out.write_text(json.dumps(everything(pair_of(model, drafters, reader))))


if __name__ == "__main__":
    cli.run(main, "ranks_answers", mode=cli.RankMode.FOLLOW)
