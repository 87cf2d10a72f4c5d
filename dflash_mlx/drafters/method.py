"""What a method of drafting says of itself, for `methods.METHODS`, and what it is made for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Any

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Options
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.growth.grow import FIRST, SECOND
from dflash_mlx.engine.constraint import FORCED
from dflash_mlx.engine.drafter import Drafter, EachAlone, Proposal
from dflash_mlx.engine.pair import Capabilities, Pair
from dflash_mlx.engine.state import State

MOST_NODES = 48  # of a tree that the budget then cuts
MOST_BRANCHES, USUAL_BRANCHES = 32, ("1", "2", "4", "6", "8")


@dataclass(frozen=True)
class TokenSource:
    """Where drafted tokens can come from."""

    name: str  # as in `Tree.sources`
    label: str  # for legends
    colour: str  # of the screen's theme


DRAFT = TokenSource(FIRST, "draft", "primary")
SECOND_DRAFT = TokenSource(SECOND, "second draft", "warning")
LOOKUP = TokenSource("lookup", "earlier text", "accent")
GRAMMAR = TokenSource(FORCED, "grammar", "success")  # with any method that drafts


@dataclass(frozen=True)
class Plan:
    """What a method drafts for a pair with these settings; `methods.plan` decides it."""

    pair: Pair
    config: DecodeConfig
    drawn: bool  # a chain whose tokens are drawn, for rejection sampling
    chain: bool  # a chain of likeliest tokens; a tree otherwise
    fixed: bool  # all of it is verified; otherwise as much as pays, see `budget.py`

    @property
    def nodes(self) -> int:
        """The most nodes of a tree, its root included."""
        return self.config.budget or MOST_NODES


@dataclass(frozen=True)
class Method:
    """A choice of `--method`."""

    name: str  # as on the command line
    label: str  # for people
    make: Callable[[Plan], Drafter]  # DFlashError where the pair does not serve it
    options: type[Options] = Options  # its own, beside the settings of `DecodeConfig`
    lone_label: str = ""  # where one draft model stands in for two
    family: str = ""  # of the draft models that it runs, "" where it runs none
    files: FileFormat | None = None  # how these are read from a folder
    best_with: int = 0  # how many of them
    needs_trees: bool = False  # whether the target must verify trees
    has_budget: bool = False  # whether the size of what is verified can be asked for
    draws: bool = False  # whether it can draw its drafts, for rejection sampling
    sources: tuple[TokenSource, ...] = ()  # of its tokens; () where it drafts none
    preference: int = 0  # `auto` takes the highest that serves, never 0
    is_control: bool = False  # whether only benchmarks offer it

    @property
    def shared(self) -> dict[str, bool]:
        """Which of the settings that not every method follows it does follow."""
        return {
            "block_size": bool(self.sources),
            "budget": self.has_budget,
            "lookup": self.chooses and bool(self.family),
            "recalibrate": self.chooses,
            "acceptance": self.draws,
        }

    @property
    def chooses(self) -> bool:
        """Whether it verifies in each round what pays, unless it is told how much to verify."""
        return bool(self.sources) and not self.is_control

    @property
    def own(self) -> dict[str, Field[Any]]:
        """Its own options by name."""
        return {option.name: option for option in fields(self.options)}

    def called(self, capabilities: Capabilities) -> str:
        """The label with what a pair can draft with."""
        lone = self.lone_label and capabilities.count(self.family) == 1
        return self.lone_label if lone else self.label


def check_block_size(block_size: int | None, most: int, option: str = "block_size") -> None:
    """Raise DFlashError unless a drafter trained for blocks of `most` can draft such a block."""
    if block_size is not None and not 2 <= block_size <= most:
        raise DFlashError(
            f"{option} is {block_size}, but this drafter was trained for blocks of {most}",
            f"choose 2 to {most}",
            option,
        )


class BlockDrafter(EachAlone):
    """A drafter that makes its tree from one block of its model.

    block_size: tokens of the longest path, the anchor included, 2 up to the model's (its default).
    Raises DFlashError for another size.
    """

    name: str
    rounds_ahead = 0

    def __init__(self, model: Any, block_size: int | None = None) -> None:
        check_block_size(block_size, model.block_size)
        self.block_size: int = block_size or model.block_size
        self.aux_layers: tuple[int, ...] = model.aux_layers
        self._model = model

    def new_context(self) -> Any:
        """An empty context for one sequence."""
        return self._model.new_context()

    def draft(self, state: State, remaining: int) -> Proposal:
        """A tree no deeper than the block and `remaining` allow; its root alone where that is 1."""
        rows = min(self.block_size, remaining)
        if rows == 1:
            return Proposal(Tree.chain())
        return self.draft_block(state, self.context_of(state), rows)

    def context_of(self, state: State) -> Any:
        """What its model remembers of a sequence."""
        return state.context

    @abstractmethod
    def draft_block(self, state: State, context: Any, rows: int) -> Proposal:
        """The tree of a block of `rows` >= 2 rows, the anchor included."""
