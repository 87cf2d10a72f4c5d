"""Small corpora and runs of the corpus command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_mlx.train.corpus.rows import Row, read_rows
from support.models import write_model

corpus = import_module("dflash_mlx.train.corpus.__main__")


MAX_TOKENS = 40


PROMPTS = [
    {
        "id": f"p{i}",
        "category": "chat",
        "messages": [{"role": "user", "content": "ab Cd, e." * (i % 7) + f"{i}?"}],
    }
    for i in range(24)
]


def write_prompts(file: Path, prompts: Sequence[dict[str, Any]] = PROMPTS) -> Path:
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return file


def write_folder(root: Path) -> Path:
    write_model(root / "model")
    write_prompts(root / "prompts.jsonl")
    return root


def options(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        *("--model", str(folder / "model")),
        *("--prompts", str(folder / "prompts.jsonl")),
        *("--out", str(out)),
        *("--max-tokens", str(MAX_TOKENS)),
        *("--batch-size", "8"),
        *more,
    ]


def run(folder: Path, out: Path, *more: str) -> list[Row]:
    corpus.main(options(folder, out, *more))
    return read_rows(out)[1]


def by_id(rows: Sequence[Row]) -> dict[str, Row]:
    assert len({row.id for row in rows}) == len(rows), "a prompt was answered twice"
    return {row.id: row for row in rows}
