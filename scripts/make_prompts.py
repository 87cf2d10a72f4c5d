"""Prompts for a corpus, from reference functions, templates and a file, without any model.

    .venv/bin/python scripts/make_prompts.py --out made.jsonl --functions 1500 --chats 1500 \
        --wrap PROMPTS.jsonl --written --keep-clear-of EVALUATION.jsonl

Kinds of rows, told apart by their category: "function" are programming tasks whose examples are
computed, "template-chat" are filled templates, "doc-code" are the rows of category "code" in
PROMPTS.jsonl with the instruction as a function's documentation. The rows of prompts/written.jsonl,
which language models wrote for this project, keep their own categories. `python -m
dflash_mlx.corpus --prompts` answers them. The same options give the same file, a larger number adds
to it, and a row's id depends on its category and text alone, so a corpus that was begun goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from prompts.chat import ChatTemplates
from prompts.evaluation import Evaluation
from prompts.programming import function_prompt, wrapped_prompt

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import write_report

PROGRAM = "make_prompts"
FUNCTION, CHAT, WRAPPED = "function", "template-chat", "doc-code"
WRAPPED_CATEGORY = "code"
WRITTEN = Path(__file__).parent / "prompts" / "written.jsonl"
PATIENCE = 2000  # draws in a row that bring nothing new before there is nothing new


@dataclass
class PromptSet:
    """Different prompts that keep clear of `evaluation`, by text."""

    evaluation: Evaluation
    categories: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    def add(self, category: str, text: str) -> bool:
        """Take `text` in; whether it was new and is clear of the evaluation."""
        if text in self.categories or text in self.dropped:
            return False
        if self.evaluation.meets(text):
            self.dropped.add(text)
            return False
        self.categories[text] = category
        return True

    def draw(self, category: str, wanted: int, seed: int, make: Callable[[Random], str]) -> None:
        """Add `wanted` texts of `make`; DFlashError where it has not so many to give."""
        random = Random(f"{seed}/{category}")
        made = in_vain = 0
        while made < wanted:
            new = self.add(category, make(random))
            made, in_vain = (made + 1, 0) if new else (made, in_vain + 1)
            if in_vain == PATIENCE:
                raise DFlashError(
                    f"only {made} of {wanted} {category} prompts differ from each other and keep "
                    "clear of the evaluation",
                    f"ask for {made} or fewer",
                )

    def lines(self) -> str:
        """JSON lines as `dflash_mlx.corpus --prompts` reads them."""
        return "".join(
            json.dumps(_row(category, text)) + "\n" for text, category in self.categories.items()
        )

    def report(self) -> str:
        """One line for people."""
        found = dict.fromkeys((FUNCTION, CHAT, WRAPPED), 0) | Counter(self.categories.values())
        counts = ", ".join(f"{count} {kind}" for kind, count in found.items())
        return f"{counts}; {len(self.dropped)} dropped for the evaluation's sake"


def main(argv: Sequence[str]) -> None:
    """Write the file. Raises DFlashError for bad input, before anything is written."""
    arguments = parser().parse_args(argv)
    check(arguments)
    prompts = PromptSet(Evaluation.of(evaluation_texts(arguments.keep_clear_of)))
    instructions = [] if arguments.wrap is None else code_instructions(arguments.wrap)
    written = read_prompts(WRITTEN, None) if arguments.written else []
    prompts.draw(FUNCTION, arguments.functions, arguments.seed, function_prompt)
    prompts.draw(CHAT, arguments.chats, arguments.seed, ChatTemplates.read().prompt)
    for instruction in instructions:
        if (text := wrapped_prompt(instruction)) is not None:
            prompts.add(WRAPPED, text)
    for row in written:
        prompts.add(row["category"], row["messages"][0]["content"])
    if not prompts.categories:
        raise DFlashError(
            "there is nothing to make",
            "give --functions, --chats, --written, or --wrap a file with code rows",
        )
    write_report(arguments.out, prompts.lines())
    print(prompts.report())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Make prompts for a corpus from reference functions and templates.",
    )
    result.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    for option, what in (("--functions", "programming tasks"), ("--chats", "chat instructions")):
        result.add_argument(
            option, type=int, default=1500, metavar="N", help=f"{what} to make (default: 1500)"
        )
    result.add_argument(
        "--wrap", type=Path, help="a prompts file whose code rows become documentation"
    )
    result.add_argument(
        "--written", action="store_true", help="add the prompts that were written for this project"
    )
    result.add_argument(
        "--keep-clear-of",
        type=Path,
        help="a prompts file; what shares a function name or 8 words in a row with it is dropped",
    )
    result.add_argument("--seed", type=int, default=0, help="decides every draw (default: 0)")
    return result


def check(arguments: argparse.Namespace) -> None:
    """Raise DFlashError for numbers below 0, and for an output that is no file or an input."""
    for name in ("functions", "chats"):
        if (number := getattr(arguments, name)) < 0:
            raise DFlashError(f"--{name} is {number}", "choose 0 or more")
    cli.check_output(arguments.out)
    written = WRITTEN if arguments.written else None
    for file in (arguments.wrap, arguments.keep_clear_of, written):
        if file is not None and file.resolve() == arguments.out.resolve():
            raise DFlashError(f"--out would replace {file}, which is read", "name another file")


def evaluation_texts(file: Path | None) -> list[str]:
    """Every message of the evaluation's prompts; DFlashError for a damaged file."""
    rows = [] if file is None else read_prompts(file, None)
    return [message["content"] for row in rows for message in row["messages"]]


def code_instructions(file: Path) -> list[str]:
    """The first user message of every code row; DFlashError for a damaged file."""
    rows = [row for row in read_prompts(file, None) if row["category"] == WRAPPED_CATEGORY]
    texts = [[m["content"] for m in row["messages"] if m["role"] == "user"] for row in rows]
    return [said[0] for said in texts if said]


def _row(category: str, text: str) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(text).encode()).hexdigest()
    return {
        "id": f"{category}-{digest[:12]}",
        "category": category,
        "messages": [{"role": "user", "content": text}],
    }


if __name__ == "__main__":
    cli.run(main, PROGRAM)
