"""Mixtures of experts: what rows touch, and which rows a budget verifies by what it thinks of that.

    PYTHONPATH=tests .venv/bin/python scripts/experts.py  # what docs/lab/2026-11-27-experts.md has

Experts are counted in passes of a tiny random model. On paper, block drafts meet a random router;
a pass reads what its rows touch, and takes the seconds of scripts/heads.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
from heads import Drafter, Network, attention, dflash, draft_time, pass_time
from roofline_data import MACHINES
from roofline_products import table, weight_bytes

MACHINE, BITS = MACHINES["M4 Max"], 4
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # the first of `dflash_mlx.verifier.pass_times.ROWS`
ROUNDS, DEPTH, WIDTH = 150, 15, 4  # of a draft: its tokens, and the alternatives of each
# Shares of a router's noise that belong to a row's token, to all before it, and to the whole text
TOKEN, PATH, TEXT = 0.5, 0.2, 0.3
# Deviation of experts' popularity, beside noise of 1. At 0.6 half of 128 get 90 % of the choices.
SKEWS = {"even": 0.0, "skewed": 0.6}


@dataclass(frozen=True)
class Touched(Network):
    touched: float = 0.0  # experts of a layer, by a pass

    def chosen(self, rows: int) -> float:
        return self.touched


def mixture(name: str, layers: int, width: int, heads: tuple[int, int, int], *rest: int) -> Network:
    """heads: of queries, keys, their width. rest: experts' width, count, those of a row; words."""
    hidden, experts, used, words = rest
    dense, head = layers * (attention(width, *heads) + width * experts), words * width
    kept, each = layers * 2 * heads[1] * heads[2], layers * 3 * width * hidden
    return Network(name, layers, dense, head, head, kept, 0, words, each, experts, used)


TARGETS = {  # with a DFlash of six layers, of the proportions of that for Qwen3.6-35B-A3B
    mixture("Qwen3-30B-A3B", 48, 2048, (32, 4, 128), 768, 128, 8, 151_936): 2048,
    mixture("Mixtral 8x7B", 32, 4096, (32, 8, 128), 14_336, 8, 2, 32_000): 4096,
    mixture("gpt-oss-20b", 24, 2880, (64, 8, 64), 2880, 32, 4, 201_088): 2880,
}


@dataclass(frozen=True)
class Round:
    """A draft's nodes, likeliest first, and what each would touch."""

    reach: np.ndarray  # [N] chance that a node is accepted
    parents: np.ndarray  # [N]
    touches: np.ndarray  # [N, layers, experts] bool

    def union(self, nodes: np.ndarray) -> float:  # experts of a layer
        return float(self.touches[nodes].any(axis=0).sum(axis=-1).mean())


