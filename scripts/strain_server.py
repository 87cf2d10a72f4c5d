#!/usr/bin/env python3
"""Strains a server on this machine: `scripts/strain_server.py schema|crowd|swaps|kills|speed`.

schema: requests made from the served schema, 10,000 of them, to a toy model: none may be a 5xx.
crowd: 200 connections for 5 minutes, half of which vanish at random: finished answers are compared
with those of generate, and memory, connections and caches with what they were before. swaps: the
same with three models, one of which may be in memory. kills: kill -9 while it loads, reads,
answers, idles and leaves; started again on the same folder, it has to answer as ever. speed: time
per token through the server against generate, and what 1, 2, 4 and 8 clients get together, with the
default pair. Exit code 1 where something is wrong.
"""

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import httpx2 as httpx  # noqa: E402

from dflash_mlx import DecodeConfig, Pair, generate, load  # noqa: E402
from dflash_mlx.session.models import Model  # noqa: E402
from support.families import make_model  # noqa: E402
from support.fuzzed_api import attack  # noqa: E402
from support.models import write_endless_model, write_model  # noqa: E402
from support.serving import Server, actor_pair, command_of, serving, spawn, user  # noqa: E402

CHAT = "/v1/chat/completions"
PHASES = ("loading", "reading", "answering", "idle", "leaving")
QUESTION = "Which rivers meet in Koblenz, and which of them is longer? " * 6
_APART = {"lookup_in": "conversation"}  # a question that is asked again helps nobody
PROMPTS = (
    "Write a Python function that says whether a number is prime.",
    "Why is the sky blue?",
    "Name ten rivers and the countries they flow through.",
    "Tell a short story about a fox and a crow.",
    "How does a bicycle stay upright?",
    "Tom has 12 apples and gives away 5. How many are left?",
    "Write a letter to a landlord about a broken heater.",
    "What is the difference between a list and a tuple in Python?",
)


def schema(number: int, seed: int) -> bool:
    """Whether no request was answered by a fault."""
    with serving(lambda prompt: "so", DecodeConfig("none", max_tokens=3)) as server:
        counted, begin, round_ = {"requests": 0}, time.monotonic(), 0
        while counted["requests"] < number:
            found = attack(server, 100, seed + round_)
            counted = {k: counted.get(k, 0) + found[k] for k in {*counted, *found}}
            round_ += 1
            print(counted, file=sys.stderr)
        print(counted, f"{time.monotonic() - begin:.0f} s")
    return True


Ask = Callable[[random.Random], tuple[dict, str]]  # a request, and what has to be answered


