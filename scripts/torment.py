#!/usr/bin/env python3
"""Hostile texts, Ctrl+C and closed terminals by the dozen: `scripts/torment.py [texts] [...]`.

texts: 10,000 texts with control sequences in all places of the chat where foreign texts are shown,
and through the streams of the command lines. interrupts: Ctrl+C at 50 moments of every command,
from the first import of ours on. closings: a terminal that is closed at 20 moments of a chat.
Prints what went wrong; exit code 1 if anything did. Without words it does all three.
"""

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tqdm import tqdm  # noqa: E402

from dflash_mlx.system.terminal import for_terminal  # noqa: E402
from support.app_hostile import EACH, torment  # noqa: E402
from support.app_terminal import CTRL_Q, ENTER, Terminal  # noqa: E402
from support.commands import COMMANDS, words_of  # noqa: E402
from support.hostile import commands_in, hostile_text, pieces  # noqa: E402
from support.interrupts import begin, end_of, prepare  # noqa: E402
from support.models import write_endless_model  # noqa: E402
from support.tiny_training import Place, write_target  # noqa: E402

SOON = 5.0  # seconds in which a chat without a terminal has to be gone
BATCH = 5  # hostile conversations of one chat


def texts(number: int, seed: int) -> Iterator[str]:
    """What hostile texts made a terminal do."""
    for case in range(seed, seed + number):
        shown = "".join(map(for_terminal, pieces(hostile_text(case), case)))
        if obeyed := commands_in(shown):
            yield f"text {case}: {obeyed}"
    firsts = range(seed, seed + -(-number // EACH), BATCH)
    for first in tqdm(firsts, desc=f"{BATCH * EACH} texts each"):
        with tempfile.TemporaryDirectory() as folder:
            for place, obeyed in torment(Path(folder), range(first, first + BATCH)).items():
                yield f"{place}: {obeyed}"


def interrupts(moments: int, seed: int, only: Sequence[str] = ()) -> Iterator[str]:
    """Which commands, of all or `only` some, did not end well when they were interrupted."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as base:
        model = write_endless_model(Path(base) / "model")
        trained = write_target(Path(base) / "trained")
        for command in only or COMMANDS:
            for _ in tqdm(range(moments), desc=command):
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    words = words_of(command, model, Path(folder))
                    if command == "train":
                        words = [*words[:2], *Place(Path(folder), trained).words(steps=10_000)]
                    yield from interrupt(command, words, Path(folder), draw)


def interrupt(
    command: str, words: list[object], folder: Path, draw: random.Random
) -> Iterator[str]:
    """Interrupt `command` a while after it began, or at one of its imports if that is sooner."""
    (folder / "temporary").mkdir()
    prepare(folder)
    (folder / "prompts.jsonl").write_text('{"category": "a", "prompt": "hello"}\n')
    imports, late = draw.choice([0, draw.randint(1, 1500)]), draw.uniform(2.0, 8.0)
    process = begin(words, folder, imports)
    timer = threading.Timer(late, process.send_signal, (signal.SIGINT,))
    timer.start()
    end = end_of(process)
    timer.cancel()
    temporary = (folder / "temporary").iterdir()  # mlx/ holds what MLX has compiled, for ever
    left = [*(each for each in temporary if each.name != "mlx"), *folder.glob("out*")]
    if end.code == 0 and "KeyboardInterrupt" in end.err:
        yield f"{command}, import {imports} or {late:.2f} s: went on; {end.err}"
    elif end.code != 0 and (end.problem or (left and command not in ("corpus", "train"))):
        yield f"{command}, import {imports} or {late:.2f} s: {end.problem or left}"


def closings(number: int, seed: int) -> Iterator[str]:
    """When a chat went on without its terminal."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as base:
        model = write_endless_model(Path(base) / "model")
        for i in tqdm(range(number), desc="closed terminals"):
            talks = ["--conversations", str(Path(base) / f"talks-{i}")]
            options = ["--model", str(model), *talks, "--max-tokens", "50000"]
            with Terminal(options, Path(base) / "cache") as terminal:
                moment = draw.uniform(0.0, 6.0)
                happened = close_after(terminal, moment, draw)
                began = time.monotonic()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    terminal.process.wait(10 * SOON)
                if (took := time.monotonic() - began) > SOON:
                    yield f"closed after {moment:.2f} s, {happened}: still there for {took:.1f} s"


def close_after(terminal: Terminal, moment: float, draw: random.Random) -> str:
    """Ask something, perhaps ask to leave, and close; what was done."""
    asks, leaves = draw.random() < 0.8, draw.random() < 0.5
    if asks:
        terminal.type("a question" + ENTER)
    end = time.monotonic() + moment
    while time.monotonic() < end and terminal.process.poll() is None:
        terminal.type("")
        time.sleep(0.02)
    if leaves:
        terminal.type(CTRL_Q)
        time.sleep(draw.uniform(0.0, 0.5))
    terminal.close()
    return f"{'asked' if asks else 'idle'}{', leaving' * leaves}"


WORK = {"texts": (texts, 10_000), "interrupts": (interrupts, 50), "closings": (closings, 20)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", nargs="*", choices=[[], *WORK], default=[])
    parser.add_argument("--number", type=int, help="instead of the usual number of cases")
    parser.add_argument("--seed", type=int, default=20_261_122)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, help="interrupt these alone")
    arguments = parser.parse_args()
    wrong = 0
    for name in arguments.work or WORK:
        run, usual = WORK[name]
        number = arguments.number or usual
        more = {"only": arguments.only} if arguments.only and name == "interrupts" else {}
        for problem in run(number, arguments.seed, **more):
            wrong += 1
            tqdm.write(for_terminal(problem))
        print(f"{name}: {number} cases done")
    print(f"{wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
