"""Every command of the program, with a line that would succeed or work for long."""

from __future__ import annotations

from pathlib import Path

COMMANDS = ("generate", "dflash-chat", "convert", "doctor", "corpus", "train", "benchmark", "serve")


def words_of(command: str, model: Path, place: Path) -> list[object]:
    """What Python is started with. place: holds `dflash-chat` and prompts.jsonl, gets `out`."""
    chosen: list[object] = ["--model", model]
    prompts = [*chosen, "--prompts", "prompts.jsonl"]
    answer = [*chosen, "--prompt", "hello", "--method", "none", "--max-tokens", "3000"]
    options: dict[str, list[object]] = {
        "generate": answer,
        "dflash-chat": answer,
        "convert": [model, place / "out", "--bits", "4", "--group-size", "32"],
        "doctor": chosen,
        "corpus": [*prompts, "--out", place / "out", "--method", "none"],
        "train": [*chosen, "--corpus", "prompts.jsonl", "--out", place / "out", "--steps", "9"],
        "benchmark": [*prompts, "--methods", "none"],
        "serve": [*chosen, "--method", "none", "--port", "0"],
    }
    start = [place / command] if command == "dflash-chat" else ["-m", f"dflash_mlx.{command}"]
    return [*start, *options[command]]