async def come_and_go(server: Server, ask: Ask, seconds: float, seed: int, counted: dict) -> None:
    """One client: asks again and again, and leaves at a random moment every other time."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=120) as client:
        while time.monotonic() < end:
            body, expected = ask(draw)
            body["stream"] = draw.random() < 0.5
            leaves = draw.random() < 0.5
            limit = draw.uniform(0.0, 0.5) if leaves else 120
            try:
                asked = client.post(server.url + CHAT, json=body)
                found = await asyncio.wait_for(asked, limit)
            except (asyncio.TimeoutError, httpx.TransportError):
                counted["left" if leaves else "broken"] += 1
                continue
            if found.status_code == 429:
                counted["busy"] += 1
                await asyncio.sleep(draw.uniform(0, 0.5))
            else:
                right = words_of(found.text, body["stream"]) == expected
                counted["answered" if right else "wrong"] += 1


def words_of(text: str, stream: bool) -> str:
    """What an answer says, streamed or whole."""
    if not stream:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def crowd(number: int, seed: int, seconds: float) -> bool:
    """Whether all is as before when `number` clients of a toy model have gone."""

    def ask(draw: random.Random) -> tuple[dict, str]:
        length = draw.randint(1, 400)
        return {"model": "actor", "messages": user(str(length))}, "a" * length

    act = lambda prompt: "a" * int(prompt.rpartition("]")[2])  # noqa: E731
    pair = actor_pair(act, context_length=2000)
    usual = DecodeConfig("none", max_tokens=1000)
    with serving(pair, usual, parallel=32, queue=400) as server:
        return _crowded(server, ask, number, seed, seconds)


def swaps(number: int, seed: int, seconds: float) -> bool:
    """As `crowd`, with three tiny models of which one may be in memory."""
    config, loads = DecodeConfig("ngram", max_tokens=24), {"loads": 0}
    with tempfile.TemporaryDirectory() as base:
        place = Path(base)
        names = [write_model(place / f"model{i}", make_model("llama", i)).name for i in range(3)]
        expected = {}
        for name in names:
            pair = load(place / name)
            for text in PROMPTS:
                expected[name, text] = generate(pair, user(text), config).text

        def load_counted(name: str) -> Pair:
            loads["loads"] += 1
            return load(place / name)

        def ask(draw: random.Random) -> tuple[dict, str]:
            name, text = draw.choice([*expected])
            return {"model": name, "messages": user(text)}, expected[name, text]

        further = [Model((name,), partial(load_counted, name)) for name in names[1:]]
        more = {"further": further, "most_loaded": 1, "parallel": 32, "queue": 400}
        with serving(load(place / names[0]), config, names[0], **more) as server:
            server.models.by_name[names[0]].load = partial(load_counted, names[0])
            done = _crowded(server, ask, number, seed, seconds)
        print(loads)
        return done


def _crowded(server: Server, ask: Ask, number: int, seed: int, seconds: float) -> bool:
    """Whether all is as before when `number` clients have gone, and no answer was wrong."""
    counted = dict.fromkeys(("answered", "left", "busy", "broken", "wrong"), 0)

    async def all_of_them(seconds: float) -> None:
        each = [come_and_go(server, ask, seconds, seed + i, counted) for i in range(number)]
        await asyncio.gather(*each)

    asyncio.run(all_of_them(seconds / 10))
    before = held(server)
    asyncio.run(all_of_them(seconds))
    server.until(lambda: len(server.queue) == 0, 60)
    server.until(lambda: not server.queue.worker._open, 60)
    after = held(server)
    print(counted, "before", before, "after", after)
    clean = before["tasks"] == after["tasks"] and before["threads"] == after["threads"]
    clean = clean and after["sequences"] == 0 and after["memory"] - before["memory"] < 50e6
    return clean and not counted["wrong"] and not counted["broken"]


def kills(number: int, seed: int) -> bool:
    """Whether a server that was killed answers as ever when it is started again."""
    draw, counted = random.Random(seed), {"kills": 0, "reused": 0, "wrong": 0}
    kept = ("--remember", "--prefix-gb", "0.000001", "--prefix-disk-gb", "1", "--grace", "5")
    with tempfile.TemporaryDirectory() as base:
        model, folder = write_endless_model(Path(base) / "endless"), Path(base) / "files"
        folder.mkdir()
        with command_of(model, folder, *kept) as (_, url):
            expected, _ = said_by(url, QUESTION)
        for i in range(number):
            phase = PHASES[i % len(PHASES)]
            kill_in(phase, draw, model, folder, kept)
            with command_of(model, folder, *kept) as (_, url):
                said, reused = said_by(url, QUESTION)
            counted["kills"] += 1
            counted["reused"] += reused > 0
            if said != expected or (phase == "idle" and not reused):
                counted["wrong"] += 1
                print(f"killed while {phase}: {said!r}, not {expected!r}; {reused} tokens reused")
    print(counted)
    return not counted["wrong"]


def kill_in(
    phase: str, draw: random.Random, model: Path, folder: Path, argv: Sequence[str]
) -> None:
    """Start a server and kill it at a random moment of a phase."""
    if phase == "loading":
        process = spawn(model, folder, *argv)
        time.sleep(draw.uniform(0.0, 4.0))
        process.kill()
        process.wait(20)
        return
    with command_of(model, folder, *argv) as (process, url):
        body = {"model": "endless", "messages": user(f"{draw.random()} " * 300), "stream": True}
        if phase in ("idle", "leaving"):
            said_by(url, QUESTION)
            said_by(url, f"{draw.random()} " * 100)
            time.sleep(draw.uniform(0.0, 0.5))
        if phase in ("reading", "answering", "leaving"):
            with httpx.stream("POST", url + CHAT, json=body, timeout=60) as response:
                lines = response.iter_lines()
                for _ in range(4 if phase != "reading" else 0):
                    next(lines)
                time.sleep(draw.uniform(0.0, 0.3))
                if phase == "leaving":
                    process.terminate()
                    time.sleep(draw.uniform(0.0, 0.5))
                process.kill()


def said_by(url: str, question: str) -> tuple[str, int]:
    """A short answer, and how many tokens of its prompt were read before."""
    body = {"model": "endless", "messages": user(question), "max_tokens": 30, "temperature": 0}
    found = httpx.post(url + CHAT, json=body, timeout=60).json()
    reused = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], reused


def held(server: Server) -> dict[str, float]:
    """What a server holds while nobody asks."""

    async def tasks() -> int:
        await asyncio.sleep(1.0)
        return len(asyncio.all_tasks())

    engine = server.queue.worker.ask(lambda scheduler: scheduler).result()
    return {
        "memory": resident(),
        "tasks": asyncio.run_coroutine_threadsafe(tasks(), server.loop).result(10),
        "sequences": len(engine.running) + len(engine.waiting),
        "drafters": len(engine.drafters),
        "threads": threading.active_count(),
    }


def resident() -> float:
    """Bytes that this process has in memory, or has had at most where that is not told."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return float(pages * resource.getpagesize())
    except OSError:
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def speed(repeats: int, tokens: int) -> bool:
    """Print time per token alone and through the server, and totals of several clients."""
    pair = load()
    pair.calibrate()
    config = DecodeConfig(max_tokens=tokens)
    name = pair.target.name
    with serving(pair, config, name) as server:
        pairs = [one_by_one(pair, server, name, config, i) for i in range(repeats)]
        ratios = [served / alone for alone, served, _ in pairs[1:]]
        firsts = [first for _, _, first in pairs[1:]]
        print(f"time per token, served / generate: median {statistics.median(ratios):.3f}")
        print(f"first byte: median {1e3 * statistics.median(firsts):.0f} ms")
        asyncio.run(several(server, name, 8))  # so that each has read every question before
        for clients in (1, 2, 4, 8):
            said, took = asyncio.run(several(server, name, clients))
            print(f"{clients} clients: {said / took:.1f} tokens per second together")
    return statistics.median(ratios) < 1.03


