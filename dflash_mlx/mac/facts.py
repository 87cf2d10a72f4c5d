"""What a Mac says of itself, as lines of its own programs; "unknown" where one says nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

from dflash_mlx.core.text import amount
from dflash_mlx.system.machine import describe_machine, describe_versions
from kernels_metal.gpu import gpu_family, power_mode, said

UNKNOWN = "unknown"
Say = Callable[[str], str]  # what a program prints
_TOLD = {  # by a program, and where in what it prints
    "macos": ("sw_vers", r"ProductVersion:\s*(\S+)"),
    "build": ("sw_vers", r"BuildVersion:\s*(\S+)"),
    "gpu cores": ("system_profiler SPDisplaysDataType", r"Total Number of Cores: *(\d+)"),
    "free memory": ("memory_pressure -Q", r"free percentage: *(\d+ ?%)"),
    "power": ("pmset -g batt", r"drawing from '([^']*)'"),
}


def facts(say: Say = said) -> dict[str, str]:
    """Of chip, system, memory and power."""
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


def rehearsed() -> dict[str, str]:
    """The facts of a Mac that is not there."""
    return {**facts(lambda command: ""), "chip": "rehearsed, no Mac", "gpu": "emulated"}
