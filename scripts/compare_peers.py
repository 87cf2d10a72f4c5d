"""This program beside others that decode with MLX: speed, and whether they say the same.

    .venv/bin/python scripts/compare_peers.py --prompts PROMPTS.jsonl --out FOLDER \
        [--limit 8] [--max-tokens 64] [--context 4096] [--small MODEL]
    .venv/bin/python scripts/compare_peers.py --prompts PROMPTS.jsonl --out FOLDER \
        --clients 1,4,8 [--requests 24] [--runs 2]

Both take --model and --drafter (default: the default pair) and --peers. The first answers every
prompt with every peer in turn, greedily, each in a process that stays, and compares tokens with our
plain decoding. With --clients, servers run side by side and are asked in turn by so many clients,
each of which asks again as soon as it is answered: whole answers of 16 to 64 tokens, no prompt
twice; the rate is that of all clients together, by the seconds that requests took. Others are
installed into environments of their own in FOLDER (--python takes one that is there), and all read
the same weights with the same BLAS. What was measured lies in FOLDER, and the same command goes on
with what is missing. Who cannot run is a row with the reason. Let nothing else run meanwhile.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

from mlx_lm.tokenizer_utils import load as load_tokenizer
from peers import alone, draw, report, servers
from peers.environment import PeerError, python_of, versions_of
from peers.pair import written
from peers.place import Place
from peers.runs import Runs
from peers.table import ALONE, APART, PLAIN, SERVERS, WITHOUT_METAL, chosen
from peers.tiny import tiny

from dflash_mlx.benchmark.selection import questions, read_contexts
from dflash_mlx.cli.prompts import first_of_each, read_prompts
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import require
from dflash_mlx.engine.exact import first_difference
from dflash_mlx.models.load import load_target
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.files import locked

PROGRAM = "compare_peers.py"


def compare_servers(asked: Any, place: Place) -> list[str]:
    """Measure what is missing, and tell all of it."""
    names = chosen(asked.peers, list(SERVERS))
    plan = servers.Plan(numbers(asked.clients), asked.requests, asked.runs)
    runs = Runs(place.out / "servers.jsonl", requests=plan.requests)
    failed = servers.measure(names, place, rows_of(asked), plan, runs)
    tokenizer = load_tokenizer(place.folders.target)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    lines = report.of_servers(runs, failed, count)
    if runs.lines:
        draw.servers(runs, count, place.out / "servers.png")
    patches = [
        f"{name}: {' '.join(SERVERS[name].without_metal)}"
        for name in names
        if on_cpu() and SERVERS[name].without_metal
    ]
    versions = versions_by_package({SERVERS[name].package for name in names}, place)
    told = ", ".join(f"{package} {version}" for package, version in versions.items())
    return [*lines, "", told, "", *circumstances(patches)]


def compare_alone(asked: Any, place: Place) -> list[str]:
    """Measure what is missing, and tell all of it; who reads another pair comes last."""
    names = chosen(asked.peers, list(ALONE))
    own = [name for name in names if ALONE[name].environment == APART]
    shared = [name for name in names if name not in own]
    lines = _alone(asked, place, shared, "peers") if shared else []
    if own:
        target = place.folders.target
        raw = json.loads((target / "config.json").read_text())
        pair = tiny(place.out / "tiny", target, raw["vocab_size"], raw.get("eos_token_id"))
        told = {"model": str(pair.target), "drafter": str(pair.drafter)}
        apart = Place(place.out, place.python, pair, told)
        lines += ["a tiny random Qwen pair", ""]
        lines += _alone(asked, apart, [report.OURS, PLAIN, *own], "tiny")
    patches = [what for name in names if on_cpu() for what in ALONE[name].patches]
    return [*lines, *circumstances(patches)]


def _alone(asked: Any, place: Place, names: list[str], file: str) -> list[str]:
    rows = rows_of(asked)
    tokenizer, contexts = load_tokenizer(place.folders.target), read_contexts(asked.context)
    prompts = questions(tokenizer, rows, contexts, rows, place.folders.template)
    runs = Runs(place.out / f"{file}.jsonl", most=asked.max_tokens)
    failed = alone.measure(names, place, prompts, asked.max_tokens, runs)
    for line in runs.lines:  # of an earlier run that is complete
        failed = {**line["failed"], **failed}
    versions = versions_by_package({ALONE[name].package for name in names}, place)
    draw.peers(runs, place.out / f"{file}.png")
    return report.of_peers(runs, failed, versions, margins(place))


def rows_of(asked: Any) -> list[dict[str, Any]]:
    """The prompts of all files; DFlashError for damaged ones."""
    rows = [row for source in asked.prompts for row in read_prompts(source)]
    return first_of_each(rows, asked.limit)[:: asked.every]


def margins(place: Place) -> Callable[[Sequence[int], Sequence[int], Sequence[int]], str]:
    """What tells where two answers part, and how close their tokens are for the target there."""
    loaded: list[Any] = []

    def margin(prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> str:
        if not loaded:
            loaded.append(load_target(place.pair.get("model")))
        found = first_difference(loaded[0].target, prompt, plain, other)
        if found is None or found.margin is None:
            return f"ends after {len(other)} tokens, and not after {len(plain)}"
        return f"parts at token {found.position}, where logits are {found.margin:.1e} apart"

    return margin


def versions_by_package(packages: Iterable[str], place: Place) -> dict[str, str]:
    """Of what is installed, with its MLX."""
    of = {peer.package: peer.environment for peer in (*SERVERS.values(), *ALONE.values())}
    told = {}
    for package in sorted(packages):
        try:
            known = versions_of(python_of(of[package], place.environments, place.python))
        except PeerError:
            continue
        told[package] = f"{known.get(package, 'missing')} (MLX {known.get('mlx')})"
    return told


def circumstances(patches: Sequence[str]) -> list[str]:
    """Machine, and what others needed here."""
    needed = [*(WITHOUT_METAL if on_cpu() else ()), *patches]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return [machine, "", "what others needed here:", "", *(f"* {each}" for each in needed)]


def numbers(text: str) -> tuple[int, ...]:
    """Clients from a comma-separated list; DFlashError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not part.isdecimal() or not int(part)]:
        what = f"--clients has {wrong[0]!r}"
        raise DFlashError(what, "give numbers of 1 or more, as in 1,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def main(argv: Sequence[str]) -> None:
    asked = parser().parse_args(argv)
    for name in ("every", "max_tokens", "requests", "runs"):
        require(vars(asked)[name] > 0, name, vars(asked)[name], "1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    config = cli.read_pair_config(asked)
    pair: Mapping[str, Any] = {
        name: value for name in ("model", "drafter") if (value := getattr(config, name)) is not None
    }
    with locked(out, wait=False):
        place = Place(out, asked.python, written(config, out / "pair", asked.small), pair)
        compare = compare_servers if asked.clients else compare_alone
        text = "\n".join(compare(asked, place))
    name = "servers.md" if asked.clients else "peers.md"
    (out / name).write_text(text + "\n", encoding="utf-8")
    print(text)


def parser() -> Any:
    result = cli.Parser(prog=PROGRAM, description="This program beside others.")
    add = result.add_argument
    add("--prompts", type=Path, nargs="+", required=True, help="files as of the benchmark")
    add("--out", type=Path, required=True, help="a folder for all that is made")
    add("--peers", help="names from the table, separated by commas (default: all)")
    add("--limit", type=int, help="of each category so many prompts at most")
    add("--every", type=int, default=1, help="use only every N-th prompt")
    add("--max-tokens", type=int, default=64, help="of an answer (default: 64)")
    add("--context", help="pad prompts to so many tokens")
    add("--small", type=Path, help="folder of a small language model that drafts, for mlx-lm")
    add("--clients", help="servers, and how many ask at once, as in 1,4,8")
    add("--requests", type=int, default=24, help="of a turn (default: 24)")
    add("--runs", type=int, default=2, help="turns of each server (default: 2)")
    add("--python", type=Path, help="of an environment that has the others")
    cli.add_options(result, PairConfig)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
