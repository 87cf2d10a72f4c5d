"""`python -m dflash_mlx.doctor`: what this machine is, whether a pair fits, and its kernels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs
from tqdm import tqdm

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.text import amount
from dflash_mlx.engine.pair import in_words, read_speeds
from dflash_mlx.mac import command as mac
from dflash_mlx.models.load import check_named, lines
from dflash_mlx.system.files import keep_text
from dflash_mlx.system.machine import describe_machine, describe_versions, model_of
from dflash_mlx.verifier.pass_times import read_times
from dflash_mlx.verifier.routing import kernel_choices, trial_verdicts
from kernels_metal.faults import Faults
from kernels_metal.gpu import gpu_family
from kernels_metal.sweep import Trial, error, trials

PROGRAM = "dflash_mlx.doctor"
WRONG = 1  # exit code
TRIALS, EMULATED_TRIALS = 12, 3  # of each operation; a multiple of the three dtypes
SHOWN_ROWS = (8, 16, 32, 64)
_NAMES = {"model", "drafter", "second_drafter"}  # the settings that say which pair
NO_EMULATOR = "the emulator is in a checkout of the project alone"


@dataclass(frozen=True)
class Result:
    """One trial of a kernel against its reference."""

    trial: Trial
    error: float  # as of `sweep.error`, infinite with a fault
    fault: str = ""  # that stopped it
    refused: str = ""  # why its kernel is not for such arguments here: it was not run

    @property
    def right(self) -> bool:
        return bool(self.refused) or self.error <= 1


def main(argv: Sequence[str]) -> None:
    """Print the report; SystemExit(1) for a wrong kernel, 2 for a pair that cannot be used."""
    arguments = parser().parse_args(argv)
    if arguments.mac:
        if not mac.make(mac.file_of(arguments.report), arguments.rehearse):
            raise SystemExit(WRONG)
        return
    print("\n".join(about(platformdirs.user_cache_path("dflash-chat"))), flush=True)
    given = vars(arguments)  # its --kernels is not the setting of that name
    config = PairConfig(**{name: given[name] for name in _NAMES & given.keys()})
    if config == PairConfig():
        print("pair\n  not checked; --model and --drafter name one")
    else:
        report = check_named(config)
        print("\n".join(lines(report)), flush=True)
        if report.errors:
            raise SystemExit(cli.BAD_INPUT)
    metal = mx.metal.is_available()
    each = arguments.trials or (TRIALS if metal else EMULATED_TRIALS)
    print("kernels")
    if not arguments.kernels:
        print("  not tried; --kernels runs each against its reference")
    elif not metal and (why := no_emulator()):
        print(f"  not tried: this machine has no Metal, and {why}")
    else:
        print("\n".join(introduction(metal, each)), flush=True)
        results = list(check_kernels(metal, arguments.seed, each))
        print("\n".join(verdict(results, "on Metal" if metal else "in the emulator")))
        if not all(result.right for result in results):
            raise SystemExit(WRONG)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="What this machine is, whether a pair fits, and whether its kernels are right.",
    )
    others = {field.name for field in fields(PairConfig)} - _NAMES
    cli.add_options(result, PairConfig, without=tuple(others))
    result.add_argument(
        "--kernels", action="store_true", help="run every Metal kernel against its reference"
    )
    result.add_argument(
        "--trials",
        type=_count,
        help=f"random shapes of each operation (default: {TRIALS}, emulated {EMULATED_TRIALS})",
    )
    result.add_argument(
        "--mac",
        action="store_true",
        help="run every kernel on this Mac, race them, and write a report (about four minutes; a "
        "second start goes on where one ended)",
    )
    result.add_argument(
        "--report",
        type=Path,
        default=Path(mac.NAME),
        metavar="FILE",
        help=f"of --mac, with .md and .json behind it (default: {mac.NAME})",
    )
    result.add_argument(
        "--rehearse", action="store_true", help="of --mac: in the emulator, without times"
    )
    result.add_argument("--seed", type=int, default=0, help="another one gives other shapes")
    return result


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def about(cache: Path) -> list[str]:
    """Machine, versions, backend and what was measured for `cache`, as lines."""
    machine = describe_machine()
    backend = {name: machine.pop(name) for name in ("device", "blas")}
    machine["memory"] = amount(machine.pop("memory_bytes"))
    backend["metal"] = gpu_family() if mx.metal.is_available() else "not on this machine"
    return [
        *_section("machine", machine),
        *_section("versions", describe_versions()),
        *_section("backend", backend),
        "stored calibration",
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
            wider = [f"{rows} rows {float(times.of(rows)) / one:.2f} x" for rows in SHOWN_ROWS]
            wider += [f"behind {t.context} {float(t.of(1)) / one:.2f} x" for t in times.deeper]
            told = ", ".join([f"1 row {one * 1e3:.1f} ms", *wider])
        except (OSError, ValueError, KeyError, TypeError):
            told = "unreadable, will be measured again"
        lines.append(f"  {model_of(file)}  {day}  {told}")
    return lines or ["  none yet: the chat and the server measure it while nothing is asked"]


def _stored_choices(folder: Path) -> list[str]:
    lines = []
    for model, choices in kernel_choices(folder).items():
        lines.append(f"  {model}")
        for case, choice in choices.items():
            taken = "kernel" if choice.kernel else "stock"
            lines.append(f"    {taken:<7} {choice.reason}  ({case})")
    for case, verdict in trial_verdicts(folder).items():
        lines.append(f"  {'safe' if verdict.safe else 'unsafe':<7} {verdict.reason}  ({case})")
    return lines or ["  none: the first answer of a model on Metal makes them"]


def no_emulator() -> str:
    """Why kernels cannot be emulated here, "" where they can."""
    if find_spec("kernels_metal.emulator") is None:
        return NO_EMULATOR
    try:
        _compiler()
    except RuntimeError as problem:
        return f"the emulator no compiler ({problem});\n  pip install ziglang gives it one"
    return ""


def _compiler() -> str:
    from kernels_metal.emulator import compiler  # in a checkout alone, not in the wheel

    return compiler.find_compiler().version.splitlines()[0]


def introduction(metal: bool, each: int) -> list[str]:
    """Where the kernels are about to run."""
    trials = f"{each} random shapes of each operation; an error of 1 is what rounding explains"
    if metal:
        return [f"  on Metal ({gpu_family()}), {trials}"]
    return [
        "  no Metal on this machine: decoding uses the references, and no kernel ran on a GPU.",
        f"  Emulated instead: the kernels' Metal source, compiled with {_compiler()},",
        "  on this processor, with checks of bounds, races, divergence and uninitialised memory;",
        f"  {trials}. Speed is not emulated.",
    ]


def check_kernels(metal: bool, seed: int, each: int) -> Iterator[Result]:
    """Run `each` trials of every operation, on Metal or in the emulator."""
    faults = Faults(platformdirs.user_cache_path("dflash-chat") / "kernels" / "faults", keep_text)
    with nullcontext() if metal else import_module("kernels_metal.emulator").emulated():
        for trial in tqdm(list(trials(seed, each)), desc="kernels", leave=False, disable=None):
            try:
                trial.operation.check(*trial.arguments)
            except ValueError as refusal:
                yield Result(trial, 0.0, refused=str(refusal))
                continue
            try:
                yield Result(trial, error(trial))
            except (RuntimeError, ValueError) as fault:  # the emulator, Metal or the GPU refuses it
                yield Result(trial, float("inf"), faults.report(str(fault)))


def verdict(results: Sequence[Result], where: str) -> list[str]:
    """The worst trial of each operation, every wrong trial, and a sentence."""
    names = dict.fromkeys(result.trial.operation.name for result in results)
    lines = ["  worst error of each operation, and where"]
    for name in names:
        worst = max((r for r in results if r.trial.operation.name == name), key=lambda r: r.error)
        lines.append(f"  {worst.error:8.3f}  {worst.trial.label}")
    wrong = [result for result in results if not result.right]
    lines += [f"  refused  {r.trial.label}  {r.refused}" for r in results if r.refused]
    lines += [f"  WRONG {r.error:.3g}  {r.trial.label}  {r.fault}".rstrip() for r in wrong]
    return [*lines, f"  {len(wrong)} of {len(results)} trials wrong {where}"]


if __name__ == "__main__":
    cli.run(main, PROGRAM)