def tree(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reach, parents and tokens [N] of the likeliest nodes of a block that is right as it says."""
    sure = 1 / (1 + np.exp(-(rng.normal(1.2, 0.8) + rng.normal(0.0, 1.0, DEPTH))))
    rest = 0.6 ** np.arange(1, WIDTH)
    chances = np.column_stack([sure, (1 - sure)[:, None] * rest / (rest.sum() * 1.2)])
    found, waiting = [], [(-1.0, 0, -1, -1)]
    while waiting and len(found) < SIZES[-1]:
        chance, depth, parent, token = heapq.heappop(waiting)
        found.append((-chance, parent, token))
        for i in range(WIDTH if depth < DEPTH else 0):
            token = depth * WIDTH + i
            heapq.heappush(waiting, (chance * chances[depth, i], depth + 1, len(found) - 1, token))
    reach, parents, tokens = zip(*found, strict=True)
    return np.array(reach), np.array(parents), np.array(tokens)


class Router:
    """Chooses experts by the largest sums of their popularity and noise."""

    def __init__(self, network: Network, skew: float, rng: np.random.Generator) -> None:
        self.shape, self.used, self.rng = (network.layers, network.experts), network.used, rng
        self.popularity = skew * rng.standard_normal(self.shape, dtype=np.float32)

    def __call__(self, tokens: np.ndarray, texts: int = 1) -> np.ndarray:
        """[N, layers, experts] what rows with these tokens touch, alone or of one text."""
        noise = self.rng.standard_normal
        kinds, of = np.unique(tokens, return_inverse=True)
        scores = np.sqrt(TOKEN) * noise((len(kinds), *self.shape), dtype=np.float32)[of]
        scores += np.sqrt(PATH) * noise((len(tokens), *self.shape), dtype=np.float32)
        scores += np.sqrt(TEXT) * noise((texts, *self.shape), dtype=np.float32)
        scores += self.popularity
        return scores >= np.partition(scores, -self.used, axis=-1)[..., -self.used, None]


class Costs:
    """Seconds and bytes of rounds with one target."""

    def __init__(self, network: Network, width: int) -> None:
        self.network = Touched(**asdict(network))
        drafter = Drafter(dflash("DFlash", 6, width, 3 * width, 8), BITS, True)
        self.draft = draft_time(MACHINE, network, drafter, DEPTH, stock=False)
        self.draft_bytes = weight_bytes(drafter.network.read() + network.head, BITS)

    def seconds(self, rows: int, touched: float) -> float:
        network = replace(self.network, touched=touched)
        one = pass_time(MACHINE, network, BITS, rows, stock=False).seconds
        return one + (self.draft if rows > 1 else 0.0)

    def bytes(self, rows: int, touched: float) -> float:
        read = weight_bytes(replace(self.network, touched=touched).read(), BITS)
        return read + (self.draft_bytes if rows > 1 else 0.0)


def by_rows(each: Round, costs: Costs, believed: dict[int, float]) -> np.ndarray:
    """The number of nodes with most expected tokens per second, if rows cost what is believed."""
    gained = np.cumsum(each.reach)
    return np.arange(max(believed, key=lambda n: gained[n - 1] / costs.seconds(n, believed[n])))


def by_experts(each: Round, costs: Costs, believed: dict[int, float]) -> np.ndarray:
    """As many nodes as pay, most chance for new experts first, or `by_rows` if better."""
    rows, union, fringe = [0], each.touches[0].copy(), set(np.flatnonzero(each.parents == 0))
    best = by_rows(each, costs, believed)
    most = each.reach[best].sum() / costs.seconds(len(best), each.union(best))
    while fringe and len(rows) < SIZES[-1]:
        new = {n: (each.touches[n] & ~union).sum(axis=-1).mean() for n in fringe}
        rows.append(max(fringe, key=lambda n: each.reach[n] / (new[n] + 0.1)))
        union |= each.touches[rows[-1]]
        fringe = fringe - {rows[-1]} | set(np.flatnonzero(each.parents == rows[-1]))
        rate = each.reach[rows].sum() / costs.seconds(len(rows), float(union.sum(-1).mean()))
        best, most = (np.array(rows), rate) if rate > most else (best, most)
    return best


def on_average(touches: list[np.ndarray], sizes: Iterable[int]) -> dict[int, float]:
    """Experts of a layer that the first rows of these touch."""
    return {n: float(np.mean([t[:n].any(0).sum(-1).mean() for t in touches])) for n in sizes}


def budgets(router: Router, rounds: list[Round], costs: Costs) -> Iterator[tuple[str, partial]]:
    """By the rows whose experts they take for granted."""
    most, real = SIZES[-1], [each.touches for each in rounds]
    believed = {
        "(no drafts)": {1: float(router.used)},
        "of one token": dict.fromkeys(SIZES, float(router.used)),
        "of any words": on_average([router(np.arange(most), most) for _ in range(8)], SIZES),
        "of words of a text": on_average([router(np.arange(most)) for _ in range(8)], SIZES),
        "of real rounds": on_average(real, SIZES),
        "of real rounds, any number": on_average(real, range(1, most + 1)),
        "with nothing in common": {n: float(n * router.used) for n in SIZES},
    }
    for name, rows in believed.items():
        yield name, partial(by_rows, costs=costs, believed=rows)
    rows = believed["of real rounds, any number"]
    yield "every node's own", partial(by_experts, costs=costs, believed=rows)


def lines(network: Network, width: int, skew: str) -> Iterator[list[str]]:
    """One for each budget."""
    rng = np.random.default_rng(7)
    router, costs = Router(network, SKEWS[skew], rng), Costs(network, width)
    trees = [tree(rng) for _ in range(ROUNDS)]
    rounds = [Round(reach, parents, router(tokens)) for reach, parents, tokens in trees]
    for name, choose in budgets(router, rounds, costs):
        chosen = ((each, choose(each)) for each in rounds)
        found = [(len(nodes), each.union(nodes), each.reach[nodes].sum()) for each, nodes in chosen]
        tokens = sum(gained for _, _, gained in found)
        read = sum(costs.bytes(rows, touched) for rows, touched, _ in found)
        once = sum(costs.seconds(rows, touched) for rows, touched, _ in found)
        apart = sum(costs.seconds(rows, float(rows * network.used)) for rows, _, _ in found)
        brought = read / tokens / 1e9, tokens / once, tokens / apart
        figures = zip((1, 1, 2, 2, 1, 1), (*np.mean(found, axis=0), *brought), strict=True)
        yield [network.name, skew, name, *(f"{each:.{digits}f}" for digits, each in figures)]


def counted() -> Iterator[list[str]]:
    """Experts of a layer that passes of a tiny random Qwen3 touch, with 8 of 128 to a row."""
    import dflash_mlx  # noqa: F401  # loads the BLAS before MLX
    from support.experts import touched_by_rows

    for name, skew in SKEWS.items():
        for rows, found in touched_by_rows(SIZES, skew).items():
            yield [name, rows, *(f"{each:.1f}" for each in found)]


def report() -> str:
    """The tables of the page."""
    of_passes = table(["router", "rows", *map(str, SIZES)], counted())
    headings = "target", "router", "planned as rows", "rows", "experts", "tokens", "GB a token"
    every = (lines(*target, skew) for target in TARGETS.items() for skew in SKEWS)
    return of_passes + "\n" + table([*headings, "tok/s", "by pairs"], chain.from_iterable(every))


if __name__ == "__main__":
    print(report())
