"""Serve a model that follows a script, so that agents go through whole turns with their tools.

    .venv/bin/python scripts/scripted_server.py FOLDER

It reads notes.txt in FOLDER and changes red to blue there, by whichever tools a program offers, and
then says so; to a request without such tools it says a sentence. A prompt with "think" in its last
words is thought about first. Each request is told on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import dflash_mlx  # noqa: E402, F401  (before anything imports mlx)
from support.serving import TEMPLATE, USUAL, actor_pair, serving  # noqa: E402

# With calls as JSON, as Qwen's template has them, so that strict tools have a grammar.
CALLS = TEMPLATE.replace(
    "<tool_call>{{ (tool_call.function or tool_call.name).name }}</tool_call>",
    '<tool_call>\n{"name": "{{ (tool_call.function or tool_call.name).name }}", '
    '"arguments": {{ tool_call.function.arguments | tojson }}}\n</tool_call>',
)
NAME = "notes.txt"
PATCH = f"*** Begin Patch\n*** Update File: {NAME}\n@@\n-red\n+blue\n*** End Patch\n"


def script(path: str) -> list[dict[str, dict[str, str]]]:
    """What is called in each turn, by the names of tools; the first that is offered is taken."""
    change = {"file_path": path, "old_string": "red", "new_string": "blue"}
    return [
        {
            "Read": {"file_path": path},
            "read": {"filePath": path},
            "exec_command": {"cmd": f"cat {NAME}"},
            "read_file": {"name": NAME},
        },
        {
            "Edit": change,
            "edit": {"filePath": path, "oldString": "red", "newString": "blue"},
            "apply_patch": {"input": PATCH},
            "exec_command": {"cmd": f"sed -i s/red/blue/ {NAME} && cat {NAME}"},
            "write_file": {"name": NAME, "text": "blue\n"},
        },
    ]


def answer(steps: list[dict[str, dict[str, str]]], prompt: str) -> str:
    """What is said to a conversation, as the tests' template writes it."""
    tools = prompt.partition("[tools]")[2].partition("[")[0].split()
    done = prompt.count("[tool]")
    thought = "<think>\nI look first.</think>\n" if "think" in prompt[-200:] else ""
    found = next((each for each in steps[done] if each in tools), None) if done < 2 else None
    print(f"{len(prompt)} characters, {len(tools)} tools, {done} results: {found}", file=sys.stderr)
    if found is None:
        return thought + ("It is blue now." if done else "I have no tool for that.")
    call = json.dumps({"name": found, "arguments": steps[done][found]})
    return f"{thought}I use {found}.\n<tool_call>\n{call}\n</tool_call>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    steps = script(str(given.folder.resolve() / NAME))
    act = lru_cache(8)(lambda prompt: answer(steps, prompt))
    pair = actor_pair(act, CALLS, context_length=500_000)
    usual = replace(USUAL, max_tokens=4000)
    with serving(pair, usual, "local", faults=True) as server:
        print(server.url, flush=True)
        time.sleep(given.seconds)


if __name__ == "__main__":
    main()
