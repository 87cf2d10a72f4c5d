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


def house(root: Path, files: dict[str, str]) -> dict[str, int]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    (root / "pyproject.toml").write_text(CONTRACT)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    (root / "app" / "unknown.py").write_text("from dflash_mlx.cli import doctor\n")
    command = [sys.executable, SCRIPT, root, "--json", "--lines"]
    return json.loads(subprocess.check_output(command))


def test_rooms_floors_and_arrows_are_counted(tmp_path):
    found = house(tmp_path, FILES)
    lines = found.pop("lines")
    assert found == {
        "rooms": 6,  # dflash_mlx with its door, flat, cli, engine, kernels_metal, dflash_chat
        "floors": 4,  # app or dflash_mlx, flat or cli, engine, kernels
        "arrows": 6,
        "arrows up": 1,  # from flat to engine, against the contract
        "modules flat": 2,
    }
    assert lines["dflash_mlx"] == 4 and lines["tests"] == 8 and lines["app"] == 1


def test_rooms_on_a_circle_are_a_floor_each_and_their_arrows_go_up(tmp_path):
    circle = {"kernels_metal/kernel.py": "import dflash_mlx.engine.decode"}
    found = house(tmp_path, FILES | circle)
    assert (found["floors"], found["arrows"], found["arrows up"]) == (4, 7, 3)
