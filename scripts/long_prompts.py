"""Prompts as long as an agent's: what its turns read again, and what long contexts take.

    .venv/bin/python scripts/long_prompts.py turns [--kind dense|hybrid|default] [--turns 20] \
        [--system 6000] [--restart 10]
    .venv/bin/python scripts/long_prompts.py times [--kind dense] [--context 16384,32768]
    .venv/bin/python scripts/long_prompts.py limit [--kind dense] [--megabytes 900]

`dense` and `hybrid` are small random models with the layers of Llama and of Qwen3.5; `default` is
the default pair, whose context is 8,192. All have the default model's tokenizer.

`turns` replays an agent: a system prompt with tools, and turns that each call a tool and get its
result; every fifth begins with a question. Nobody's transcript is used: it is made by a seed, and
its answers are what the model is made to say. Its chat template is like Qwen 3's: a new question
leaves the thoughts before it out. A row has a turn's tokens, how many of them some earlier turn had
read at the same place, and how many of these were read again. Two more rows are another agent with
the same system prompt, and the last question asked once more in other words.

`times` reads a prompt of so many tokens and decodes behind it, by mlx-lm, by plain decoding here
and by `auto`, in an order that turns. Let nothing else run meanwhile.

`limit` allows this process so many megabytes more than it has when the model is loaded
(RLIMIT_DATA), and asks for eight answers to prompts of 500 tokens and for one behind each long
context, all at once: it says which ended, and which were refused with what sentence.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import mlx.core as mx
from agents_day import KINDS
from jinja2 import Environment
from mlx_lm.generate import stream_generate
from mlx_lm.models import llama, qwen3_5

from dflash_mlx.core.config import PLAIN, DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt, shared_length
from dflash_mlx.core.text import amount
from dflash_mlx.core.tree import Accepted
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import PrefixFiles
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.verify import TargetSampling
from dflash_mlx.models.load import load_pair, load_target
from dflash_mlx.session.memory import for_caches
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import ends_of_turns
from dflash_mlx.system.machine import available_memory
from dflash_mlx.verifier.model import Target

Message = dict[str, Any]
Encode = Callable[[str], Sequence[int]]
QUESTION_EVERY = 5  # turns
TEMPLATE = """
{%- set last = namespace(asked=0) %}
{%- for m in messages if m.role == "user" %}{% set last.asked = m.number %}{% endfor %}
{%- for m in messages %}
{{- "<|im_start|>" + ("user" if m.role == "tool" else m.role) + "\n" }}
{%- if m.role == "tool" %}{{ "<tool_response>\n" + m.content + "\n</tool_response>" }}
{%- else %}
{%- if m.thought and m.number > last.asked %}
{{- "<think>\n" + m.thought + "\n</think>\n\n" }}
{%- endif %}
{{- m.content }}
{%- endif %}{{ "<|im_end|>\n" }}
{%- endfor %}
{%- if begin %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
_TEMPLATE = Environment().from_string(TEMPLATE)  # noqa: S701  # no HTML
WORDS = (
    *("always", "never", "read", "write", "check", "the", "a", "file", "test", "line", "name"),
    *("value", "first", "then", "before", "after", "every", "result", "change", "small", "whole"),
    *("error", "message", "call", "list", "again", "other", "only", "where", "which", "keep"),
)


def render(messages: Sequence[Message], begin: bool = False) -> str:
    """The text of messages, with an answer begun or not."""
    numbered = [{**message, "number": i} for i, message in enumerate(messages)]
    return _TEMPLATE.render(messages=numbered, begin=begin)


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count)).capitalize() + "."


def system_prompt(encode: Encode, tokens: int, draw: random.Random) -> str:
    """Tools as JSON, and rules, until there are so many tokens."""
    lines = ["You are a coding agent. You may call these tools:"]
    for name in ("read_file", "search", "run_tests", "write_file", "list_files"):
        fields = {w: {"type": "string", "description": _words(draw, 12)} for w in ("path", "text")}
        lines.append(json.dumps({"name": name, "parameters": {"properties": fields}}))
    while len(encode("\n".join(lines))) < tokens:
        lines.append(f"{len(lines)}. {_words(draw, draw.randrange(15, 40))}")
    return "\n".join(lines)


