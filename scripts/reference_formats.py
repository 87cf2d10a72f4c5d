"""Reads the folders of `compare_formats.py` with published modules; run by it, elsewhere.

Imports nothing of this project. A reader takes a case and gives logits [n, v], or None where its
package has no module for such a folder.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from reference_case import Case


def compared(case: Case, read: Callable[[Case], Any]) -> str:
    """The largest difference of the logits, relative to the largest one; "" for no module."""
    try:
        logits = read(case)
    except Exception as error:  # a package's, whatever it is
        return f"{type(error).__name__}: {error}"[:200]
    if logits is None:
        return ""
    ours, theirs = case.arrays["logits"], np.asarray(logits, np.float64)
    if theirs.shape != ours.shape:  # all tokens, of which we know some
        theirs = theirs[:, case.arrays["ids"]]
    return f"{np.abs(theirs - ours).max() / np.abs(theirs).max():.1e}"


def main() -> None:
    cases = {name: Case(told) for name, told in json.load(sys.stdin).items()}
    for module in ("reference_torch", "reference_mlx"):
        try:
            readers = importlib.import_module(module).READERS
        except ImportError:
            continue
        for package, reads in readers.items():
            try:
                label = f"{package} {version(package)}"
            except PackageNotFoundError:
                continue
            for name, case in cases.items():
                for read in reads:
                    if said := compared(case, read):
                        line = {"name": name, "by": label, "said": " ".join(said.split())}
                        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
