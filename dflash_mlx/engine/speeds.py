"""Which of the draft models on this disk is fastest with a target here; measured once, stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from dflash_mlx.core.errors import in_one_line
from dflash_mlx.system.files import replace_text

MARGIN = 1.03  # times as fast as an earlier one of the list a later one has to be
Speed = tuple[str, str, float]  # family, name, times plain decoding; 0 where it cannot be used here


@dataclass(frozen=True)
class Speeds:
    """Draft models of other families for one target, and what each has brought."""

    file: Path
    target: str
    drafters: tuple[tuple[str, str], ...]  # family, "" where it is not known yet, and name
    found: tuple[Speed, ...] = ()  # of all of them, or of none
    problem: str = ""  # why what was stored cannot be read

    @classmethod
    def stored(cls, file: Path, target: str, drafters: Sequence[tuple[str, str]]) -> Speeds:
        """With what was measured before, if that was of all these."""
        found, problem = dict[str, Speed](), ""
        try:
            found = {name: (family, name, times) for family, name, times in read_speeds(file)}
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"{file} cannot be read ({in_one_line(error)}), so drafters are measured anew"
        known = [found[name] for _, name in drafters if name in found]
        if len(known) < len(drafters):
            return cls(file, target, tuple(drafters), (), problem)
        return cls(file, target, tuple((family, name) for family, name, _ in known), tuple(known))

    @property
    def best(self) -> Speed | None:
        """The first that nobody could tell from the fastest; None where nothing was measured."""
        most = max((times for _, _, times in self.found), default=0.0)
        return next((each for each in self.found if each[2] * MARGIN >= most), None)

    def told(self) -> str:
        """Which drafts and why, in a sentence; "" where nothing was measured."""
        if self.best is None:
            return ""
        shown = [in_words(each) for each in self.found if each is not self.best]
        return f"{in_words(self.best)} drafts, as measured here against {', '.join(shown)}"

    def keep(self, families: Mapping[str, str], times: Mapping[str, float]) -> str:
        """Store families and times plain decoding by name; in a sentence what will draft."""
        found = tuple((families[name], name, times[name]) for _, name in self.drafters)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.file, json.dumps({"model": self.target, "speeds": found}))
        except OSError as error:
            return f"which drafter is fastest cannot be kept ({in_one_line(error)})"
        return f"from the next start on {replace(self, found=found).told()}"


def read_speeds(file: Path) -> tuple[Speed, ...]:
    """What `keep` stored; OSError, ValueError, KeyError or TypeError for anything else."""
    rows = json.loads(file.read_text(encoding="utf-8"))["speeds"]
    speeds = tuple((str(family), str(name), float(times)) for family, name, times in rows)
    if not all(isfinite(times) and times >= 0 for _, _, times in speeds):
        raise ValueError("a speed is no number from 0 on")
    return speeds


def in_words(speed: Speed) -> str:
    """A draft model and its speed."""
    family, name, times = speed
    brought = f"{times:.2f} times plain decoding" if times else "cannot be used here"
    return f"{name} ({family}, {brought})"