def transcript(
    system: str, turns: int, draw: random.Random, size: int = 300
) -> Iterator[tuple[list[Message], Message]]:
    """What each turn was asked, the whole conversation so far, and what was answered.

    size: words of a tool's result, about; thoughts are shorter.
    """
    messages: list[Message] = [{"role": "system", "content": system}]
    for turn in range(turns):
        asked, called = KINDS["tools"][1](draw)
        if turn % QUESTION_EVERY == 0:
            messages.append({"role": "user", "content": f"{asked} {_words(draw, 30)}"})
        else:
            told = [_words(draw, 12) for _ in range(draw.randrange(size // 24, size // 8))]
            messages.append({"role": "tool", "content": "\n".join(told)})
        thought = _words(draw, draw.randrange(size // 15, size // 4))
        answer = {"role": "assistant", "content": called, "thought": thought}
        if (turn + 1) % QUESTION_EVERY == 0:
            answer["content"] = _words(draw, size // 5)
        yield list(messages), answer
        messages.append(answer)


class Recorded(TargetSampling):
    """The model says what was recorded."""

    remembers, needs_history = False, True

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = iter(tokens)

    def accept(self, verdict: Any, state: Any) -> Accepted:
        return Accepted(verdict.tree, (0,), next(self._left))


@dataclass
class Row:
    """A turn: tokens of its prompt, those that were read before at the same place, and reused."""

    name: str
    tokens: int
    known: int
    reused: int

    @property
    def again(self) -> int:
        return self.known - self.reused


@dataclass
class Replay:
    """Turns of one agent, one after another; what was read is kept as the settings say."""

    pair: Pair
    encode: Encode
    folder: Path | None = None  # where prefixes go
    gigabytes: float = 1.0  # of prefixes in memory
    marks_ends: bool = True
    rows: list[Row] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)  # by all turns

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Know only what is on the disk."""
        if self.rows and self.folder is not None:
            self.prefixes.save()
        files = None if self.folder is None else PrefixFiles(self.folder, 10**11, worth=16)
        self.prefixes = PrefixCache(int(self.gigabytes * 1e9), files)
        self.scheduler = Scheduler(self.pair, 10**12, prefixes=self.prefixes)

    def turn(self, name: str, messages: Sequence[Message], answer: Message) -> Row:
        """Read a prompt, and say what was said."""

        def tokens_of(some: Sequence[Any]) -> Sequence[int]:
            return self.encode(render(some))

        text = render(messages, begin=True)
        tokens = tuple(self.encode(text))
        whole = render([*messages, answer]).removesuffix("\n")
        said = [*self.encode(whole[len(text) :])]
        ends = ends_of_turns(tokens, messages, tokens_of) if self.marks_ends else ()
        config = DecodeConfig(PLAIN, max_tokens=len(said), lookup=False)
        sequence = self.scheduler.submit(Prompt(tokens, ends=ends), config)
        sequence.rule = Recorded(said)
        while len(self.scheduler):
            for _, told in self.scheduler.step():
                if isinstance(told, Exception):
                    raise told
        self.scheduler.keep_finished()
        known = max((shared_length(tokens[:-1], each) for each in self.read), default=0)
        self.read.append([*tokens, *said[:-1]])
        row = Row(name, len(tokens), known, sequence.statistics.reused_tokens)
        self.rows.append(row)
        return row

    def all_turns(self, turns: int, system: int, restart: int = 0, size: int = 300) -> list[Row]:
        """The rows of an agent, and two that branch off. restart: before which turn, 0 for none."""
        draw = random.Random(7)
        prompt = system_prompt(self.encode, system, draw)
        messages: list[Message] = []
        answer: Message = {}
        for i, (messages, answer) in enumerate(transcript(prompt, turns, draw, size)):
            if i + 1 == restart:
                self.restart()
            self.turn(str(i + 1), messages, answer)
        (other, its), *_ = transcript(prompt, 1, random.Random(8), size)
        self.turn("another agent", other, its)
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        again = {"role": "user", "content": _words(draw, 30)}
        self.turn("the last question, changed", [*messages[:last], again], answer)
        return self.rows


def share_again(rows: Sequence[Row]) -> float:
    """Tokens that were read again over all, after the first turn."""
    return sum(row.again for row in rows[1:]) / sum(row.tokens for row in rows[1:])


def random_pair(kind: str, tokenizer: Any, layers: int = 8, width: int = 256) -> Pair:
    """A small model with random weights: dense as Llama, or hybrid as Qwen3.5."""
    mx.random.seed(0)
    common = {
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128),
        "head_dim": 64, "rms_norm_eps": 1e-6, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    if kind == "dense":
        model: Any = llama.Model(llama.ModelArgs(model_type="llama", rope_theta=1e6, **common))
    else:
        nets = {
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
            "rope_parameters": {"type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        }  # fmt: skip
        config = {"model_type": "qwen3_5", "text_config": {**common, **nets, "num_experts": 0}}
        model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return Pair(Target(model, 40960, f"random {kind}"), tokenizer)


def pair_of(kind: str) -> Pair:
    if kind == "default":
        return load_pair(PairConfig())
    return random_pair(kind, load_target().tokenizer)


def turns(asked: argparse.Namespace) -> None:
    pair = pair_of(asked.kind)

    def encode(text: str) -> Sequence[int]:
        return pair.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    with TemporaryDirectory() as folder:
        replay = Replay(pair, encode, Path(folder), asked.prefix_gb, not asked.no_ends)
        rows = replay.all_turns(asked.turns, asked.system, asked.restart, asked.size)
    print("| turn | tokens | read before | read again |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.name} | {row.tokens} | {row.known} | {row.again} |")
    own = rows[: asked.turns]
    print(f"\nread again after the first turn: {share_again(own):.2%} of {len(own)} turns' tokens")


@dataclass
class Way:
    """A way to answer: seconds to the first token, and tokens per second behind it."""

    name: str
    answer: Callable[[Sequence[int], int], Iterator[int]]  # tokens as they come
    first: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)

    def run(self, prompt: Sequence[int], tokens: int) -> None:
        begin = time.perf_counter()
        came = [(time.perf_counter(), count) for count in self.answer(prompt, tokens)]
        self.first.append(came[0][0] - begin)
        said = sum(count for _, count in came[1:])
        self.speed.append(said / max(1e-9, came[-1][0] - came[0][0]))


def ways_of(pair: Pair) -> list[Way]:
    """mlx-lm's, plain decoding and `auto`, each with caches of its own."""

    def stock(prompt: Sequence[int], tokens: int) -> Iterator[int]:
        model, tokenizer = pair.target.model, pair.tokenizer
        for _ in stream_generate(model, tokenizer, [*prompt], max_tokens=tokens):
            yield 1

    def ours(method: str) -> Callable[[Sequence[int], int], Iterator[int]]:
        def answer(prompt: Sequence[int], tokens: int) -> Iterator[int]:
            config = DecodeConfig(method, max_tokens=tokens)
            for delta in Session(pair, config).stream(prompt):
                yield len(delta.tokens)

        return answer

    return [Way("mlx-lm", stock), Way(PLAIN, ours(PLAIN)), Way("auto", ours("auto"))]


def times(asked: argparse.Namespace) -> None:
    pair = pair_of(asked.kind)
    pair.calibrate()
    draw = random.Random(9)
    print("| tokens | way | seconds to the first token | tokens per second |")
    print("| --- | --- | --- | --- |", flush=True)
    for length in map(int, asked.context.split(",")):
        text = system_prompt(pair.tokenizer.encode, length, draw)
        prompt = pair.tokenizer.encode(text)[:length]
        ways = ways_of(pair)
        for i in range(asked.repeat):
            for way in ways[i % 3 :] + ways[: i % 3]:
                way.run(prompt, asked.max_tokens)
        for way in ways:
            told = f"{median(way.first):.2f} | {median(way.speed):.1f}"
            print(f"| {length} | {way.name} | {told} |", flush=True)


def limit(asked: argparse.Namespace) -> None:
    pair = pair_of(asked.kind)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    most = int(status["VmData"].split()[0]) * 1024 + asked.megabytes * 10**6
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    scheduler = Scheduler(pair, for_caches(), prefixes=PrefixCache(10**9))
    print(f"{amount(available_memory())} can be had, {amount(for_caches())} for caches")
    draw, became = random.Random(3), dict[str, str]()
    lengths = [500] * 8 + [*map(int, asked.context.split(","))]
    named: dict[Any, str] = {}
    for i, length in enumerate(lengths):
        prompt = [draw.randrange(1000, 40000) for _ in range(length)]
        try:
            config = DecodeConfig(asked.method, max_tokens=asked.max_tokens)
            named[scheduler.submit(prompt, config)] = f"{i + 1}, {length} tokens"
        except DFlashError as error:
            became[f"{i + 1}, {length} tokens"] = f"refused: {error}"
    while len(scheduler):
        for each, said in scheduler.step():
            ended = said if isinstance(said, Exception) else said.finish_reason
            became |= {named[each]: f"ended: {ended}"} if ended else {}
        scheduler.keep_finished()
    print("\n".join(f"{name}: {how}" for name, how in sorted(became.items())))
    kept = amount(scheduler.prefixes.nbytes) if scheduler.prefixes else "nothing"
    print(f"{amount(mx.get_peak_memory())} of arrays at most, {kept} kept")


def main(argv: Sequence[str]) -> None:
    result = cli.Parser(prog="long_prompts.py", description="What long prompts take.")
    result.add_argument("what", choices=("turns", "times", "limit"))
    result.add_argument("--kind", choices=("dense", "hybrid", "default"), default="dense")
    result.add_argument("--turns", type=int, default=20)
    result.add_argument("--system", type=int, default=6000, help="tokens of the system prompt")
    result.add_argument("--size", type=int, default=300, help="words of a tool's result, about")
    result.add_argument("--restart", type=int, default=0, help="before which turn, from 1 on")
    result.add_argument("--prefix-gb", type=float, default=1.0)
    result.add_argument("--no-ends", action="store_true", help="as if no ends of turns were known")
    result.add_argument("--context", default="16384,32768", help="tokens of the prompts")
    result.add_argument("--max-tokens", type=int, default=64)
    result.add_argument("--method", default=PLAIN, help="of the answers of limit")
    result.add_argument("--megabytes", type=int, default=900)
    result.add_argument("--repeat", type=int, default=3)
    asked = result.parse_args(argv)
    {"turns": turns, "times": times, "limit": limit}[asked.what](asked)


if __name__ == "__main__":
    cli.run(main, "long_prompts.py")
