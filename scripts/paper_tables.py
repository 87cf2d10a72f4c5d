"""What the papers' tables compare, and the figures that they published.

Tokens a round, greedy unless a column says otherwise. DFlash: arXiv 2602.06036, tables 1 (for
Qwen3-8B), 6 to 8 and 10. D2SD, for Qwen3-8B: 2606.04446, tables 1 and 3, and 5 to 7 as means of
four sets, as a public review of the paper has them. SpecDiff's (2408.05636) gamma and steps are not
at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mlx.core.config import PLAIN
from dflash_mlx.core.option import option
from dflash_mlx.drafters.dual_diffusion import BRANCHES, Drafts, JointGrowth
from dflash_mlx.drafters.growth.grow import Choices, Path
from dflash_mlx.drafters.method import Plan
from dflash_mlx.drafters.paper import KNOBS, AblatedDualOptions, PaperGrowth


@dataclass(frozen=True)
class Row:
    """A method of drafting, with the draft models that it runs."""

    label: str
    method: str  # as for `dflash_mlx.benchmark`
    published: str = "-"
    drafter: str = ""  # a variant in paper_variants.py; the pair's own without one
    second: str = ""  # likewise, or "none"

    @property
    def variant(self) -> str:
        """The last draft model that is trained for it, "" where none is."""
        return self.drafter if self.second in ("", PLAIN) else self.second

    @property
    def is_trained(self) -> bool:
        return bool(self.variant)


@dataclass(frozen=True)
class Table:
    """Rows that differ in one thing."""

    title: str
    published: str  # what the published column holds
    rows: tuple[Row, ...]

    @property
    def is_trained(self) -> bool:
        return any(row.is_trained for row in self.rows)


@dataclass(frozen=True)
class CutOptions(AblatedDualOptions):
    """D2SD's options, and which branches are too unlikely to be made."""

    cut: int = option(0, "published tree: leave out branches of less percent", type=int, least=0)

    def growth_of(self, how: Plan) -> JointGrowth:
        usual = super().growth_of(how)
        return usual if self.cuts else CutGrowth(self.branches or BRANCHES, self.cut / 100)


class CutGrowth(PaperGrowth):
    """The published tree without branches at places where the first draft seldom fails.

    least: the smallest posterior of a branch, from 0 to 1.
    """

    def __init__(self, branches: int, least: float) -> None:
        super().__init__(branches)
        self._least = least

    def prefixes(self, first: Choices, second: Drafts, longest: int) -> dict[Path, float]:
        found = super().prefixes(first, second, longest)
        return {prefix: chance for prefix, chance in found.items() if chance >= self._least}


def add_cut() -> None:
    """Let names of methods set `cut`."""
    KNOBS["d2sd"] = CutOptions


