"""What is loaded: a target with its tokenizer, the draft models that fit it, and their speeds.

Which of the draft models on this disk is fastest with a target is measured once and stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy.typing as npt

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.state import Context
from dflash_mlx.system.files import keep_text, kept_json
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import calibrating

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

    def keep(self, times: Sequence[float]) -> str:
        """Store times plain decoding, of each; in a sentence what will draft."""
        found = tuple((*each, times) for each, times in zip(self.drafters, times, strict=True))
        if not keep_text(self.file, json.dumps({"model": self.target, "speeds": found})):
            return f"which drafter is fastest cannot be kept in {self.file}"
        return f"from the next start on {replace(self, found=found).told()}"


def read_speeds(file: Path) -> tuple[Speed, ...]:
    """What `keep` stored; OSError, ValueError, KeyError or TypeError for anything else."""
    rows = kept_json(file)["speeds"]
    speeds = tuple((str(family), str(name), float(times)) for family, name, times in rows)
    if not all(isfinite(times) and times >= 0 for _, _, times in speeds):
        raise ValueError("a speed is not a number of 0 or more")
    return speeds


def in_words(speed: Speed) -> str:
    """A draft model and its speed."""
    family, name, times = speed
    return f"{name} ({family}, {times:.2f} times plain decoding)"


_T = TypeVar("_T")


class DraftModel(Protocol):
    """A draft model bound to its target; drafters of its family know what else it can do."""

    family: ClassVar[str]  # which methods can run it, see `Method.family`
    aux_layers: tuple[int, ...]  # target layers (0-based) whose output it reads
    module: nn.Module  # its own network

    @property
    def block_size(self) -> int:
        """The largest block that it was trained for, the anchor included."""

    def new_context(self) -> Context:
        """An empty context for one sequence."""

    def limit_vocabulary(self, target: Target, tokens: npt.NDArray[Any], size: int) -> None:
        """Draft only the first `size` of all `tokens` [V], and those that a conversation has."""

    def try_out(self, context: Context) -> mx.array:
        """Logits of one draft, which loading looks at: finite, and 0 for tokens never drafted."""


@dataclass(frozen=True)
class Preset:
    """How a pair is best used."""

    method: str = "auto"  # what `auto` means, itself where that is open
    # Arguments of the chat template, as they were when the draft model was trained.
    template: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What a pair can draft with."""

    families: tuple[str | None, ...] = ()  # of its draft models, None where it is not known yet
    trees: bool = True  # the target can verify them
    preset: Preset = Preset()

    def count(self, family: str) -> int:
        """How many draft models are, or may be, of this family."""
        return sum(each in (None, family) for each in self.families)


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and the draft models that fit it, if any."""

    target: Target
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    drafters: tuple[DraftModel, ...] = ()  # D2SD's variable-prefix drafter is the second
    drafter_name: str | None = None  # where the first came from
    undrafted: str = ""  # why there is none, where none was found
    preset: Preset = Preset()
    notes: tuple[str, ...] = ()  # what loading had to change, a sentence each
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template
    # Loads the known drafters of a family that is not loaded, see `of`.
    further: Callable[[str], list[DraftModel]] = field(default=lambda _: [], repr=False)
    drafter_names: tuple[str, ...] = ()  # where all came from, and those that `further` would load
    speeds: Speeds | None = None  # of the drafters on the disk, where `auto` may take any of them
    advised: Mapping[str, Any] = field(default_factory=dict)  # the target's generation_config.json
    # What sessions have learned about drafting; `recall` reads it.
    learned: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fallback(self) -> str:
        """What `auto` does for want of a drafter, "" where there is one."""
        return f"{self.undrafted}, so drafts come from prompt lookup" if self.undrafted else ""

    @cached_property
    def capabilities(self) -> Capabilities:
        families = tuple(model.family for model in self.drafters)
        return Capabilities(families, self.target.takes_trees, self.preset)

    def of(self, family: str, method: str = "") -> list[DraftModel]:
        """The draft models of a family, loaded when asked for; DFlashError naming `method`."""
        if found := [model for model in self.drafters if model.family == family]:
            return found
        if found := self.recall(("draft models", family), lambda: self.further(family)):
            return found
        if not self.drafters:
            problem = self.undrafted or f"no drafter is known for {self.target.name}"
            raise DFlashError(problem, "name one with --drafter, or use --method none")
        raise DFlashError(
            f"{method or 'this method'} needs a drafter of the {family} family, but "
            f"{self.drafter_name or 'this one'} is of {self.drafters[0].family}",
            "use --method auto, or name another with --drafter",
        )

    def recall(self, key: tuple[Any, ...], learn: Callable[[], _T]) -> _T:
        """What was learned under `key`, by `learn()` where nothing was yet."""
        if key not in self.learned:
            self.learned[key] = learn()
        return self.learned[key]  # type: ignore[no-any-return]

    def calibrate(self, again: bool = False) -> None:
        """All of `calibrating`, so that a budget need not learn from its rounds what pays."""
        for _ in self.calibrating(again):
            pass

    def calibrating(self, again: bool = False) -> Generator[tuple[int, int], None, None]:
        """Time passes of the target, so that a budget knows what pays: those done, and all.

        What this machine took before is read from the disk. again: measure all the same, once in a
        program.
        """
        yield from enumerate(calibrating(self.target, again), 1)