def one_by_one(
    pair: Pair, server: Server, name: str, config: DecodeConfig, i: int
) -> tuple[float, float, float]:
    """Seconds per token of generate and of the server, and until its first byte."""
    prompt = PROMPTS[i % len(PROMPTS)]
    work = server.queue.worker.call(lambda: generate(pair, prompt, config))
    alone = work.result().statistics
    body = {"model": name, "messages": user(prompt), "stream": True, **_APART}
    begin, chunks = time.perf_counter(), []
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append((time.perf_counter(), line))
    first, last = chunks[0][0], chunks[-1][0]
    said = alone.generated_tokens - 1
    return alone.decode_seconds / said, (last - first) / said, first - begin


async def several(server: Server, name: str, clients: int) -> tuple[int, float]:
    """Tokens of so many clients together, who share out all questions, and how long it took."""
    questions, begin = iter(PROMPTS), time.perf_counter()

    async def ask() -> int:
        said = 0
        async with httpx.AsyncClient(timeout=600) as client:
            for question in questions:  # which none of the others then asks
                body = {"model": name, "messages": user(question), **_APART}
                found = await client.post(server.url + CHAT, json=body)
                said += found.json()["usage"]["completion_tokens"]
        return said

    return sum(await asyncio.gather(*(ask() for _ in range(clients)))), time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=("schema", "crowd", "swaps", "kills", "speed"))
    parser.add_argument("--number", type=int, help="of requests, connections, kills or repeats")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the crowd")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer whose speed is taken")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.work == "schema":
        good = schema(arguments.number or 10_000, arguments.seed)
    elif arguments.work in ("crowd", "swaps"):
        work = crowd if arguments.work == "crowd" else swaps
        good = work(arguments.number or 200, arguments.seed, arguments.seconds)
    elif arguments.work == "kills":
        good = kills(arguments.number or 50, arguments.seed)
    else:
        good = speed(arguments.number or 9, arguments.tokens)
    print("as it should be" if good else "NOT as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
