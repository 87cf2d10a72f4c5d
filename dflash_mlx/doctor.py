"""`python -m dflash_mlx.doctor`: what this machine is, and whether a pair fits."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs

from dflash_mlx import mac
from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import PairConfig, PrefixConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import in_words, read_speeds
from dflash_mlx.models.check import Report, check_built
from dflash_mlx.models.downloads import needed_by
from dflash_mlx.models.load import check_named, lines
from dflash_mlx.models.names import find_names
from dflash_mlx.session.memory import budget
from dflash_mlx.system.machine import describe_machine, describe_versions, model_of, namesakes
from dflash_mlx.verifier.pass_times import read_times
from dflash_mlx.verifier.routing import kernel_choices, trial_verdicts
from kernels_metal.gpu import gpu_family

PROGRAM = "dflash_mlx.doctor"
WRONG = 1  # exit code
SHOWN_ROWS = (8, 16, 32, 64)
_APART = "uninstall both, and install dflash-chat again, alone"
_NAMES = {"model", "drafter", "second_drafter"}  # the settings that say which pair


def main(argv: Sequence[str]) -> None:
    """Print the report; SystemExit(1) for a wrong kernel, 2 for a pair that cannot be used."""
    given = vars(parser().parse_args(argv))
    if given["mac"]:
        if not mac.make(mac.file_of(given.get("report", Path())), "rehearse" in given):
            raise SystemExit(WRONG)
        return
    for name in {"rehearse", "report"} & given.keys():
        raise DFlashError(f"{name} is for --mac alone", "add --mac, or leave it out", name)
    config = PairConfig(**{name: given[name] for name in _NAMES & given.keys()})
    report = check_named(config)
    print("\n".join(lines(report)), flush=True)
    if not report.errors:
        print("\n".join(_section("memory", memory(report, config))), flush=True)
    print("\n".join(about(platformdirs.user_cache_path("dflash-chat"))))
    print("kernels\n  not tried; python -m kernels_metal.sweep runs each against its reference")
    if report.errors:
        raise SystemExit(cli.BAD_INPUT)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="What this machine is, and whether a pair fits.")
    others = {field.name for field in fields(PairConfig)} - _NAMES
    cli.add_options(result, PairConfig, without=tuple(others))
    result.add_argument(
        "--mac",
        action="store_true",
        help="run every kernel on this Mac, compare their speed, and write a report (some "
        "minutes; the same command resumes)",
    )
    result.add_argument(
        "--report",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="with --mac: the files' name, without .md and .json, or a folder for them (default: "
        f"{mac.NAME})",
    )
    result.add_argument(
        "--rehearse",
        action="store_true",
        default=argparse.SUPPRESS,
        help="with --mac: in the emulator, without times",
    )
    return result


def memory(report: Report, config: PairConfig) -> dict[str, str]:
    """How the memory is shared out beside the pair of a report; no weight is read."""
    if target := check_built(report.target):
        target.context_length = report.target.context_length
    return budget(needed_by(find_names(config)), PrefixConfig(), target)


def about(cache: Path) -> list[str]:
    """Machine, versions, backend and what was measured for `cache`, as lines."""
    machine = describe_machine()
    backend = {name: machine.pop(name) for name in ("device", "blas")}
    machine["memory"] = f"{machine.pop('memory_bytes') / 2**30:.0f} GB"  # as its maker counts
    backend["metal"] = gpu_family() if mx.metal.is_available() else "not on this machine"
    return [
        *_section("machine", machine),
        *_section("versions", describe_versions()),
        *(f"  {each} has the import name dflash_mlx, too: {_APART}" for each in namesakes()),
        *_section("backend", backend),
        "stored timing of passes (of a busy hour? dflash-chat --recalibrate takes it again)",
        *_calibrations(cache / "timing"),
        "stored kernel choices",
        *_stored_choices(cache / "kernels"),
    ]


def _section(title: str, rows: Mapping[str, Any]) -> list[str]:
    width = max(map(len, rows))
    return [title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]


def _calibrations(folder: Path) -> list[str]:
    lines = []
    for file in sorted(folder.glob("*.json"), key=lambda file: (model_of(file), file)):
        day = datetime.fromtimestamp(file.stat().st_mtime).date()
        with suppress(OSError, ValueError, KeyError, TypeError):
            told = f"drafters: {', '.join(map(in_words, read_speeds(file)))}"
            lines.append(f"  {model_of(file)}  {day}  {told}")
            continue
        try:
            times = read_times(file)
            one = float(times.of(1))
            wider = [f"of {rows} {float(times.of(rows)) / one:.2f} x" for rows in SHOWN_ROWS]
            wider += [f"after {t.context} {float(t.of(1)) / one:.2f} x" for t in times.deeper]
            told = ", ".join([f"a pass of 1 token {one * 1e3:.1f} ms", *wider])
        except (OSError, ValueError, KeyError, TypeError):
            told = "unreadable, will be measured again"
        lines.append(f"  {model_of(file)}  {day}  {told}")
    return lines or ["  none yet: the chat and the server measure it while idle"]


def _stored_choices(folder: Path) -> list[str]:
    lines = []
    for model, choices in kernel_choices(folder).items():
        lines.append(f"  {model}")
        for case, choice in choices.items():
            taken = "kernel" if choice.kernel else "stock"
            lines.append(f"    {taken:<7} {choice.reason}  ({case})")
    for case, verdict in trial_verdicts(folder).items():
        lines.append(f"  {'safe' if verdict.safe else 'unsafe':<7} {verdict.reason}  ({case})")
    return lines or ["  none: made when a model first answers on Metal"]


if __name__ == "__main__":
    cli.run(main, PROGRAM)
