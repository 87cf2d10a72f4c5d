"""Memory: what a machine has, and what a container or a shell leaves of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_mlx.system import machine

FILES = {
    "v2": ("0::/a/b", "a/b", "memory.max", "memory.current"),
    "v1": ("4:memory:/a/b", "memory/a/b", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A folder in the place of the system's, and how to say which group this process is in."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    own = tmp_path / "own"
    monkeypatch.setattr(machine, "OWN_CGROUPS", own)
    return tmp_path / "cgroup", own


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("above", [False, True])
def test_the_limit_of_a_cgroup_or_of_one_above_it_counts_without_its_cached_files(
    cgroups, version, above
):
    root, own = cgroups
    line, place, most, used = FILES[version]
    own.write_text(f"3:cpu:/elsewhere\n{line}\n")
    group = root / place
    group.mkdir(parents=True)
    (group / most).write_text("max\n" if version == "v2" else str(2**63 - 4096))
    (group / used).write_text("1000\n")
    (group / "memory.stat").write_text("anon 400\ninactive_file 500\nactive_file 100\n")
    before = machine.memory_limit(), machine.available_memory()
    assert 2000 < before[0] <= machine.installed_memory() and before[1] > 2000
    limited = group.parent if above else group
    for name in (used, "memory.stat"):
        (limited / name).write_text((group / name).read_text())
    (limited / most).write_text("2000\n")
    assert machine.memory_limit() == 2000
    assert machine.available_memory() == 2000 - (1000 - 600)
    (limited / used).write_text("9000")
    assert machine.available_memory() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells what of it is taken")
def test_a_limit_of_the_shell_counts():
    """In a process of its own, whose limits are set before."""
    code = """if True:
        import resource
        resource.setrlimit(resource.RLIMIT_DATA, (3 * 10**9, 3 * 10**9))
        from dflash_mlx.system.machine import available_memory, memory_limit
        print(memory_limit(), available_memory())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    limit, available = map(int, done.stdout.split())
    assert limit == 3 * 10**9 and 0 < available < limit
