"""Several ranks on this machine against one process: tokens, bytes, speed, and what ends them.

    .venv/bin/python scripts/two_machines.py compare --prompts scripts/prompts/written.jsonl
    .venv/bin/python scripts/two_machines.py faults --times 100

*compare* answers prompts on several ranks, every connection between them delayed, and in one
process, with every method: whether the tokens are the same, or the margin of the first that is not;
bytes over the link against what docs/two-machines.md predicts; tokens per second with and without
drafts. *faults* kills or stops a rank at a random moment of an answer, a corpus or a training, many
times: whether all others end in time with one sentence, and whether what they wrote is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from slow_link import PORT, SlowLink

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import mlx.core as mx

from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.cli.ranks import joined
from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.parity import first_difference
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.system import ranks as ranks_module
from dflash_mlx.train.corpus.rows import read_rows
from dflash_mlx.verifier.pass_times import forget_times
from dflash_mlx.verifier.ranks import Leader

PROGRAM = "two_machines.py"
METHODS = ("none", "ngram", "dflash", "ddtree", "d2sd")
GIGABIT = 125e6  # bytes a second


# Work of a rank, or of the one process


class Passes:
    """Rows and passes of a leader's target, and when all its answers wait for a reader's word."""

    def __init__(self) -> None:
        self.rows = self.count = 0

    def watch(self, target: Any) -> None:
        if not isinstance(target, Leader):
            return
        orders = target._orders
        send = orders.send

        def counted(name: str, *given: Any) -> None:
            if name == "pass":
                self.count += 1
                self.rows += sum(len(tokens) for _, tokens, _ in given[0])
            send(name, *given)

        orders.send = counted  # type: ignore[method-assign]

    def mark(self) -> None:
        """Let whoever carries the bytes look at how many there were."""
        print(json.dumps({"rows": self.rows, "passes": self.count}), flush=True)
        sys.stdin.readline()


def work(argv: Sequence[str]) -> None:
    """Answer prompts with every method; as one of several ranks, lead the others."""
    asked = _work_parser().parse_args(argv)
    ranks, passes = joined(), Passes()
    methods = asked.methods.split(",")
    uses = [DecodeConfig(method, max_tokens=asked.max_tokens) for method in methods]
    pair = load_pair(PairConfig(asked.model), *uses, ranks=ranks)
    prompts = _prompts(pair, asked.prompts, asked.limit)
    passes.watch(pair.target)
    if ranks is not None:
        forget_times(pair.target)  # which may be those of another link
    found: dict[str, Any] = {"size": _size(pair), "answers": {}}
    for use in uses:  # whatever is measured or chosen once
        _answer(pair, prompts[0], use)
    if asked.marks:
        passes.mark()
    for use in uses:
        found["answers"][use.method] = [_answer(pair, prompt, use) for prompt in prompts]
        if asked.marks:
            passes.mark()
    if asked.against is not None:
        other = json.loads(asked.against.read_text())["answers"]
        found["margins"] = {
            use.method: _margins(pair, prompts, found["answers"][use.method], other[use.method])
            for use in uses
        }
    asked.out.write_text(json.dumps(found))


def _prompts(pair: Pair, file: Path, limit: int) -> list[list[int]]:
    rows = read_prompts(file, None)
    random.Random(0).shuffle(rows)
    return [prompt_tokens(pair.tokenizer, row["messages"], None) for row in rows[:limit]]


def _size(pair: Pair) -> dict[str, int]:
    states = pair.target.embedding()(mx.array([0]))
    return {"layers": pair.target.num_layers, "row_bytes": int(states.nbytes)}


def _answer(pair: Pair, prompt: list[int], config: DecodeConfig) -> dict[str, Any]:
    tokens: list[int] = []
    for delta in Session(pair, config).stream(prompt):
        tokens += delta.tokens
    statistics = delta.statistics
    return {
        "tokens": tokens,
        "speed": statistics.tokens_per_second,
        "per_round": statistics.mean_accepted,
    }


def _margins(
    pair: Pair, prompts: list[list[int]], own: list[dict[str, Any]], other: list[dict[str, Any]]
) -> list[float | None]:
    """Of the answers that differ, how far apart the logits are where they do."""
    found = []
    for prompt, one, two in zip(prompts, own, other, strict=True):
        difference = first_difference(pair.target, prompt, one["tokens"], two["tokens"])
        if difference is not None:
            found.append(difference.margin)
    return found


def _work_parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog=PROGRAM)
    result.add_argument("--model")
    result.add_argument("--prompts", type=Path, required=True)
    result.add_argument("--limit", type=int, default=20)
    result.add_argument("--max-tokens", type=int, default=48)
    result.add_argument("--methods", default=",".join(METHODS))
    result.add_argument("--marks", action="store_true")
    result.add_argument("--against", type=Path)
    result.add_argument("--out", type=Path, required=True)
    return result


def _through(link: int) -> None:
    """Let the followers' connection to the first rank go through the slow link, too."""
    connect = socket.create_connection

    def slowly(address: tuple[str, int], **keywords: Any) -> socket.socket:
        connection = connect(("127.0.0.1", link), **keywords)
        connection.sendall(PORT.pack(address[1]))
        return connection

    ranks_module.socket.create_connection = slowly  # type: ignore[assignment]


