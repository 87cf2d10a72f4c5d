"""Sampled answers follow the target's law with every method, at T = 0.7 and 1."""

from functools import cache, partial

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.autoregressive import Chain, DrawnChain, GrownTree
from dflash_mlx.drafters.block_diffusion import (
    BestFirst,
    BlockDiffusion,
    DrawnBlock,
    DrawnPath,
    SelectedPath,
)
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.dflash.domino import DominoLinks, PrefixGRU, correction
from dflash_mlx.drafters.dflash.paths import (
    Candidates,
    ConfidenceHead,
    MarkovHead,
    MarkovLinks,
    predecessors,
)
from dflash_mlx.drafters.dual_diffusion import DualDiffusion, JointGrowth
from dflash_mlx.drafters.eagle3.model import ParallelDraft
from dflash_mlx.drafters.growth.grow import TOP_K, Linked, rank
from dflash_mlx.drafters.method import Drawn
from dflash_mlx.drafters.methods import METHODS
from dflash_mlx.drafters.networks.model import DraftHead
from dflash_mlx.drafters.ngram import NGram
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.paper import (
    CONTROLS,
    AblatedDual,
    PaperGrowth,
    Resample,
    sampled,
)
from dflash_mlx.drafters.specdiff.drafter import (
    IN_ORDER,
    SCHEDULES,
    Denoising,
    DrawnSpecDiff,
    SpecDiff,
    likeliest,
)
from dflash_mlx.engine import verify
from dflash_mlx.verifier.pass_times import PassTimes
from support.language_models import language_model
from support.law import (
    VOCABULARY,
    ToyDrafter,
    ToyEagle,
    ToyMasked,
    answers_of,
    law_distance,
)
from support.toys import ToyTarget

TEMPERATURE = 0.7


class ToyLinks(ToyDrafter):
    """Stands for a drafter whose candidates are scored by the token before them as well."""

    is_linked = True

    def linked(self, context, anchor, rows, prefixes=((),)):
        found = []
        for prefix in prefixes:
            logits = self.logits(context, anchor, rows, [prefix])
            found.append(self.link(logits, mx.array([anchor.item(), *prefix])))
        return found


class ToyPaths(ToyLinks):
    """Stands for a DFlash 2 drafter: three candidates."""

    def candidates(self, context, anchor, rows):
        logits = self.logits(context, anchor, rows)
        tokens = mx.argsort(-logits, axis=-1)[:, :3]
        unary = mx.take_along_axis(logits, tokens, axis=-1)[:, None]
        scores = unary + self.edges(tokens, anchor)
        return Candidates(tokens, lambda t, before, _: (scores[t, before], None))

    def link(self, logits, shown):
        ranked = rank(logits, 3)
        return Linked(ranked, np.array(self.edges(mx.array(ranked.tokens), shown[-1:])))

    def edges(self, tokens, anchor):
        before = predecessors(tokens, anchor)
        return mx.array(self.table)[before[:, :, None], 0, tokens[:, None]]


class ToyMarkov(ToyLinks):
    """Stands for a DSpark drafter, with its real heads; logits are states as well."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.table /= 3  # or nothing but the likeliest path would be drawn
        head, confidence = MarkovHead(VOCABULARY, VOCABULARY, 3), ConfidenceHead(7)
        for i, module in enumerate((head.markov_w1, head.markov_w2, confidence.proj)):
            shape = module.weight.shape
            module.weight = mx.random.normal(shape, key=mx.random.key(10 * seed + i))
        self.links = MarkovLinks(head, confidence, None)

    def candidates(self, context, anchor, rows):
        logits = self.logits(context, anchor, rows)
        return self.links.candidates(logits, logits, anchor, None)

    def link(self, logits, shown):
        given = logits, logits, shown, None, lambda scores: rank(scores, self.links.top_k)
        return self.links.linked(*given)


class ToyDomino(ToyMarkov):
    """Stands for a Domino drafter, with its real head."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        keys = mx.random.split(mx.random.key(8), 5)
        gru, layers = PrefixGRU(4, 5), correction(9, 3, VOCABULARY)
        for i, name in enumerate(("weight_ih_l0", "weight_hh_l0")):
            gru[name] = 3 * mx.random.normal(gru[name].shape, key=keys[i])
            weight = layers[2 * i].weight
            layers[2 * i].weight = 2 * mx.random.normal(weight.shape, key=keys[i + 2])
        embedding = mx.random.normal((VOCABULARY, 4), key=keys[4])
        self.links = DominoLinks(gru, layers, 1, lambda tokens: embedding[tokens])


