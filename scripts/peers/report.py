"""Tables of what was measured; intervals are those of a bootstrap, 95 %."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_mlx.benchmark.measure import interval
from peers.runs import Runs
from peers.table import ALONE, PLAIN, SERVERS, WITH_DRAFTS, WITHOUT

Line = Mapping[str, Any]
Count = Callable[[str], int]  # tokens of a text


def cell(values: Sequence[Any], statistic: Callable[[Any], Any], digits: int = 2) -> str:
    """A statistic and its interval; nothing where there are no values."""
    if not len(values):
        return ""
    found = f"{statistic(np.array(values)):.{digits}f}"
    between = ", ".join(f"{end:.{digits}f}" for end in interval(values, statistic))
    return f"{found} [{between}]" if between else found


def together(rows: Any) -> float:
    """Tokens per second of rows [n, 2 or more] of tokens and seconds; each had one client."""
    tokens, seconds = rows.sum(axis=0)[:2]
    return float(tokens / seconds)


def against(rows: Any) -> float:
    """How many times as fast, of rows [n, 4]: tokens and seconds of the one and of the other."""
    return together(rows[:, :2]) / together(rows[:, 2:])


def answers(lines: Sequence[Line], clients: int, peer: str) -> dict[tuple[int, int], Line]:
    """Each answer of a server to so many clients, by its run and its place in there."""
    return {
        (line["run"], i): answer
        for line in lines
        if line["clients"] == clients and line["peer"] == peer
        for i, answer in enumerate(line["answers"])
    }


def pairs(one: Mapping[Any, Line], other: Mapping[Any, Line], count: Count) -> list[list[float]]:
    """Tokens and seconds of both for each request that both answered.

    What a server says beyond the limit of a request is not counted.
    """

    def told(answer: Line) -> tuple[float, float]:
        return min(count(answer["text"]), answer["most"]), answer["seconds"]

    return [[*told(one[key]), *told(other[key])] for key in one if key in other]


def of_servers(runs: Runs, failed: Mapping[str, str], count: Count) -> list[str]:
    """Two tables: tokens per second of all clients together, and ours against each."""
    numbers = sorted({line["clients"] for line in runs.lines})
    names = [n for n in SERVERS if n in failed or runs.has(peer=n)]
    found = {(n, name): answers(runs.lines, n, name) for n in numbers for name in names}
    head = "| server | " + " | ".join(f"{n} clients" if n > 1 else "1 client" for n in numbers)
    rule = "| --- " * (1 + len(numbers)) + "|"
    lines = ["tokens per second of all clients together", "", head + " |", rule]
    for name in names:
        cells = []
        for n in numbers:
            rows = pairs(found[n, name], found[n, name], count)
            cells.append(cell(rows, lambda rows, n=n: n * together(rows), 1))
        lines.append(f"| {name} | " + " | ".join(_told(cells, failed.get(name))) + " |")
    for ours in (WITH_DRAFTS, WITHOUT):
        if ours in names:
            lines += ["", f"{ours}, times as fast as", "", head + " |", rule]
            lines += [
                f"| {name} | "
                + " | ".join(
                    cell(pairs(found[n, ours], found[n, name], count), against) for n in numbers
                )
                + " |"
                for name in names
                if name != ours and any(found[n, name] for n in numbers)
            ]
    lines += [
        "",
        "answers that are those of `ours without`, as far as both go",
        "",
        head + " |",
        rule,
    ]
    for name in names:
        shares = [same(found[n, name], found.get((n, WITHOUT), {})) for n in numbers]
        lines.append(f"| {name} | " + " | ".join(shares) + " |")
    return lines


def _told(cells: Sequence[str], why: str | None) -> list[str]:
    return [each or why or "" for each in cells]


def same(one: Mapping[Any, Line], other: Mapping[Any, Line]) -> str:
    """How many answers are the same as far as both go, of how many that both gave."""
    shared = [(one[key]["text"], other[key]["text"]) for key in one if key in other]
    equal = sum(a.startswith(b) or b.startswith(a) for a, b in shared)
    return f"{equal} of {len(shared)}" if shared else ""


# One request after the other

Margins = Callable[[Sequence[int], Sequence[int], Sequence[int]], str]
OURS = "ours"


def rate(answer: Line) -> float:
    """Tokens per second behind the first pass; 0 where nothing came behind it."""
    behind = answer["made"] - answer["begun"]
    return float(behind / (answer["seconds"] - answer["first"])) if behind else 0.0


def whole(answer: Line) -> float:
    """Tokens per second with the prompt."""
    return float(answer["made"] / answer["seconds"])


def ratios(lines: Sequence[Line], peer: str, speed: Callable[[Line], float]) -> list[float]:
    """Our speed over a peer's, for each prompt that both answered with several passes."""
    both = [line["answers"] for line in lines if {peer, OURS} <= line["answers"].keys()]
    pairs = [(speed(each[OURS]), speed(each[peer])) for each in both]
    return [own / other for own, other in pairs if own and other]


def of_peers(
    runs: Runs, failed: Mapping[str, str], versions: Mapping[str, str], margin: Margins
) -> list[str]:
    """A table for each length of context, and what differs from plain decoding."""
    lines = []
    for context in dict.fromkeys(line["context"] for line in runs.lines):
        some = [line for line in runs.lines if line["context"] == context]
        title = f"{len(some)} prompts" + (f" of {context} tokens" if context else "")
        lines += [title, "", *_of_context(some, failed, versions), ""]
        lines += [*differences(some, margin), ""]
    return lines


def _of_context(
    some: Sequence[Line], failed: Mapping[str, str], versions: Mapping[str, str]
) -> list[str]:
    kinds = list(dict.fromkeys(line["category"] for line in some))
    head = ["peer", "version", "tok/s", "ours / it", "slowest", *kinds, "with the prompt", "same"]
    rows = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, peer in ALONE.items():
        has = [line["answers"][name] for line in some if name in line["answers"]]
        version = versions.get(peer.package, "")
        if not has:
            if name in failed:
                rows.append(f"| {name} | {version} | {failed[name]} |" + " |" * (len(head) - 3))
            continue
        found = ratios(some, name, rate)
        of_kind = [
            ratios([line for line in some if line["category"] == kind], name, rate)
            for kind in kinds
        ]
        cells = [
            name,
            version,
            f"{np.median([rate(each) for each in has]):.1f}",
            cell(found, np.median),
            f"{min(found):.2f}" if found else "",
            *(f"{np.median(each):.2f}" if each else "" for each in of_kind),
            cell(ratios(some, name, whole), np.median),
            _equal(some, name),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _equal(some: Sequence[Line], name: str) -> str:
    both = [line["answers"] for line in some if {name, PLAIN} <= line["answers"].keys()]
    equal = sum(each[name]["tokens"] == each[PLAIN]["tokens"] for each in both)
    return f"{equal} of {len(both)}"


def differences(some: Sequence[Line], margin: Margins) -> list[str]:
    """Each answer that is not that of our plain decoding, with the margin where it parts."""
    found = []
    for line in some:
        plain = line["answers"].get(PLAIN)
        for name, answer in line["answers"].items():
            if plain and answer["tokens"] != plain["tokens"]:
                said = margin(line["prompt"], plain["tokens"], answer["tokens"])
                found.append(f"* {name}, {line['id']}: {said}")
    return found
