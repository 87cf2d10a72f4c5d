"""The tables of a paper on a pair of your own, beside the figures that it published.

    python scripts/paper.py dflash --out FOLDER --prompts SETS
    python scripts/paper.py d2sd --out FOLDER --model MODEL --drafter DRAFTER --minutes 10

SETS is a file of prompts, or a folder with the papers' eight data sets as they are published
(gsm8k.jsonl, math500.jsonl, ...); --limit 10 --max-tokens 2048 is the papers' protocol. Answers are
collected once, greedy and at temperature 1, and every method walks them (see simulate_trees.py):
figures are tokens a round and do not depend on the machine. Tables that train nothing come first;
the others train every variant for --minutes, or --steps, on the target's own answers. All lies in
FOLDER, where the same command goes on after a stop; the tables are in FOLDER/PAPER.md. What follows
-- goes to every training. --timed N adds speed-ups over N prompts of each set: let nothing else run
then.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import paper_sets
from paper_study import Study
from paper_tables import PAPERS, add_cut

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.option import require
from dflash_mlx.drafters.paper import add_controls
from dflash_mlx.system.files import write_report

SAMPLE = Path(__file__).resolve().parent.parent / "dflash_mlx" / "data" / "prompts.jsonl"
NOT_ASKED = ("kernels", "drafter_bits", "kv_bits", "draft_window", "draft_vocabulary", "adapted")


def main(argv: Sequence[str]) -> None:
    """Measure what is missing, and print each table when it is whole."""
    own, options = split(list(argv))
    asked = parser().parse_args(own, argparse.Namespace(options=options))
    numbers = [
        name for name in ("limit", "rows", "max_tokens", "steps") if vars(asked)[name] is not None
    ]
    for name in (*numbers, "minutes"):
        require(vars(asked)[name] > 0, name, vars(asked)[name], "more than 0")
    add_controls()
    add_cut()
    study = Study(asked, paper_sets.read_sets(asked.prompts, asked.limit))
    for sentence in paper_sets.missing(asked.prompts):
        cli.say(sentence)
    done = ""
    for table in sorted(PAPERS[asked.paper], key=lambda table: table.is_trained):
        text = study.told(table)
        print(f"\n{text}", flush=True)
        done += text + "\n\n"
        write_report(asked.out / f"{asked.paper}.md", done)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words before -- and behind it, which argparse does not part behind a positional."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog="paper.py", description=__doc__.splitlines()[0])
    result.add_argument("paper", choices=tuple(PAPERS))
    result.add_argument("--out", type=Path, required=True, help="folder of all that is made")
    result.add_argument("--prompts", type=Path, default=SAMPLE, help="a file, or a folder of sets")
    result.add_argument("--limit", type=int, help="prompts of each set (default: all)")
    result.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    result.add_argument("--temperatures", nargs="+", default=["0", "1"])
    result.add_argument("--timed", type=int, default=0, help="time so many prompts of each set")
    result.add_argument("--corpus", type=Path, help="answers to train on (default: collected)")
    result.add_argument("--rows", type=int, default=1000, help="of these, evenly spread")
    ends = result.add_mutually_exclusive_group()
    ends.add_argument("--minutes", type=float, default=30, help="train each variant so long")
    ends.add_argument("--steps", type=int, help="or for so many steps, which others cannot disturb")
    cli.add_options(result, PairConfig, without=NOT_ASKED)
    return result


if __name__ == "__main__":
    cli.run(main, "paper.py")