class ToyParallel(ToyEagle):
    """Stands for a P-EAGLE drafter, with its real drafts; logits are states as well."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.head = DraftHead(lambda states: states, VOCABULARY)

    def begin(self, state):
        state.context.words = None
        return ParallelDraft(
            self, state.context, lambda anchor: mx.array(self.table[anchor.item(), :-1])
        )


class Unasked(DrawnChain):
    """Makes all steps whatever they cost, so that there is something to cut."""

    def asking(self, another):
        return self


class ToyHalf(ToyDrafter):
    """Stands for a drafter with a draft vocabulary: two of the four tokens."""

    def logits(self, context, anchor, rows, prefixes=((),)):
        known = mx.array([False, True, False, True])
        return mx.where(known, super().logits(context, anchor, rows, prefixes), -mx.inf)


def as_pays(drafter, chains=True):
    """Chains cut where more of them would not pay, by what each position is sure of; or trees."""
    times = PassTimes((1, 2, 3, 4), (1.0, 1.5, 2.0, 2.5))
    return BatchBudget(drafter, times, Scope(looks_up=False, chains=chains), int)


GROWTH = JointGrowth(2, 8)


def dual(first, second, growth=GROWTH, levels=2):
    """D2SD's drafter of two toys."""
    if levels > 2:
        return AblatedDual(first, second, growth).ablated(levels)
    return DualDiffusion(first, second, growth)


def scheduled(schedule, shape="tree", steps=2):
    """SpecDiff with a schedule of the paper, its passes drafting one of three shapes."""

    def made(sampling):
        grown = {
            "chain": (partial(likeliest, nodes=4), 1),
            "tree": (partial(likeliest, nodes=7), TOP_K),
            "samples": (partial(sampled, samples=3, seed=sampling.seed, nodes=5), TOP_K),
        }
        return SpecDiff(MASKED, None, Denoising(steps, schedule), *grown[shape])

    return made


def drawn_in(steps, weighed=False):
    """SpecDiff's chains, drawn in one pass or left to right in several."""
    how = Denoising(steps, IN_ORDER if steps > 1 else SCHEDULES[0])

    def made(sampling):
        drafter = DrawnSpecDiff(MASKED, None, how, sampling, weighed)
        return as_pays(drafter) if weighed else drafter

    return made


