"""Prompts of up to some thousand tokens, for draft models that are to work behind long contexts.

    .venv/bin/python scripts/long_prompts.py --prompts scripts/prompts/written.jsonl \
        --answers scripts/answers/smollm2-135m.jsonl.gz --out long.jsonl

Every row ends with a question of --prompts. Before it comes, in turn, text of an installed package
(code or documentation; the field "source" names package and licence, and only licences that allow
it are used), or a conversation of earlier questions with their answers. Lengths are spread evenly
over the logarithm. What the questions must keep clear of, `scripts/keep_clear.py` drops afterwards.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.prompts import Row, read_prompts
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.load import load_target
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.system.files import write_report
from dflash_mlx.train.corpus.rows import read_rows

PROGRAM = "long_prompts"
LICENCES = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Zlib)\b")  # by their short names
TEXTS = (".py", ".md", ".rst", ".txt")
SMALLEST = 4000  # bytes of a file


def main(argv: Sequence[str]) -> None:
    """Write the file. Raises DFlashError for bad input, before anything is written."""
    arguments = parser().parse_args(argv)
    cli.check_output(arguments.out)
    if not 1 <= arguments.least <= arguments.most:
        raise DFlashError(
            f"--least is {arguments.least} and --most {arguments.most}", "give 1 <= least <= most"
        )
    questions = read_prompts(arguments.prompts, None)
    tokenizer = load_target(cli.read_pair_config(arguments).model).tokenizer
    known = {row.id: list(row.answer) for row in read_rows(arguments.answers, tokenizer=tokenizer)}
    answered = [
        [*row["messages"], {"role": "assistant", "content": text(tokenizer, known[row["id"]])}]
        for row in questions
        if row.get("id") in known
    ]
    if not answered:
        raise DFlashError(
            f"{arguments.answers} answers no prompt of {arguments.prompts}", "give their answers"
        )
    chance = random.Random(arguments.seed)
    chosen = chance.sample(questions, min(arguments.rows, len(questions)))
    rows, packages = [], package_texts(chance)
    for i, question in enumerate(chosen):
        room = round(arguments.least * (arguments.most / arguments.least) ** chance.random())
        room -= len(prompt_tokens(tokenizer, question["messages"]))
        if i % 2:
            made = behind_talk(tokenizer, question, chance.sample(answered, len(answered)), room)
        else:
            made = behind_text(tokenizer, question, *next(packages), room)
        rows.append({**made, "id": f"long-{question.get('id', i)}"})
    write_report(arguments.out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts")


def behind_text(tokenizer: Any, question: Row, source: str, text: str, room: int) -> Row:
    """The question behind the first `remaining` tokens of a package's text, in one message."""
    *before, last = question["messages"]
    ids = tokenizer.encode(text, add_special_tokens=False)[: max(0, room)]
    content = f"{tokenizer.decode(ids)}\n\n{last['content']}"
    return {**question, "messages": [*before, {**last, "content": content}], "source": source}


def behind_talk(tokenizer: Any, question: Row, talks: list[list[Any]], room: int) -> Row:
    """The question behind as many answered ones as `remaining` tokens hold."""
    before: list[Any] = []
    for talk in talks:
        room -= len(prompt_tokens(tokenizer, talk))
        if room < 0:
            break
        before += [message for message in talk if message["role"] != "system"]
    *system, last = question["messages"]
    return {**question, "messages": [*system, *before, last], "source": "earlier answers"}


def package_texts(chance: random.Random) -> Iterator[tuple[str, str]]:
    """Package with licence, and text from a random line of a random file on; without end."""
    packages = [(found, licence(found)) for found in distributions()]
    allowed = [(found, terms) for found, terms in packages if LICENCES.search(terms)]
    while True:
        found, terms = chance.choice(allowed)
        files = [Path(str(found.locate_file(file))) for file in found.files or ()]
        large = [
            f for f in files if f.suffix in TEXTS and f.is_file() and f.stat().st_size > SMALLEST
        ]
        if large:
            lines = chance.choice(large).read_text("utf-8", "replace").splitlines(keepends=True)
            start = chance.randrange(len(lines))
            yield f"{found.name} {found.version} ({terms})", "".join(lines[start:])


def licence(found: Distribution) -> str:
    """What a package says of its licence, in a line; empty where it says nothing."""
    said = found.metadata.json
    terms = said.get("license_expression") or said.get("license") or ""
    kinds = [c.split("::")[-1].strip() for c in said.get("classifier", []) if "License ::" in c]
    return str(terms).split("\n")[0][:60] or ", ".join(kinds)


def text(tokenizer: Any, ids: list[int]) -> str:
    """An answer without its stop token."""
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Prompts with long texts before their questions.")
    result.add_argument("--prompts", type=Path, required=True, help="the questions, JSON lines")
    result.add_argument("--answers", type=Path, required=True, help="a corpus of their answers")
    result.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    result.add_argument("--rows", type=int, default=200, help="how many (default: 200)")
    result.add_argument("--least", type=int, default=512, help="tokens of the shortest (512)")
    result.add_argument("--most", type=int, default=4096, help="tokens of the longest (4096)")
    result.add_argument("--seed", type=int, default=0, help="decides texts and lengths")
    cli.add_options(result, PairConfig, without=ALL_BUT_MODEL)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
