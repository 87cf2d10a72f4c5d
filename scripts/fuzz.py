#!/usr/bin/env python3
"""Damaged model folders by the thousand: `scripts/fuzz.py [--cases 10000] [--seed 20261121]`.

Prints what became of them, by what was damaged, and every case that ended neither in a sentence
nor in a right model; exit code 1 if there is one.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tqdm import tqdm  # noqa: E402

from support.fuzzing import GOOD, outcomes  # noqa: E402

BATCH = 500  # cases of one process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=20_261_121)
    arguments = parser.parse_args()
    batches = range(0, arguments.cases, BATCH)
    counts: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for first in tqdm(batches, desc=f"{BATCH} cases each"):
        for case in outcomes(arguments.seed, first, min(first + BATCH, arguments.cases)):
            counts[case["subject"], case["outcome"]] += 1
            if case["outcome"] not in GOOD:
                wrong += 1
                print(json.dumps(case), flush=True)
    for (subject, outcome), count in sorted(counts.items()):
        print(f"{count:7}  {outcome:8}  {subject}")
    print(f"{sum(counts.values())} cases, {wrong} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