FIRST, SECOND, MARKOV, DOMINO = ToyDrafter(1), ToyDrafter(2), ToyMarkov(3), ToyDomino(3)
SHORT = ToyDrafter(1, block_size=2)  # so that the second goes on behind its end within an answer
HALVES = ToyHalf(1), ToyHalf(2)
MASKED, GROWN = ToyMasked(1), (partial(likeliest, nodes=6), 3)
EAGLE, PARALLEL = ToyEagle(1), ToyParallel(1)
FEW = {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
SMALL = language_model("falcon_h1", ToyTarget(VOCABULARY), **FEW)  # recurrent and attention
AS_EAGLE = {"assistant", "mtp"}  # whose toy would be the same, since the same drafters run it
MADE = {
    "none": lambda sampling: NoDraft(),
    "ngram": lambda sampling: NGram(),
    "dflash": lambda sampling: BlockDiffusion(FIRST),
    "dflash, reject": lambda sampling: DrawnBlock(FIRST, None, sampling),
    "dflash, as pays, reject": lambda s: as_pays(DrawnBlock(FIRST, None, s, weighed=True)),
    "dflash, path as pays, reject": lambda s: as_pays(
        DrawnPath(ToyPaths(1), None, s, weighed=True)
    ),
    "dflash, path": lambda sampling: SelectedPath(ToyPaths(1)),
    "dflash, path, reject": lambda sampling: DrawnPath(ToyPaths(1), None, sampling),
    "dflash, half the vocabulary, reject": lambda sampling: DrawnBlock(HALVES[0], None, sampling),
    "ddtree": lambda sampling: BestFirst(FIRST, None, 6),
    "ddtree, path": lambda sampling: BestFirst(ToyPaths(1), None, 6),
    "d2sd": lambda sampling: dual(FIRST, SECOND),
    "d2sd, as pays": lambda sampling: as_pays(dual(FIRST, SECOND), chains=False),
    "d2sd, path": lambda sampling: dual(ToyPaths(1), SECOND),
    "d2sd, path second": lambda sampling: dual(FIRST, ToyPaths(2)),
    "d2sd, two paths": lambda sampling: dual(ToyPaths(1), ToyPaths(2)),
    "d2sd, longer path second": lambda s: dual(ToyPaths(1, 2), ToyPaths(2), PaperGrowth(1)),
    "d2sd, longer second": lambda sampling: dual(SHORT, SECOND, levels=3),
    "d2sd, half the vocabulary": lambda sampling: dual(*HALVES),
    "d2sd, published": lambda sampling: dual(FIRST, SECOND, PaperGrowth(2)),
    "d2sd, published, one drafter": lambda s: dual(FIRST, None, PaperGrowth(2), levels=3),
    "d2sd, published, longer second": lambda s: dual(SHORT, SECOND, PaperGrowth(1), levels=3),
    "d2sd, one drafter, path": lambda sampling: dual(ToyPaths(1), None),
    "d2sd, one drafter": lambda sampling: dual(FIRST, None),
    "dflash1": lambda sampling: BlockDiffusion(ToyPaths(1)),
    "specdiff": lambda sampling: SpecDiff(MASKED, None, Denoising(2), *GROWN),
    "eagle3": lambda sampling: GrownTree(EAGLE, None, 3, 8),
    "eagle3, chain": lambda sampling: Chain(EAGLE),
    "eagle3, reject": lambda sampling: DrawnChain(EAGLE, None, sampling),
    "eagle3, parallel": lambda sampling: GrownTree(PARALLEL, None, 3, 8),
    "eagle3, parallel as pays": lambda s: as_pays(GrownTree(PARALLEL, None, 3, 8), chains=False),
    "eagle3, parallel chain": lambda sampling: Chain(PARALLEL),
    "eagle3, parallel, reject": lambda sampling: DrawnChain(PARALLEL, None, sampling),
    "eagle3, parallel as pays, reject": lambda s: as_pays(
        DrawnChain(PARALLEL, None, s, weighed=True)
    ),
    "eagle3, as pays, reject": lambda s: as_pays(DrawnChain(EAGLE, None, s, weighed=True)),
    "eagle3, unasked, as pays, reject": lambda s: as_pays(Unasked(EAGLE, None, s, weighed=True)),
    "eagle3, as sure, reject": lambda s: DrawnChain(EAGLE, None, s, weighed=True).asking(
        lambda chance, _: chance > 0.35
    ),
    "lm": lambda sampling: GrownTree(SMALL, 4, 3, 8),
    "lm, chain": lambda sampling: Chain(SMALL, 4),
    "lm, reject": lambda sampling: DrawnChain(SMALL, 4, sampling),
    "lm, as pays, reject": lambda s: as_pays(DrawnChain(SMALL, 4, s, weighed=True)),
    "resample": lambda sampling: Resample(FIRST, None, 3, sampling.seed),
    "dflash, dspark": lambda sampling: SelectedPath(MARKOV),
    "dflash, dspark, reject": lambda sampling: DrawnPath(MARKOV, None, sampling),
    "dflash, dspark as pays, reject": lambda s: as_pays(DrawnPath(MARKOV, None, s, weighed=True)),
    "ddtree, dspark": lambda sampling: BestFirst(MARKOV, None, 6),
    "d2sd, dspark": lambda sampling: dual(MARKOV, SECOND),
    "d2sd, dspark alone": lambda sampling: dual(MARKOV, None),
    "dflash, domino": lambda sampling: SelectedPath(DOMINO),
    "dflash, domino, reject": lambda sampling: DrawnPath(DOMINO, None, sampling),
    "dflash, domino as pays, reject": lambda s: as_pays(DrawnPath(DOMINO, None, s, weighed=True)),
    "ddtree, domino": lambda sampling: BestFirst(DOMINO, None, 6),
    "d2sd, domino alone": lambda sampling: dual(DOMINO, None),
    **{f"specdiff, by {name}": scheduled(name) for name in SCHEDULES},
    "specdiff, one step": scheduled(SCHEDULES[0], "tree", 1),
    "specdiff, chain": scheduled("threshold", "chain"),
    "specdiff, samples": scheduled(SCHEDULES[0], "samples", 1),
    **{f"specdiff, {steps} steps, reject": drawn_in(steps) for steps in (1, 2, 3)},
    **{f"specdiff, {steps} steps, as pays, reject": drawn_in(steps, True) for steps in (1, 2, 3)},
}

REJECTED = [name for name in MADE if name.endswith("reject")]
MATCHED = [name for name in MADE if name not in (*REJECTED, "none")]


def of(name, temperature=TEMPERATURE, **settings):
    """The toy target, that drafter, and its settings."""
    sampling = SamplingConfig(temperature, **settings)
    acceptance = "reject" if name.endswith("reject") else "match"
    config = DecodeConfig(name.partition(",")[0], acceptance=acceptance, sampling=sampling)
    return ToyTarget(VOCABULARY), MADE[name], config


def distance(name, draws=600, temperature=TEMPERATURE, **settings):
    """Of so many answers with that method from the enumerated law, in standard deviations."""
    target, made, config = of(name, temperature, **settings)
    return law_distance(target, made, draws, config)


def test_every_method_is_here():
    assert {name.partition(",")[0] for name in MADE} | AS_EAGLE == {*METHODS, *CONTROLS}
    makers = {METHODS[name].make for name in ("eagle3", *AS_EAGLE)}
    assert len(makers) == 1


@pytest.mark.parametrize("temperature", [TEMPERATURE, 1.0])
def test_plain_answers_follow_the_law(temperature):
    assert distance("none", 1000, temperature) < 4


@cache
def plain_answers(temperature):
    """Of a hundred seeds; the test above says which law they follow."""
    target, made, config = of("none", temperature)
    return answers_of(target, made, 100, config)


@pytest.mark.parametrize("temperature", [TEMPERATURE, 1.0])
@pytest.mark.parametrize("name", MATCHED)
def test_matched_answers_are_the_plain_ones_of_their_seeds_and_so_of_that_law(name, temperature):
    target, made, config = of(name, temperature)
    assert answers_of(target, made, 100, config) == plain_answers(temperature)


@pytest.mark.parametrize("name", REJECTED)
def test_rejection_follows_the_law(name):
    assert distance(name) < 4


AT_1_TOO = ("dspark", "domino", "steps, reject", "eagle3", "lm")
AT_1 = [name for name in REJECTED if any(kind in name for kind in AT_1_TOO)]


@pytest.mark.parametrize("name", AT_1)
def test_rejection_follows_the_law_at_temperature_1(name):
    assert distance(name, temperature=1.0) < 4


FILTERS = (
    {"top_p": 0.95, "top_k": 3},
    {"repetition_penalty": 1.7, "repetition_context": 2},
    {"top_p": 0.8},
    {"top_k": 2},
)
REJECTING = ("dflash, path, reject", "dflash, dspark, reject", "eagle3, reject")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("dflash, reject", settings) for settings in FILTERS),
        *((name, settings) for name in REJECTING for settings in FILTERS[:2]),
        *(("specdiff, 3 steps, reject", settings) for settings in FILTERS[2:]),
    ],
    ids=str,
)
def test_rejection_follows_the_law_with_every_filter(name, settings):
    draws = {"dflash, reject": 800, "specdiff, 3 steps, reject": 600}
    assert distance(name, draws.get(name, 500), **settings) < 4