# Starting ranks


def start(
    words: Sequence[str], count: int, folder: Path, link: SlowLink | None = None, **more: str
) -> list[subprocess.Popen[str]]:
    """The same words on `count` ranks of this machine."""
    places = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(place.getsockname()[1]) for place in places]
    for place in places:
        place.close()
    running = []
    for rank in range(count):
        seen = list(ports)
        if link is not None:  # what others listen on is reached through the link
            seen = [
                port if i == rank else link.to(port, f"ring {rank} to {i}")
                for i, port in enumerate(ports)
            ]
        hosts = folder / f"hosts-{rank}.json"
        hosts.write_text(json.dumps([f"127.0.0.1:{port}" for port in seen]))
        environment = {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), **more}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (folder / f"error-{rank}").open("w") as error:
            command = [sys.executable, *words]
            running.append(
                subprocess.Popen(command, env=environment, text=True, stderr=error, **pipes)
            )
    return running


# Tokens, bytes and speed


def compare(asked: argparse.Namespace) -> None:
    words = [__file__, "work", "--prompts", str(asked.prompts), "--limit", str(asked.limit)]
    words += ["--max-tokens", str(asked.max_tokens), "--methods", asked.methods]
    words += ["--model", asked.model] if asked.model else []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        link = SlowLink(asked.latency / 1000, asked.gigabits * GIGABIT)
        many, one = folder / "many.json", folder / "one.json"
        more = {"TWO_MACHINES_LINK": str(link.anywhere)}
        running = start([*words, "--marks", "--out", str(many)], asked.ranks, folder, link, **more)
        marks = _marks(running[0], link)
        codes = [_code(process) for process in running]
        if any(codes):
            errors = "".join((folder / f"error-{i}").read_text() for i in range(asked.ranks))
            raise DFlashError(f"the ranks ended with {codes}: {errors}", "see what they say")
        alone = [sys.executable, *words, "--against", str(many), "--out", str(one)]
        subprocess.run(alone, check=True)
        _report(asked, json.loads(many.read_text()), json.loads(one.read_text()), marks)


