"""Rooms, floors and arrows of a checkout: how easily somebody finds their way in it.

    python scripts/house.py [FOLDER] [--lines] [--json]

*Rooms* are the folders of `dflash_mlx`, `kernels_metal` and `app` that hold Python files, and every
module that lies flat in `dflash_mlx/`. What defines nothing there, the doors of `python -m`, is in
the room of the folder with its `__init__`.
*Arrows* lead from a room to each other one that its modules import, wherever in the file the import
stands; what is imported for types alone (TYPE_CHECKING) does not count.
*Floors* are the rooms of the longest chain of arrows that comes into no room twice. *Arrows up* run
against a layers contract of import-linter in pyproject.toml, or lie on a circle, which no order
allows. *Lines* are those of the Python files that git knows, by folder.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

try:
    import tomllib
except ImportError:  # before Python 3.11
    import tomli as tomllib

PACKAGES = {"dflash_mlx": "dflash_mlx", "kernels_metal": "kernels_metal", "app": "dflash_chat"}
FLAT = "dflash_mlx"


def tracked(root: Path) -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=root, text=True)
    return [Path(line) for line in listed.splitlines() if (root / line).is_file()]


def import_name(file: Path) -> str:
    parts = [PACKAGES[file.parts[0]], *file.with_suffix("").parts[1:]]
    return ".".join(parts).removesuffix(".__init__")


def read(root: Path) -> tuple[dict[str, set[str]], list[str]]:
    """What every room imports, and the modules that lie flat."""
    files = {import_name(file): file for file in tracked(root) if file.parts[0] in PACKAGES}
    trees = {name: ast.parse((root / file).read_text("utf-8")) for name, file in files.items()}
    flat = [name for name, file in files.items() if file.parent == Path(FLAT) and name != FLAT]
    room = {name: import_name(file.parent / "__init__.py") for name, file in files.items()}
    defining = (ast.FunctionDef, ast.ClassDef)
    room |= {name: name for name in flat if any(isinstance(n, defining) for n in trees[name].body)}
    rooms: dict[str, set[str]] = {name: set() for name in room.values()}
    for name, tree in trees.items():
        imported = {room[other] for other in imports(tree, files) if other in room}
        rooms[room[name]] |= imported - {room[name]}
    return rooms, flat


def imports(tree: ast.AST, modules: Collection[str]) -> Iterator[str]:
    """What a file imports; `from a import b` is a.b where that is one of the modules."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name if name in modules else node.module for name in inner)
        yield from imports(node, modules)


def figures(root: Path) -> dict[str, int]:
    rooms, flat = read(root)
    reached = {room: {room, *others} for room, others in rooms.items()}
    for middle in rooms:
        for found in reached.values():
            found |= reached[middle] if middle in found else set()

    @cache
    def floors(room: str, seen: frozenset[str]) -> int:
        """seen: rooms of the chain above that could come again."""
        circle = {other for other in reached[room] if room in reached[other]}
        seen = (seen | {room}) & circle
        return 1 + max((floors(other, seen) for other in rooms[room] - seen), default=0)

    orders = list(contracts(root))
    arrows = [(a, b) for a, others in rooms.items() for b in others]
    up = [(a, b) for a, b in arrows if a in reached[b] or any(against(o, a, b) for o in orders)]
    highest = max(floors(room, frozenset()) for room in rooms)
    counts = {"rooms": len(rooms), "floors": highest, "arrows": len(arrows)}
    return {**counts, "arrows up": len(up), "modules flat": len(flat)}


def contracts(root: Path) -> Iterator[dict[str, int]]:
    """Of every layers contract: how far down each layer stands, by import name."""
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        for container in contract.get("containers", [""]) if contract["type"] == "layers" else []:
            rows = [re.findall(r"[\w.]+", layer) for layer in contract["layers"]]
            yield {f"{container}.{n}".strip("."): i for i, row in enumerate(rows) for n in row}


def against(order: dict[str, int], *arrow: str) -> bool:
    """Whether the first room stands below the second."""
    known = [[order[n] for n in order if f"{room}.".startswith(f"{n}.")] for room in arrow]
    return all(known) and max(known[0]) > max(known[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Rooms, floors and arrows of a checkout.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--lines", action="store_true", help="lines of every folder, too")
    parser.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args()
    counts, folders = figures(arguments.folder), Counter[str]()
    for file in tracked(arguments.folder) if arguments.lines else []:
        text = (arguments.folder / file).read_text("utf-8")
        folders[str(file.parent)] += len(text.splitlines())
    if arguments.json:
        print(json.dumps({**counts, "lines": folders}, indent=1))
    else:
        print("\n".join(f"{n:7,}  {name}" for name, n in {**counts, **folders}.items()))


if __name__ == "__main__":
    main()
