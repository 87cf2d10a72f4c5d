"""What a method of drafting says of itself, for `methods.METHODS`, and what it is made for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Any, Generic, TypeVar

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Options, option
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.growth.grow import FIRST, SECOND
from dflash_mlx.engine.drafter import Drafter, EachAlone, Proposal
from dflash_mlx.engine.grammar import FORCED
from dflash_mlx.engine.pair import Capabilities, DraftModel, Pair
from dflash_mlx.engine.state import Context, State

MOST_NODES = 48  # of a tree that the budget then cuts
MOST_BRANCHES = 32

Model = TypeVar("Model", bound=DraftModel)


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
        return {option.name: option for option in fields(self.options)}

    def called(self, capabilities: Capabilities) -> str:
        """The label with what a pair can draft with."""
        lone = self.lone_label and capabilities.count(self.family) == 1
        return self.lone_label if lone else self.label


class BlockDrafter(EachAlone, Generic[Model]):
    """A drafter whose trees are no deeper than the block that its model was trained for.

    block_size: 2 up to that size, which is its default; DFlashError for another.
    """

    rounds_ahead = 0

    def __init__(self, model: Model, block_size: int | None = None) -> None:
        check_block_size(block_size, model.block_size)
        self.block_size = block_size or model.block_size
        self.aux_layers = model.aux_layers
        self._model = model

    def new_context(self) -> Context:
        return self._model.new_context()

    def draft(self, state: State, remaining: int) -> Proposal:
        rows = min(self.block_size, remaining)
        return Proposal(Tree.chain()) if rows == 1 else self.draft_block(state, rows)

    @abstractmethod
    def draft_block(self, state: State, rows: int) -> Proposal:
        """A tree whose paths have up to `rows` >= 2 tokens, the anchor included."""


def branches_option(help: str, label: str = "") -> Any:
    """The option `branches` of a method."""
    return option(
        None,
        help,
        label=label,
        least=1,
        most=MOST_BRANCHES,
        usual=("1", "2", "4", "6", "8"),
        type=int,
    )


def check_block_size(block_size: int | None, most: int, option: str = "block_size") -> None:
    """Raise DFlashError unless a drafter trained for blocks of `most` can draft such a block."""
    if block_size is not None and not 2 <= block_size <= most:
        raise DFlashError(
            f"{option} is {block_size}, but this drafter was trained for blocks of {most}",
            f"choose 2 to {most}",
            option,
        )
