"""What a Mac says of itself, as lines of its own programs; "unknown" where one says nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

from dflash_mlx.core.text import amount
from dflash_mlx.system.machine import describe_machine, describe_versions
from kernels_metal.gpu import gpu_family, power_mode

UNKNOWN = "unknown"
_SECONDS = 20.0
Say = Callable[[list[str]], str]


def said(command: list[str]) -> str:
    """What a program prints, "" where there is none or it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def facts(say: Say = said) -> dict[str, str]:
    """Of chip, system, memory and power."""
    machine, versions = describe_machine(), describe_versions()
    system = " ".join(
        found
        for part in ("-productVersion", "-buildVersion")
        if (found := say(["sw_vers", part]).strip())
    )
    return {
        "chip": str(machine["processor"]) or UNKNOWN,
        "cpu cores": str(machine["cores"]),
        "gpu cores": _found(
            r"Total Number of Cores: *(\d+)", say, "system_profiler SPDisplaysDataType"
        ),
        "gpu": gpu_family(),
        "macos": system or UNKNOWN,
        "memory": amount(machine["memory_bytes"]),
        "free memory": _found(r"free percentage: *(\d+ ?%)", say, "memory_pressure -Q"),
        "power": _found(r"drawing from '([^']*)'", say, "pmset -g batt"),
        "power mode": power_mode() or UNKNOWN,
        "python": versions["python"],
        "mlx": versions.get("mlx", UNKNOWN),
        "mlx-lm": versions.get("mlx-lm", UNKNOWN),
        "dflash-chat": versions.get("dflash-chat", UNKNOWN),
    }


def rehearsed() -> dict[str, str]:
    """The facts of a Mac that is not there."""
    return {**facts(lambda command: ""), "chip": "rehearsed, no Mac", "gpu": "emulated"}


def _found(pattern: str, say: Say, command: str) -> str:
    match = re.search(pattern, say(command.split()))
    return match[1] if match else UNKNOWN
