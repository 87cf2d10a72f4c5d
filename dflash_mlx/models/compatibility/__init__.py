"""Whether a target, a drafter and the two together can be used, before any weight is read.

`check_target`, `check_drafter` and `check_pair` read configurations and the heads of weight files,
here or on the Hugging Face hub (`model_source`), and return facts and findings; `raise_first`
makes the first error a DFlashError. docs/compatibility.md lists the checks.
"""

from dflash_mlx.core.findings import Checked, Finding, Refused
from dflash_mlx.models.compatibility.check import (
    DrafterFacts,
    Report,
    TargetFacts,
    check_drafter,
    check_pair,
    check_target,
    describe_target,
)
from dflash_mlx.models.compatibility.model_source import HubRepository, LocalFolder
from dflash_mlx.system.safetensors_header import read_header

__all__ = [
    "Checked",
    "DrafterFacts",
    "Finding",
    "HubRepository",
    "LocalFolder",
    "Refused",
    "Report",
    "TargetFacts",
    "check_drafter",
    "check_pair",
    "check_target",
    "describe_target",
    "read_header",
]
