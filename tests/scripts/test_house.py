"""The script that counts rooms, floors and arrows, on a checkout that is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "house.py"
FILES = {
    "dflash_mlx/__init__.py": "from dflash_mlx.engine import decode",
    "dflash_mlx/doctor.py": "from dflash_mlx.cli import doctor",
    "dflash_mlx/flat.py": "def f():\n    from dflash_mlx.engine import decode",
    "dflash_mlx/cli/doctor.py": "import dflash_mlx.engine.decode\nimport mlx.core",
    "dflash_mlx/engine/decode.py": "from kernels_metal import kernel",
    "kernels_metal/kernel.py": "if TYPE_CHECKING:\n    import dflash_mlx.flat",
    "app/main.py": "from dflash_mlx import flat",
    "tests/test_decode.py": "import dflash_mlx\n" * 7,
}
CONTRACT = """
[[tool.importlinter.contracts]]
type = "layers"
containers = ["dflash_mlx"]
layers = ["cli | engine", "flat"]
"""


def test_rooms_floors_and_arrows_are_counted(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "pyproject.toml").write_text(CONTRACT)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "app" / "unknown.py").write_text("from dflash_mlx.cli import doctor\n")
    command = [sys.executable, SCRIPT, tmp_path, "--json", "--lines"]
    found = json.loads(subprocess.check_output(command))
    lines = found.pop("lines")
    assert found == {
        "rooms": 6,  # dflash_mlx with its door, flat, cli, engine, kernels_metal, dflash_chat
        "floors": 4,  # app or dflash_mlx, flat or cli, engine, kernels
        "arrows": 6,
        "arrows up": 1,  # from flat to engine, against the contract
        "modules flat": 2,
    }
    assert lines["dflash_mlx"] == 4 and lines["tests"] == 8 and lines["app"] == 1
