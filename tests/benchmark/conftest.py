"""The benchmark's command line on a tiny pair, in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.benchmark import __main__ as benchmark
from support.models import write_drafter, write_model

TEXTS = {"code": ["def f():", "x = 1"], "chat": ["hello", "how are you?"]}


@dataclass(frozen=True)
class Bench:
    """A tiny pair and two prompts of each of two categories."""

    root: Path

    def options(self, *more: str) -> list[str]:
        return [
            *("--model", str(self.root / "model"), "--drafter", str(self.root / "drafter")),
            *("--prompts", str(self.root / "prompts.jsonl"), "--max-tokens", "6", *more),
        ]

    def run(self, report: Path, *more: str) -> dict[str, Any]:
        benchmark.main(self.options("--json", str(report), *more))
        return json.loads(report.read_text())


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("benchmark")
    write_model(root / "model")
    write_drafter(root / "drafter")
    rows = [
        {"id": f"{category}-{i}", "category": category, "prompt": text}
        for category, texts in TEXTS.items()
        for i, text in enumerate(texts)
    ]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Bench(root)


@pytest.fixture
def no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.cli, "open_pair", lambda *_, **__: pytest.fail("loaded"))
