"""Another command, on a rank that has (the first word names it) another version of MLX."""

import os
import runpy
import sys

from dflash_mlx.system import machine

_, rank, module, *words = sys.argv
if os.environ["MLX_RANK"] == rank:
    versions = machine.describe_versions()
    machine.describe_versions = lambda: {**versions, "mlx": "0.0.1"}
sys.argv = [module, *words]
runpy.run_module(module, run_name="__main__")
