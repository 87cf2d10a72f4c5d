"""Which of the draft models on this disk is fastest with a target here; measured once, stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from dflash_mlx.system.files import keep_text, kept_json

MARGIN = 1.03  # times as fast as an earlier one of the list a later one has to be
Speed = tuple[str, str, float]  # family, name, times plain decoding


@dataclass(frozen=True)
class Speeds:
    """Draft models of other families for one target, and what each has brought."""

    file: Path
    target: str
    drafters: tuple[tuple[str, str], ...]  # family, "" where it is not known yet, and name
    found: tuple[Speed, ...] = ()  # of all of them, or of none

    def stored(self) -> Speeds:
        """With what was measured before, if that was of all these."""
        try:
            found = {speed[1]: speed for speed in read_speeds(self.file)}
            known = tuple(found[name] for _, name in self.drafters)
        except (OSError, ValueError, KeyError, TypeError):
            return self
        drafters = tuple((family, name) for family, name, _ in known)
        return replace(self, drafters=drafters, found=known)

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

    def keep(self, times: Mapping[str, float]) -> str:
        """Store times plain decoding by name; in a sentence what will draft."""
        found = tuple((family, name, times[name]) for family, name in self.drafters)
        if not keep_text(self.file, json.dumps({"model": self.target, "speeds": found})):
            return f"which drafter is fastest cannot be kept in {self.file}"
        return f"from the next start on {replace(self, found=found).told()}"


def read_speeds(file: Path) -> tuple[Speed, ...]:
    """What `keep` stored; OSError, ValueError, KeyError or TypeError for anything else."""
    rows = kept_json(file)["speeds"]
    speeds = tuple((str(family), str(name), float(times)) for family, name, times in rows)
    if not all(isfinite(times) and times >= 0 for _, _, times in speeds):
        raise ValueError("a speed is no number from 0 on")
    return speeds


def in_words(speed: Speed) -> str:
    """A draft model and its speed."""
    family, name, times = speed
    return f"{name} ({family}, {times:.2f} times plain decoding)"
