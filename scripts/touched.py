"""How much of this program a task enters: files, functions, and stays (changes of file).

    .venv/bin/python scripts/touched.py                 # default pair

Counts what `import dflash_mlx` brings in, what `load()` enters, and what one round of plain
decoding enters, as `sys.setprofile` sees it; other packages do not count. `settings` are the stays
in which a function holds the settings of `load()`, its own or a copy.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType

ROOT = str(Path(__file__).parents[1])
OURS = tuple(f"{ROOT}/{name}/" for name in ("dflash_mlx", "kernels_metal", "app"))


@contextmanager
def watched(entered: list[tuple[str, str, bool]]) -> Iterator[None]:
    """Note file and name of every function of ours that is called, and if it has the settings."""

    def see(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(OURS):
            count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            given = [frame.f_locals.get(n) for n in frame.f_code.co_varnames[:count]]
            settings = any(type(value).__name__ == "PairConfig" for value in given)
            entered.append((file, frame.f_code.co_qualname, settings))

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def told(name: str, entered: list[tuple[str, str, bool]]) -> None:
    """A line of figures."""
    files = {file for file, *_ in entered}
    functions = {(file, function) for file, function, _ in entered}
    stays = sum(1 for _ in groupby(file for file, *_ in entered))
    carried = sum(1 for _ in groupby(file for file, _, settings in entered if settings))
    print(f"{name:16} {len(files):4} files {len(functions):5} functions {stays:5} stays", end="")
    print(f", {carried} with the settings" if carried else "")


def main() -> None:
    """Print the table."""
    sys.path.insert(0, ROOT)
    import dflash_mlx

    ours = ("dflash_mlx", "kernels_metal")
    modules = [name for name in sys.modules if name.partition(".")[0] in ours]
    print(f"import           {len(modules):4} modules")
    loading: list[tuple[str, str, bool]] = []
    dflash_mlx.load()  # imports what it needs
    with watched(loading):
        pair = dflash_mlx.load()
    told("load()", loading)
    session = dflash_mlx.Session(pair, dflash_mlx.DecodeConfig(method="none", max_tokens=16))
    deltas = session.stream(dflash_mlx.prompt_tokens(pair.tokenizer, "Name three rivers."))
    for _ in range(4):
        next(deltas)
    round_: list[tuple[str, str, bool]] = []
    with watched(round_):
        next(deltas)
    told("a plain round", round_)
    deltas.close()


if __name__ == "__main__":
    main()
