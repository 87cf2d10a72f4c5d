"""What a drafter registers of itself, for `methods.METHODS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.growth.grow import FIRST, SECOND
from dflash_mlx.engine.constraint import FORCED
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Capabilities, Pair


@dataclass(frozen=True)
class TokenSource:
    """Where drafted tokens can come from.

    name: as in `Tree.sources`. label: for legends. colour: a colour of the screen's theme.
    """

    name: str
    label: str
    colour: str


BRANCHES = 4  # of trees that continue a draft in several places, unless asked for others
DRAFT = TokenSource(FIRST, "draft", "primary")
SECOND_DRAFT = TokenSource(SECOND, "second draft", "warning")
LOOKUP = TokenSource("lookup", "earlier text", "accent")
GRAMMAR = TokenSource(FORCED, "grammar", "success")  # with any method that drafts


@dataclass(frozen=True)
class Method:
    """A choice of `--method`.

    name: as on the command line. label: for people; lone_label: where one draft model stands in
    for two. make: the drafter for a pair and settings; DFlashError where the pair does not serve
    it.

    family: of the draft models that it runs, "" where it runs none. files: how these are read from
    a folder. best_with: how many of them.
    needs_trees: whether the target must verify trees. draws: whether it can draw its drafts, for
    rejection sampling. settings: fields of `DecodeConfig` that it takes, beside those that hold
    for every method. sources: of its tokens. preference: `auto` takes the highest that serves,
    never 0. is_control: whether only benchmarks offer it.
    """

    name: str
    label: str
    make: Callable[[Pair, DecodeConfig], Drafter]
    lone_label: str = ""
    family: str = ""
    files: FileFormat | None = None
    best_with: int = 0
    needs_trees: bool = False
    draws: bool = False
    settings: tuple[str, ...] = ()
    sources: tuple[TokenSource, ...] = ()
    preference: int = 0
    is_control: bool = False

    def called(self, capabilities: Capabilities) -> str:
        """The label with what a pair can draft with."""
        lone = self.lone_label and capabilities.count(self.family) == 1
        return self.lone_label if lone else self.label


def asks_for_tree(config: DecodeConfig) -> bool:
    """Whether a tree's size or shape is given; DFlashError where chains are asked for as well."""
    for name in ("budget", "branches"):
        value = getattr(config, name)
        if value is not None and config.acceptance == "reject" and config.draws_drafts:
            what = f"{name} is {value}, but acceptance is reject, which keeps chains alone"
            raise DFlashError(what, "leave one of them out", name)
    return config.budget is not None or config.branches is not None


def check_block_size(block_size: int | None, most: int, option: str = "block_size") -> None:
    """Raise DFlashError unless a drafter trained for blocks of `most` can draft such a block."""
    if block_size is not None and not 2 <= block_size <= most:
        raise DFlashError(
            f"{option} is {block_size}, but this drafter was trained for blocks of {most}",
            f"choose 2 to {most}",
            option,
        )
