"""What the wheel holds."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_the_wheel_has_every_folder_of_code_but_the_emulator():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    files = [
        file for name in ("dflash_mlx", "kernels_metal") for file in ROOT.glob(f"{name}/**/*.py")
    ]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in files}
    left_out = {name for name in found if name.startswith("kernels_metal.emulator")}
    assert left_out and {*settings["packages"]} == {*found, "dflash_chat"} - left_out
