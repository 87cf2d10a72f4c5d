#!/usr/bin/env python3
"""How many of many answers of the default pair follow their schemas, at temperature 1.

    .venv/bin/python scripts/structured_answers.py [NUMBER]

Exit code 1 if one does not. A hundred take some minutes.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from dflash_mlx import load  # noqa: E402
from support.structured import valid_answers  # noqa: E402

if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    valid, kept = valid_answers(load(), number)
    print(f"{valid} of {number} answers are valid; {kept} drafted tokens were accepted")
    sys.exit(valid < number)
