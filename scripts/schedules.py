#!/usr/bin/env python3
"""Random lives of an engine: `scripts/schedules.py [--schedules 64] [--real 4] [--seeing 0]`.

Requests come, are answered by several methods, greedily or not, and leave early, while memory runs
short, on tiny random targets of several kinds and on the default pair. Every answer must be the one
of its request alone, or part from it at a near-tie. Prints what was otherwise; exit code 1 if
anything was.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tqdm import tqdm  # noqa: E402

from dflash_mlx.cli import options as cli  # noqa: E402  # loads the BLAS before MLX
from dflash_mlx.engine.pair import Pair  # noqa: E402
from support.schedules import (  # noqa: E402
    TOYS,
    Schedule,
    problems,
    real_pair,
    real_prompts,
    schedule_of,
    toy_pair,
    toy_prompt,
)

PROGRAM = "schedules.py"


def main(argv: Sequence[str]) -> None:
    """Print what was otherwise, and how much happened."""
    parser = cli.Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=64, help="on tiny targets")
    parser.add_argument("--real", type=int, default=4, help="on the default pair")
    parser.add_argument("--seeing", type=int, default=0, help="about pictures; needs mlx-vlm")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    seeds = range(asked.seed, asked.seed + asked.schedules)
    counts = dict.fromkeys(
        ("answers", "tokens", "left early", "dropped caches", "reused", "wrong"), 0
    )
    with tempfile.TemporaryDirectory() as folder:
        pairs = {name: toy_pair(name, Path(folder) / name) for name in TOYS}
        cases = [(pairs[TOYS[seed % len(TOYS)]], schedule_of(seed, toy_prompt)) for seed in seeds]
        if asked.real:
            pair = real_pair()
            prompts = real_prompts(pair)
            some = range(asked.seed, asked.seed + asked.real)
            cases += [(pair, schedule_of(seed, prompts, longest=24)) for seed in some]
        if asked.seeing:
            cases += seeing_cases(range(asked.seed, asked.seed + asked.seeing), Path(folder))
        for case in tqdm(cases, desc="schedules"):
            found, ended = problems(*case)
            for problem in found:
                tqdm.write(f"{case[0].target.name}: {problem}")
            counts["answers"] += len(ended)
            counts["tokens"] += sum(len(each.said) for each in ended)
            counts["left early"] += sum(each.left for each in ended)
            counts["dropped caches"] += sum(each.drops for each in ended)
            counts["reused"] += sum(each.statistics.reused_tokens > 0 for each in ended)
            counts["wrong"] += len(found)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    if counts["wrong"]:
        sys.exit(1)


def seeing_cases(seeds: Sequence[int], folder: Path) -> list[tuple[Pair, Schedule]]:
    """Schedules of conversations with pictures, on tiny models of each family in turn."""
    import mlx.core as mx

    from support.seeing import FAMILIES, seeing_pair, some_prompt

    mx.disable_compile()  # on a CPU it first builds every family's functions in C++
    pairs = [seeing_pair(name, folder / f"seeing-{name}") for name in FAMILIES]
    of_each = ((pairs[seed % len(pairs)], seed) for seed in seeds)
    return [(pair, schedule_of(seed, some_prompt(pair.target), 12)) for pair, seed in of_each]


if __name__ == "__main__":
    cli.run(main, PROGRAM)
