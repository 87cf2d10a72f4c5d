"""The eight data sets of the papers as they are published, with all turns of MT-Bench."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_mlx.cli.prompts import Row, first_of_each, read_prompts

SETS = {  # by what their files are called, capitals and signs apart: set, and who publishes it
    "gsm8k": ("GSM8K", "openai/gsm8k, split test"),
    "math500": ("MATH-500", "HuggingFaceH4/MATH-500"),
    "aime25": ("AIME25", "math-ai/aime25"),
    "humaneval": ("HumanEval", "openai/openai_humaneval"),
    "mbpp": ("MBPP", "google-research-datasets/mbpp, sanitized, split test"),
    "livecodebench": ("LiveCodeBench", "livecodebench/code_generation_lite"),
    "mtbench": ("MT-Bench", "HuggingFaceH4/mt_bench_prompts"),
    "alpaca": ("Alpaca", "tatsu-lab/alpaca"),
}
Answer = Callable[[list[Row], int], dict[str, str]]  # texts by id, for the questions of a turn


def read_sets(source: Path, limit: int | None) -> list[Row]:
    """First turns, each with an id of its own, and in `then` what the user says after the answers.

    source: a file of prompts, or a folder with a file for each set. limit: rows of a set.
    """
    later = {turns[0]: turns[1:] for file in _files(source) for turns in _turns(file)}
    counts: dict[str, int] = {}
    rows = []
    for row in first_of_each(read_prompts(source), limit):
        name = row["category"]
        counts[name] = counts.get(name, 0) + 1
        then = later.get(row["messages"][-1]["content"], [])
        rows.append({**row, "id": f"{name}-{counts[name]}", "then": then})
    return rows


def missing(source: Path) -> list[str]:
    """A sentence for each of the eight sets that a folder lacks."""
    if not source.is_dir():
        return []
    here = {re.sub(r"[^a-z0-9]", "", file.stem.lower()) for file in _files(source)}
    return [
        f"{source} has no {name}.jsonl: {title} is published as the data set {publisher}"
        for name, (title, publisher) in SETS.items()
        if name not in here
    ]


def all_turns(rows: list[Row], answer: Answer) -> list[Row]:
    """Every turn as a prompt of its own, behind what was said before it."""
    asked, turn = [], 1
    while rows:
        asked += [{k: v for k, v in row.items() if k != "then"} for row in rows]
        rows = [row for row in rows if row["then"]]
        said = answer(rows, turn) if rows else {}
        turn += 1
        rows = [_next(row, said[row["id"]], turn) for row in rows]
    return asked


def _next(row: Row, said: str, turn: int) -> Row:
    first, *then = row["then"]
    spoken = [{"role": "assistant", "content": said}, {"role": "user", "content": first}]
    name = f"{row['id'].partition(' ')[0]} turn {turn}"
    return {**row, "id": name, "messages": [*row["messages"], *spoken], "then": then}


def _files(source: Path) -> list[Path]:
    files = source.iterdir() if source.is_dir() else [source]
    return sorted(file for file in files if file.suffix in (".json", ".jsonl"))


def _turns(file: Path) -> Iterator[list[str]]:
    """What the user says in rows that have several turns; damaged rows are `read_prompts`'s."""
    text = file.read_text(encoding="utf-8-sig") if file.is_file() else ""
    for part in [text] if text.lstrip().startswith("[") else text.split("\n"):
        try:
            found: Any = json.loads(part) if part.strip() else []
        except ValueError:
            continue
        for row in found if isinstance(found, list) else [found]:
            turns = next((row[n] for n in ("turns", "prompt") if isinstance(row.get(n), list)), [])
            if len(turns) > 1 and all(isinstance(turn, str) for turn in turns):
                yield turns
