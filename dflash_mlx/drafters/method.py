"""What a method of drafting says of itself, and what drafters have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Options, option
from dflash_mlx.core.sampling import DRAW, Sampler
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.continuations.recall import BEFORE, HERE
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.growth.grow import FIRST, LEAST, SECOND, Choices, Path
from dflash_mlx.engine.drafter import Drafter, EachAlone, Proposal, allowed
from dflash_mlx.engine.grammar import FORCED
from dflash_mlx.engine.pair import Capabilities, DraftModel
from dflash_mlx.engine.state import Context, State

MOST_NODES = 48  # of a tree that the budget then cuts
MOST_BRANCHES = 32
_OF_DRAFT_MODELS = ("drafter", "drafter_bits", "draft_window", "draft_vocabulary")

Model = TypeVar("Model", bound=DraftModel)


@dataclass(frozen=True)
class TokenSource:
    """Where drafted tokens can come from."""

    name: str  # as in `Tree.sources`
    label: str  # for legends
    colour: str  # of the screen's theme


DRAFT = TokenSource(FIRST, "draft", "primary")
SECOND_DRAFT = TokenSource(SECOND, "second draft", "warning")
LOOKUP = TokenSource(HERE, "earlier text", "accent")
SAID = TokenSource(BEFORE, "said before", "secondary")  # in other conversations
EARLIER = (LOOKUP, SAID)
GRAMMAR = TokenSource(FORCED, "grammar", "success")  # with any method that drafts


@dataclass(frozen=True)
class Plan:
    """What a method drafts for a pair with these settings; `methods.plan` decides it."""

    models: Sequence[Any]  # the pair's draft models of the method's family
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
    # Of the draft models that it runs, None where it runs none
    files: FileFormat | None = None
    best_with: int = 0  # how many of them
    needs_trees: bool = False  # whether the target must verify trees
    has_budget: bool = False  # whether the size of what is verified can be asked for
    draws: bool = False  # whether it can draw its drafts, for rejection sampling
    sources: tuple[TokenSource, ...] = ()  # of its tokens; () where it drafts none
    preference: int = 0  # `auto` takes the highest that serves, never 0
    is_control: bool = False  # whether only benchmarks offer it

    @property
    def family(self) -> str:
        """Of the draft models that it runs, "" where it runs none."""
        return "" if self.files is None else self.files.family

    @property
    def shared(self) -> dict[str, bool]:
        """Which of the settings that not every method follows it does follow."""
        return {
            **dict.fromkeys(_OF_DRAFT_MODELS, bool(self.family)),
            "second_drafter": self.best_with > 1,
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

    def takes(self, setting: str) -> bool:
        """Whether it follows a setting that not every method follows."""
        return setting in self.own or self.shared.get(setting, False)

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
    return option(None, help, label=label, least=1, most=MOST_BRANCHES, type=int)


def check_block_size(block_size: int | None, most: int, option: str = "block_size") -> None:
    """Raise DFlashError unless a drafter that drafts in blocks of `most` can draft such a block."""
    if block_size is not None and not 2 <= block_size <= most:
        raise DFlashError(
            f"{option} is {block_size}, but this drafter drafts in blocks of {most}",
            f"choose 2 to {most}",
            option,
        )


class Drawn(BlockDrafter[Model]):
    """Draws chains at the target's temperature and filters, for rejection sampling.

    Every answer is a draw of its own. weighed: whether trees say how sure each position is. They go
    by what is known before anything is drawn: a chain that was cut by its own tokens would no
    longer follow q.
    """

    def __init__(
        self, model: Model, block_size: int | None, sampling: SamplingConfig, weighed: bool = False
    ) -> None:
        super().__init__(model, block_size)
        self.sampling, self._weighed = sampling, weighed
        self._sampler = Sampler(sampling)
        self._opening: mx.array | None = None  # of the answer that is being written

    def key(self, state: State) -> mx.array:
        """Randomness for a draft at this position of this answer."""
        if state.opening is not self._opening:
            self._sampler, self._opening = Sampler(self.sampling), state.opening
        return self._sampler.key(state.position, DRAW)

    def proposal(self, state: State, tokens: mx.array, q: mx.array, sure: mx.array) -> Proposal:
        """A chain of tokens [n], drawn from q [n, V]; sure: [n], or one for all positions."""
        tree = Tree.chain(tokens.astype(state.anchor.dtype))
        mx.async_eval(tree.drafts, q)
        if self._weighed:
            known = np.log(np.maximum(np.array(mx.broadcast_to(sure, tokens.shape)), LEAST))
            tree = replace(
                tree, logprobs=(0.0, *known.tolist()), sources=("", *[FIRST] * tokens.size)
            )
        return Proposal(tree, q)


@dataclass(frozen=True)
class FirstDraft(Proposal):
    """The tree of a first pass, and what a second one could continue."""

    remaining: int = 1  # nodes that a path may have
    choices: Choices | None = None  # behind each path; None where no pass was made
    # Prefixes that could be continued, likeliest first, with the posterior of being accepted
    # exactly so far.
    branches: Mapping[Path, float] = field(default_factory=dict)


class TwoPass(EachAlone):
    """A drafter that makes both passes, or goes on behind the first only where it is asked to."""

    def draft(self, state: State, remaining: int) -> Proposal:
        return self.draft_all([state], [remaining])[0]

    def draft_all(self, states: Sequence[State], rooms: Sequence[int]) -> list[Proposal]:
        drafts = self.begin(states, rooms)
        return self.second_pass(states, drafts, [len(draft.branches) for draft in drafts])

    def begin(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        """The first pass over all sequences, without what their grammars forbid."""
        return [
            replace(draft, tree=allowed(draft, state).tree, branches=legal(draft.branches, state))
            for draft, state in zip(self.first_pass(states, rooms), states, strict=True)
        ]

    def go_on(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        """The second pass over the first so many branches of each draft; without any it stays."""
        found = zip(self.second_pass(states, drafts, counts), states, strict=True)
        return [allowed(proposal, state) for proposal, state in found]

    @abstractmethod
    def first_pass(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        """The first pass, whatever grammars say."""

    @abstractmethod
    def second_pass(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        """The second pass, whatever grammars say."""


def legal(branches: Mapping[Path, float], state: State) -> Mapping[Path, float]:
    """Those that the grammar of an answer does not forbid; their posteriors are as without it."""
    if (constraint := state.constraint) is None:
        return branches
    return {
        prefix: posterior
        for prefix, posterior in branches.items()
        if constraint.run(state.tokens, prefix) == len(prefix)
    }
