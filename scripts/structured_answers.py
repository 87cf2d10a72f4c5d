#!/usr/bin/env python3
"""How many of many answers of the default pair follow their schemas, at temperature 1.

    .venv/bin/python scripts/structured_answers.py [NUMBER]

Exit code 1 if one does not. A hundred take some minutes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from dflash_mlx import DFlashError, load  # noqa: E402
from dflash_mlx.cli import options as cli  # noqa: E402
from support.structured import valid_answers  # noqa: E402

PROGRAM = "structured_answers.py"


def main(argv: Sequence[str]) -> None:
    """Print the shares."""
    parser = cli.Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int, nargs="?", default=100, help="of answers")
    number = parser.parse_args(argv).number
    if number < 1:
        raise DFlashError(f"{number} answers were asked for", "ask for 1 or more")
    valid, kept = valid_answers(load(), number)
    print(f"{valid} of {number} answers are valid; {kept} drafted tokens were accepted")
    if valid < number:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main, PROGRAM)
