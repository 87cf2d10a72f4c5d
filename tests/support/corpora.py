"""Small corpora and runs of the corpus command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_mlx.train.corpus.rows import CorpusRow, read_rows

corpus = import_module("dflash_mlx.train.corpus.__main__")

MAX_TOKENS = 40
PROMPTS = [
    {
        "id": f"p{i}",
        "category": "chat",
        "messages": [{"role": "user", "content": "ab Cd, e." * (i % 7) + f"{i}?"}],
    }
    for i in range(16)
]


def write_prompts(file: Path, prompts: Sequence[dict[str, Any]] = PROMPTS) -> Path:
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return file


def options(folder: Path, out: Path, *more: str) -> list[str]:
    words = ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl")]
    words += ["--out", str(out), "--max-tokens", str(MAX_TOKENS), "--batch-size", "8"]
    return [*words, *more]


def run(folder: Path, out: Path, *more: str) -> list[CorpusRow]:
    corpus.main(options(folder, out, *more))
    return read_rows(out)[1]


def by_id(rows: Sequence[CorpusRow]) -> dict[str, CorpusRow]:
    assert len({row.id for row in rows}) == len(rows), "a prompt was answered twice"
    return {row.id: row for row in rows}
