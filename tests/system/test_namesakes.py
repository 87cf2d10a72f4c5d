"""Other packages whose import name is ours, as `dflash-mlx` on PyPI."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import dflash_mlx
from dflash_mlx import doctor
from dflash_mlx.system.machine import namesakes

OVER = """import dflash_mlx, sys
from dflash_mlx.cli import options
del dflash_mlx.blas  # as another package's file would leave it
options.run(lambda words: print("ran"), "dflash-chat")
"""


@pytest.fixture
def installed(tmp_path):
    """A folder as pip leaves it, with a package that has our import name."""
    about = tmp_path / "dflash_mlx-0.1.8.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: dflash-mlx\nVersion: 0.1.8\n")
    (about / "top_level.txt").write_text("dflash_mlx\n")
    return tmp_path


def test_the_doctor_names_every_other_package_with_our_import_name(
    installed, monkeypatch, tmp_path
):
    assert namesakes() == [] and "import name" not in "\n".join(doctor.about(tmp_path))
    monkeypatch.syspath_prepend(str(installed))
    assert namesakes() == ["dflash-mlx 0.1.8"]
    (line,) = [each for each in doctor.about(tmp_path) if "import name" in each]
    assert "dflash-mlx 0.1.8" in line and "dflash-chat" in line


def test_a_command_whose_files_another_package_replaced_says_which_and_ends_with_2(installed):
    path = os.pathsep.join([str(installed), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", OVER],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "ran" not in done.stdout
    assert "dflash-mlx 0.1.8" in done.stderr and len(done.stderr.splitlines()) == 1
    assert hasattr(dflash_mlx, "blas"), "which tells our own file from others"