BASELINES = Table(
    "Methods and baselines",
    "mean of seven sets (DFlash) or eight (D2SD); at T = 1 behind the comma",
    (
        Row("EAGLE-3, chain", "eagle3:8"),
        Row("EAGLE-3, tree of 16", "eagle3:budget=16", "2.96, 2.83"),
        Row(
            "EAGLE-3, tree of 48",
            "eagle3:budget=48",
            "3.40, 3.26 (of 60); 5.91, 5.33 by D2SD",
        ),
        Row("multi-token prediction, chain", "mtp:8"),
        Row("small language model, chain", "lm:8"),
        Row("DFlash, selector off", "dflash1", "6.49, 5.48; 5.31, 4.33 by D2SD"),
        Row("DFlash, selector on", "dflash:8"),
        Row("DDTree, 16 nodes", "ddtree:budget=16"),
        Row("D2SD, published tree", "d2sd:growth=paper", "7.05, 5.45"),
        Row("D2SD, joint tree of 16", "d2sd:budget=16"),
        Row("SpecDiff, one step", "specdiff:8:steps=1"),
    ),
)
_THREE = "MATH-500 / HumanEval / MT-Bench"
DFLASH = (
    BASELINES,
    Table(
        "Target features, of three layers",
        f"{_THREE}, block 16; without features GSM8K / MATH-500, five layers",
        (
            Row("none, the text by itself", "specdiff:8:steps=1", "3.38 / 4.61", "no-features"),
            Row("1 tap", "dflash1:8", drafter="taps-1"),
            Row("3 taps", "dflash1:8", "5.38 / 4.47 / 3.07", "taps-3"),
            Row("5 taps", "dflash1:8", "5.64 / 4.61 / 3.18", "taps-5"),
        ),
    ),
    Table(
        "Depth, five taps",
        f"{_THREE}, block 16",
        (
            Row("1 layer", "dflash1:8", drafter="layers-1"),
            Row("3 layers", "dflash1:8", "5.64 / 4.61 / 3.18", "taps-5"),
            Row("5 layers", "dflash1:8", "5.99 / 4.94 / 3.37", "layers-5"),
            Row("8 layers", "dflash1:8", "6.33 / 5.29 / 3.50", "layers-8"),
        ),
    ),
    Table(
        "Block trained by block used",
        f"{_THREE}, eight layers",
        (
            Row("16, used as 16", "dflash1:16", "6.33 / 5.29 / 3.50", "block-16"),
            Row("16, used as 8", "dflash1:8", "5.09 / 4.44 / 3.18", "block-16"),
            Row("8, used as 16", "dflash1:16", "5.02 / 4.28 / 3.09", "block-8-as-16"),
            Row("8, used as 8", "dflash1:8", "5.21 / 4.61 / 3.29", "taps-5"),
        ),
    ),
    Table(
        "Weights of positions, and other draft models trained alike",
        "only drawn in the paper",
        (
            Row("even", "dflash1:8", drafter="uniform"),
            Row("exp(-(k - 1) / 4), DFlash's", "dflash1:8", drafter="decay"),
            Row("D-PACE with soft labels, ours", "dflash1:8", drafter="taps-5"),
            Row("EAGLE-3, chain", "eagle3:8", drafter="eagle3"),
            Row("multi-token prediction, chain", "mtp:8", drafter="mtp"),
        ),
    ),
)
_PAPER = "d2sd:growth=paper"
D2SD = (
    BASELINES,
    Table(
        "Trees",
        "mean of four sets",
        (
            Row("DFlash, selector off", "dflash1", "5.75"),
            Row("four naive resamples", "resample:branches=4", "6.08"),
            Row("published tree, DFlash as its own second", _PAPER, "6.53", second="none"),
            Row("published tree", _PAPER, "7.62"),
            Row("published tree, without extension", f"{_PAPER}:extension=off"),
            Row("published tree, third level", f"{_PAPER}:levels=3", "8.24"),
            Row("joint tree, 16 rows", "d2sd:budget=16"),
            Row("joint tree, 32 rows", "d2sd:budget=32"),
        ),
    ),
    Table(
        "Branches of the published tree",
        "only four were published",
        tuple(Row(f"{k}", f"{_PAPER}:branches={k}") for k in (1, 2, 4, 7)),
    ),
    Table(
        "Least posterior of a branch, published tree, four branches",
        "not published",
        tuple(Row(f"{cut} %", f"{_PAPER}:cut={cut}") for cut in (0, 5, 10, 20, 40)),
    ),
    Table(
        "What the second draft model is trained on, from the pair's first",
        "as its own second 6.53, variable prefixes 7.62",
        (
            Row("blocks of masks, as the first", _PAPER, second="second-none"),
            Row("random masks", _PAPER, second="second-random"),
            Row("variable prefixes", _PAPER, second="second-prefixes"),
            Row("variable prefixes, the authors' recipe", _PAPER, second="second-recipe"),
        ),
    ),
    Table(
        "Block length of DFlash, all from the pair's first",
        "MATH-500 / GSM8K",
        (
            Row("8", "dflash1:8"),
            Row("16", "dflash1:16", "6.05 / 5.95", "first-16"),
            Row("24", "dflash1:24", "6.01 / 6.00", "first-24"),
            Row("32", "dflash1:32", "5.85 / 5.93", "first-32"),
        ),
    ),
    Table(
        "Block length of both, published tree",
        "16: 7.62",
        (
            Row("8", _PAPER, second="second-prefixes"),
            Row("8, second 16", _PAPER, second="second-16"),
            *(
                Row(f"{n}", _PAPER, drafter=f"first-{n}", second=f"second-{n}")
                for n in (16, 24, 32)
            ),
        ),
    ),
)
SPECDIFF = (
    Table(
        "Gamma by steps T, a chain",
        "up to 7.2 or 8.7 times the speed, gamma and T not at hand",
        tuple(
            Row(f"gamma {gamma}, T {steps}", f"specdiff:{gamma}:steps={steps}")
            for gamma in (2, 4, 8, 16)
            for steps in (1, 2, 4)
        ),
    ),
    Table(
        "Which tokens a step fixes, gamma 8",
        "not at hand",
        tuple(
            Row(f"{schedule}, T {steps}", f"specdiff:8:steps={steps}:schedule={schedule}")
            for schedule in ("left-to-right", "confidence", "threshold")
            for steps in (2, 4)
        ),
    ),
    Table(
        "Trees of one step",
        "SpecDiff-2 draws 16 samples; tokens a round not at hand",
        (
            Row("best-first, 16 rows", "specdiff:budget=16:steps=1"),
            Row("16 samples merged", "specdiff:branches=16:budget=48:steps=1"),
        ),
    ),
)
PAPERS = {"dflash": DFLASH, "d2sd": D2SD, "specdiff": SPECDIFF}
