"""Makes the report: all items in a child, kept as they come, so that a second start goes on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.system.files import kept_json, write_report
from dflash_mlx.system.machine import describe_machine, describe_versions
from kernels_metal.children import Children, Gone
from kernels_metal.dispatch import fingerprint
from kernels_metal.gpu import gpu_family, power_mode, said
from kernels_metal.mac.items import MODELS, Item, last_items, limit, race_items, variant_items
from kernels_metal.mac.report import summary, ways
from kernels_metal.sweep import no_emulator

NAME = "dflash-mac-report"
COMMAND = (sys.executable, "-m", "kernels_metal.mac.measure")
GONE_MOST = 10  # children in one report: a GPU that hangs again and again is not asked for more
_NEXT = "move it away, or name another with --report"
UNKNOWN = "unknown"  # where a program of the Mac says nothing
Say = Callable[[str], str]  # what a program prints
_TOLD = {  # by a program, and where in what it prints
    "macos": ("sw_vers", r"ProductVersion:\s*(\S+)"),
    "build": ("sw_vers", r"BuildVersion:\s*(\S+)"),
    "gpu cores": ("system_profiler SPDisplaysDataType", r"Total Number of Cores: *(\d+)"),
    "free memory": ("memory_pressure -Q", r"free percentage: *(\d+ ?%)"),
    "power": ("pmset -g batt", r"drawing from '([^']*)'"),
}


def mac_facts(say: Say = said) -> dict[str, str]:
    """What a Mac says of chip, system, memory and power, as lines of its own programs."""
    machine = describe_machine()
    found = {name: re.search(pattern, say(command)) for name, (command, pattern) in _TOLD.items()}
    return {
        "chip": str(machine["processor"]) or UNKNOWN,
        "cpu cores": str(machine["cores"]),
        "gpu": gpu_family(),
        "memory": amount(machine["memory_bytes"]),
        "power mode": power_mode() or UNKNOWN,
        **{name: match[1] if match else UNKNOWN for name, match in found.items()},
        **describe_versions(),
    }


def rehearsed_facts() -> dict[str, str]:
    """The facts of a Mac that is not there."""
    return {**mac_facts(lambda command: ""), "chip": "rehearsed, no Mac", "gpu": "emulated"}


@dataclass
class Report:
    """What was found so far, in a file that a second start goes on with."""

    file: Path  # the JSON; the Markdown stands beside it
    made_with: str
    facts: dict[str, str]
    found: dict[str, dict[str, Any]]

    def keep(self, finished: bool = False) -> None:
        """Write it. DFlashError where that cannot be done."""
        plain: dict[str, Any] = {"made with": self.made_with, "finished": finished}
        plain |= {"facts": self.facts, "found": self.found}
        write_report(self.file, json.dumps(plain, indent=1))
        if finished:
            told = "\n".join(["```", *summary(self.facts, self.found), "```", ""])
            write_report(self.file.with_suffix(".md"), told)


def file_of(report: Path) -> Path:
    """The JSON of the report that a user has named, or named a folder for."""
    report = report / NAME if report.is_dir() else report
    return report.with_name(f"{report.name.removesuffix('.json')}.json")


def opened(file: Path, rehearse: bool) -> Report:
    """A new report, or the unfinished one in `file` where it is of this machine and these kernels.

    DFlashError for a file that is there and no unfinished report.
    """
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = kept_json(file)
        kept = found if found["finished"] is False and isinstance(found["found"], dict) else {}
    for path in (file, file.with_suffix(".md")):
        if path.exists() and not (kept and path == file):
            raise DFlashError(f"{path} already exists", _NEXT)
    facts = rehearsed_facts() if rehearse else mac_facts()
    made_with = f"{fingerprint()} {facts['chip']} {facts['gpu']}"
    found = kept["found"] if kept.get("made with") == made_with else {}
    report = Report(file, made_with, facts, found)
    report.keep()
    return report


def make(file: Path, rehearse: bool, say: Callable[[str], None] = print) -> bool:
    """Do all that is not done yet, write both files, and say what to paste.

    Returns whether nothing was wrong. DFlashError where there is no Metal, and for a file that is
    there.
    """
    if not rehearse and not mx.metal.is_available():
        problem = "this machine has no Metal, so there is nothing to report"
        raise DFlashError(problem, "--rehearse runs all of it in the emulator")
    if rehearse and (why := no_emulator()):
        step = "a clone of the project with clang, or with the package ziglang, can"
        raise DFlashError(f"nothing can be rehearsed: {why}", step)
    report = opened(file, rehearse)
    children = Children(COMMAND, wanted=True)
    try:
        for stage in stages(report):
            _do([{**item, "rehearse": rehearse} for item in stage], report, children)
    finally:
        children.close()
    report.keep(finished=True)
    for line in summary(report.facts, report.found):
        say(line)
    say(f"All of it is in {file.with_suffix('.md')} and {file}.")
    return not any(each.get("wrong") for each in report.found.values())


def stages(report: Report) -> Iterable[list[Item]]:
    """All items; the last depend on what was found before."""
    yield [{"name": "machine", "kind": "machine"}]
    yield [*variant_items()]
    yield [*race_items()]
    yield [*last_items(ways(report.found, MODELS[-1], 8))]


def _do(items: list[Item], report: Report, children: Children) -> None:
    """Ask a child for each, and keep what came of it."""
    left = [item for item in items if item["name"] not in report.found]
    for item in tqdm(left, desc=left[0]["kind"] if left else "", leave=False, disable=None):
        gone = sum("gone" in each for each in report.found.values())
        if gone >= GONE_MOST:
            found: dict[str, Any] = {"wrong": f"not tried: {gone} others hung or ended the process"}
        else:
            try:
                found = children.ask(item, limit(item))
            except Gone as words:
                found = {"wrong": str(words), "gone": True}
        report.found[item["name"]] = {"kind": item["kind"], **found}
        report.keep()
