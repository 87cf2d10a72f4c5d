"""Prompts files in one, without what comes too near to an evaluation.

    .venv/bin/python scripts/keep_clear.py --prompts scripts/prompts/made.jsonl \
        --prompts scripts/prompts/written.jsonl --of EVALUATION.jsonl --out prompts.jsonl

A prompt is dropped where it defines a function of the same name as an evaluation prompt, or shares
eight words in a row with it; the sentence that all programming tasks begin with does not count. The
same task in other words is not found. Of prompts with the same text the first stays. `python -m
dflash_mlx.corpus --prompts` answers them; every row stays as it is, so a corpus that was begun goes
on. docs/training.md says where the prompts of the project come from.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.prompts import Row, read_prompts
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import write_report

PROGRAM = "keep_clear"
SENTENCE = "Write a solution to the following problem and make sure that it passes the tests:"
PHRASE = 8  # words in a row


def main(argv: Sequence[str]) -> None:
    """Write the file. Raises DFlashError for bad input, before anything is written."""
    arguments = parser().parse_args(argv)
    cli.check_output(arguments.out)
    read = [file for file in (*arguments.prompts, arguments.of) if file is not None]
    if arguments.out.resolve() in [file.resolve() for file in read]:
        raise DFlashError(
            f"--out would replace {arguments.out}, which is read", "name another file"
        )
    evaluation = [] if arguments.of is None else read_prompts(arguments.of)
    near = {mark for row in evaluation for mark in marks(row)}
    rows: dict[str, Row] = {}
    for file in arguments.prompts:
        for row in read_prompts(file):
            rows.setdefault(text_of(row), row)
    kept = [row for row in rows.values() if near.isdisjoint(marks(row))]
    if not kept:
        raise DFlashError("every prompt overlaps the evaluation", "give other prompts")
    write_report(arguments.out, "".join(json.dumps(row) + "\n" for row in kept))
    print(f"{len(kept)} prompts; {len(rows) - len(kept)} dropped (overlaps the evaluation prompts)")


def text_of(row: Row) -> str:
    return "\n".join(message["content"] for message in row["messages"])


def marks(row: Row) -> set[str]:
    """Names of functions, and all runs of PHRASE words, or the whole text where it is shorter."""
    text = text_of(row)
    words = re.findall(r"\w+", text.replace(SENTENCE, " ").lower())
    last = max(len(words) - PHRASE, 0)
    phrases = {" ".join(words[i : i + PHRASE]) for i in range(last + 1)} - {""}
    return phrases | {f"def {name}" for name in re.findall(r"\bdef\s+(\w+)", text)}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Prompts that keep clear of an evaluation.")
    result.add_argument(
        "--prompts", type=Path, action="append", required=True, help="may be given several times"
    )
    result.add_argument("--of", type=Path, help="the evaluation's prompts")
    result.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