def _code(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _marks(leader: subprocess.Popen[str], link: SlowLink) -> list[dict[str, int]]:
    """At every mark the rows and passes until then, and the bytes that were carried."""
    assert leader.stdout is not None and leader.stdin is not None
    found = []
    for line in leader.stdout:
        time.sleep(0.2 + 10 * link.latency)  # what is on its way arrives
        ring = sum(count for name, count in link.sent.items() if name != "control")
        found.append({**json.loads(line), "ring": ring, "control": link.sent["control"]})
        leader.stdin.write("\n")
        leader.stdin.flush()
    return found


def _report(
    asked: argparse.Namespace,
    many: dict[str, Any],
    one: dict[str, Any],
    marks: list[dict[str, int]],
) -> None:
    sums, row = 2 * many["size"]["layers"], many["size"]["row_bytes"]
    each = 2 * (asked.ranks - 1) * sums * row  # bytes over all links for a row
    print(f"{asked.ranks} ranks, {asked.latency:g} ms, {asked.gigabits:g} Gbit/s")
    print("method    same   margins below 1e-3   tok/s  speed-up   alone  speed-up  ", end="")
    print("ring bytes   predicted   control bytes/pass")
    for i, (method, answers) in enumerate(many["answers"].items()):
        same = sum(
            a["tokens"] == b["tokens"] for a, b in zip(answers, one["answers"][method], strict=True)
        )
        margins = one["margins"][method]
        ties = sum(margin is not None and margin < 1e-3 for margin in margins)
        speeds = [
            _speeds(found["answers"][method], found["answers"]["none"]) for found in (many, one)
        ]
        used = {key: marks[i + 1][key] - marks[i][key] for key in marks[0]}
        print(
            f"{method:<8}{same:>4}/{len(answers)}  {ties:>8} of {len(margins):<8}"
            + "".join(f"{speed:>10.2f}{ratio:>9.2f}x" for speed, ratio in speeds)
            + f"{used['ring']:>14,}{each * used['rows']:>14,}"
            + f"{used['control'] / max(used['passes'], 1):>10.0f}"
        )


def _speeds(answers: list[dict[str, Any]], plain: list[dict[str, Any]]) -> tuple[float, float]:
    """The median speed, and the median of its ratios to plain decoding's."""
    pairs = zip(answers, plain, strict=True)
    ratio = median(a["speed"] / b["speed"] for a, b in pairs)
    return median(a["speed"] for a in answers), ratio


# Faults


def faults(asked: argparse.Namespace) -> None:
    """Print what became of every try; fail where one was not as it should be."""
    rng, wrong = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory() as place:
        corpus = Path(place) / "corpus.jsonl"
        words = _collecting(asked, corpus)
        words += ["--max-tokens", "32", "--limit", "64"]
        subprocess.run([sys.executable, *words], check=True)
        for number in range(asked.times):
            with tempfile.TemporaryDirectory() as own:
                words = _works(asked, Path(own), corpus)[number % 3]
                problem, told = _fault(asked, rng, Path(own), words)
            wrong += bool(problem)
            print(f"{number}: {told}{'; WRONG: ' + problem if problem else ''}", flush=True)
    print(f"{asked.times - wrong} of {asked.times} ended as they should")
    if wrong:
        raise DFlashError(f"{wrong} of {asked.times} did not end well", "see above")


def _works(asked: argparse.Namespace, folder: Path, corpus: Path) -> list[list[str]]:
    """Words of work that takes long, and writes into `folder` if it writes."""
    model = ["--model", asked.model] if asked.model else []
    answer = ["-m", "dflash_mlx.generate", "--prompt", "Count.", "--max-tokens", "1900"]
    train = ["-m", "dflash_mlx.train", "--corpus", str(corpus), "--out", str(folder / "out")]
    train += ["--mode", "eagle3", "--layers", "1", "--minutes", "9", "--evaluate-minutes", "0.02"]
    return [[*answer, *model], _collecting(asked, folder / "corpus.jsonl"), [*train, *model]]


def _collecting(asked: argparse.Namespace, out: Path) -> list[str]:
    model = ["--model", asked.model] if asked.model else []
    return ["-m", "dflash_mlx.corpus", "--prompts", str(asked.prompts), "--out", str(out), *model]


def _fault(
    asked: argparse.Namespace, rng: random.Random, folder: Path, words: list[str]
) -> tuple[str, str]:
    """What was wrong, "" for nothing, and what was done."""
    running = start(words, asked.ranks, folder, None, DFLASH_SILENCE=str(asked.silence))
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    moment, victim = rng.uniform(0, asked.within), rng.randrange(asked.ranks)
    how = rng.choice((signal.SIGKILL, signal.SIGSTOP))
    time.sleep(moment)
    over = running[victim].poll() is not None
    running[victim].send_signal(how)
    begin, problems = time.monotonic(), []
    if over and running[victim].returncode:
        problems.append(f"rank {victim} had ended with {running[victim].returncode}")
    for rank, process in enumerate(running):
        if rank == victim:
            continue
        try:
            code = process.wait(max(0.1, begin + asked.limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            problems.append(f"rank {rank} goes on")
            process.kill()
            continue
        lines = (folder / f"error-{rank}").read_text().splitlines()
        if code != (0 if over else _expected(lines, victim)):
            problems.append(f"rank {rank} ended with {code} and said {lines[-3:]}")
    seconds = time.monotonic() - begin
    running[victim].kill()
    for process in running:
        process.wait()
    problems += [f"{file.name} is damaged" for file in folder.rglob("*") if not _whole(file)]
    name = words[1].rpartition(".")[2]
    what = "was over" if over else f"{how.name} of rank {victim}"
    return "; ".join(problems), f"{name}: {what} at {moment:.1f} s, {seconds:.1f} s"


def _expected(lines: list[str], victim: int) -> int | None:
    """The exit code that belongs to what a rank has said, None where it has said the wrong thing.

    That is one sentence which names the rank that is gone. The meeting at the start ends otherwise:
    no thread runs there that could say more.
    """
    own = [line for line in lines if not line.startswith("[ring]")]
    ended = [line for line in own if "ranks have ended" in line]
    if ended:
        return 1 if len(ended) == 1 and ended[0].startswith(f"rank {victim} ") else None
    if any("the other ranks cannot be reached" in line for line in own):
        return 2
    return -signal.SIGKILL if any("not all ranks have come" in line for line in own) else None


def _whole(file: Path) -> bool:
    """Whether it can be read; of rows all but the last, which a kill may cut."""
    if file.name.startswith(".new-"):  # removed by the next run
        return True
    try:
        if file.name.startswith("corpus"):
            return file.read_text().count("\n") < 2 or bool(read_rows(file))
        if file.suffix == ".safetensors":
            mx.eval(mx.load(str(file)))
        if file.suffix == ".json":
            json.loads(file.read_text())
    except (DFlashError, RuntimeError, ValueError):
        return False
    return True


def parser() -> argparse.ArgumentParser:
    result = cli.Parser(prog=PROGRAM, description="Several ranks on this machine.")
    commands = result.add_subparsers(required=True)
    own = {"compare": compare, "faults": faults}
    prompts = Path(__file__).parent / "prompts" / "written.jsonl"
    for name, action in own.items():
        command = commands.add_parser(name)
        command.set_defaults(action=action)
        command.add_argument("--model", help="the default model without it")
        command.add_argument("--prompts", type=Path, default=prompts)
        command.add_argument("--ranks", type=int, default=3)
        if name == "compare":
            command.add_argument("--limit", type=int, default=20)
            command.add_argument("--max-tokens", type=int, default=48)
            command.add_argument("--methods", default=",".join(METHODS), help="none comes first")
            command.add_argument("--latency", type=float, default=1.0, help="ms, one way")
            command.add_argument("--gigabits", type=float, default=1.0)
        else:
            command.add_argument("--times", type=int, default=100)
            command.add_argument("--silence", type=float, default=2.0)
            command.add_argument("--within", type=float, default=25.0, help="seconds")
            command.add_argument("--limit", type=float, default=40.0, help="seconds to their end")
            command.add_argument("--seed", type=int, default=0)
    return result


def main(argv: Sequence[str]) -> None:
    asked = parser().parse_args(argv)
    asked.action(asked)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        if link := os.environ.get("TWO_MACHINES_LINK"):
            _through(int(link))
        cli.run(lambda argv: work(argv[1:]), PROGRAM, together=cli.Together.FOLLOW)
    cli.run(main, PROGRAM)
