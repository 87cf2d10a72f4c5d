"""What is read of published configurations, and what another checkout reads of the same folders.

    python scripts/published_formats.py [OTHER]

Tiny folders with random tensors are written for the rows of `tests/support/published_configs.py`,
all but assistants, and read by this checkout and by OTHER, a checkout of an earlier commit. A row
is *read* where all values that decide how a drafter drafts are those that its source says,
*misread* where one is not or where something is read that is not supported, and *refused* with a
sentence. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
READER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import dflash_mlx
assert dflash_mlx.__file__.startswith(sys.argv[1])
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.drafters.networks.files import read_json

def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part, None)
    return config

for line in sys.stdin:
    folder, fields = json.loads(line)
    files = format_of(read_json(Path(folder)))
    try:
        if files is None:
            raise DFlashError("no family reads this", "")
        config = files.read_drafter(Path(folder)).config
        told = {name: repr(value_of(config, name)) for name in fields}
    except DFlashError as error:
        told = {"": str(getattr(error, "what", error))}
    print(json.dumps(told), flush=True)
"""
NEVER = ("None", "False")  # what a field that an earlier reader lacks is equal to


def written(place: Path) -> dict[str, tuple[Path, dict[str, str] | None]]:
    """A folder for every row, and what is to be read of it; None where it is to be refused."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.published_configs import BLOCKS, READ, REFUSED, STEPS, expected_of, tensors_of
    from support.reference_dflash import write_drafter_folder

    rows: dict[str, tuple[Path, dict[str, str] | None]] = {}
    for i, (name, (raw, _)) in enumerate([*READ.items(), *REFUSED.items()]):
        if not re.search(f"{BLOCKS}|{STEPS}", raw.get("architectures", [""])[0]):
            continue  # heads and assistants: read from their configurations alone
        folder = write_drafter_folder(place / str(i), raw, tensors_of(raw))
        known = expected_of(*READ[name]) if name in READ else None
        fields = None if known is None else {f: repr(v) for f, v in known.items() if f != "notes"}
        rows[name] = folder, fields
    return rows


def read_by(checkout: Path, rows: dict[str, tuple[Path, Any]]) -> dict[str, dict[str, str]]:
    """By row what a checkout reads, or "" with its sentence."""
    lines = "".join(json.dumps([str(f), [*(e or [])]]) + "\n" for f, e in rows.values())
    command = [sys.executable, "-c", READER, str(checkout)]
    done = subprocess.run(
        command, input=lines, stdout=subprocess.PIPE, text=True, check=True, cwd=checkout
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(rows, told, strict=True))


def verdict(told: dict[str, str], expected: dict[str, str] | None) -> tuple[str, str]:
    """What became of a row, and why."""
    if "" in told:
        return "refused", re.sub(r"^in \S+config.json, |^in /\S+, | (in|of) /\S+", "", told[""])
    if expected is None:
        return "misread", "what is not supported is passed over"
    wrong = {
        name: value
        for name, value in expected.items()
        if told[name] != value and not (told[name] == "None" and value in NEVER)
    }
    if not wrong:
        return "read", ""
    return "misread", ", ".join(f"{n} {told[n]} for {v}" for n, v in wrong.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, nargs="?", help="a checkout of an earlier commit")
    other = parser.parse_args().other
    with tempfile.TemporaryDirectory() as place:
        rows = written(Path(place))
        checkouts = [ROOT, *([other.resolve()] if other else [])]
        found = [read_by(checkout, rows) for checkout in checkouts]
    tables = [{n: verdict(told[n], rows[n][1]) for n in rows} for told in found]
    print("| configuration | " + ("before | " if other else "") + "now | why |")
    print("| --- | " + ("--- | " if other else "") + "--- | --- |")
    for name in rows:
        now, *before = (table[name] for table in tables)
        why = now[1] or (before[0][1] if before else "")
        cells = [name, *(state for state, _ in before), now[0], why]
        print("| " + " | ".join(cell.replace("|", "\\|")[:160] for cell in cells) + " |")
    for label, table in zip(("now", "before"), tables, strict=False):
        print(f"\n{label}: {dict(Counter(state for state, _ in table.values()))}")


if __name__ == "__main__":
    main()