KEPT, PATH, BLOCK, STEPS = verify.kept, DrawnPath.drawn, DrawnBlock.drawn, Drawn.proposal


def forgetful(self, *given):
    tokens, _, sure = PATH(self, *given)
    return tokens, mx.softmax(self._model.logits(*given[:3]) / TEMPERATURE, axis=-1), sure


def by_own_tokens(self, *given):
    tokens, q, _ = BLOCK(self, *given)
    return tokens, q, mx.take_along_axis(q, tokens[:, None], axis=-1)[:, 0]


def by_surest(self, state, tokens, q, sure):
    return STEPS(self, state, tokens, q, q.max(axis=-1).min())


MISTAKES = {
    "all are kept": (verify, "kept", lambda p, q, tokens, u: mx.array(len(tokens))),
    "kept by p": (verify, "kept", lambda p, q, tokens, u: KEPT(p, mx.ones_like(q), tokens, u)),
    "drawn from p": (verify, "remainder", lambda p, q: p),
    "q forgets the token before": (DrawnPath, "drawn", forgetful),
    "chains are cut by their own tokens": (DrawnBlock, "drawn", by_own_tokens),
    "steps are cut by their own tokens": (Drawn, "proposal", by_surest),
}
SHOWN_BY = {
    DrawnPath: "dflash, dspark, reject",
    DrawnBlock: "dflash, as pays, reject",
    Drawn: "eagle3, unasked, as pays, reject",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_law_test_notices_wrong_rules(monkeypatch, mistake):
    where, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(where, name, wrong)
    assert distance(SHOWN_BY.get(where, "dflash, reject")) > 4
