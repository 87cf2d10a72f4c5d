"""`dflash-chat`: a streaming prompt loop, or one answer with `--prompt`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from threading import Event

from dflash_mlx import (
    DecodeConfig,
    DFlashError,
    PairConfig,
    SamplingConfig,
    Session,
    TextDelta,
    cli,
)
from dflash_mlx.chat import Message, Prompt, check_prompt, prompt_tokens
from dflash_mlx.load import load_pair

PROGRAM = "dflash-chat"


def main() -> None:
    """The console script."""
    cli.run(run, PROGRAM)


def run(argv: Sequence[str]) -> None:
    """Answer `--prompt`, or piped standard input, or talk until the user leaves."""
    arguments = _parser().parse_args(argv)
    config = cli.read_decode_config(arguments)
    prompt = _one_prompt(arguments)
    if prompt is not None:
        check_prompt(prompt, arguments.system, raw=False)
    pair = load_pair(cli.read_pair_config(arguments), config)
    session = Session(pair, config)
    if prompt is not None:
        cli.print_stream(_deltas(session, prompt, arguments.system))
    else:
        _talk(session, arguments.system)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog=PROGRAM, description="Chat with a language model, fast, on your own machine."
    )
    parser.add_argument("--prompt", help="answer this and leave, - reads standard input")
    parser.add_argument("--system", help="system prompt")
    cli.add_options(parser, PairConfig, DecodeConfig, SamplingConfig)
    return parser


def _one_prompt(arguments: argparse.Namespace) -> str | None:
    """The prompt when there is just one: given, or piped in."""
    if arguments.prompt == "-" or (arguments.prompt is None and not sys.stdin.isatty()):
        return cli.read_stdin()
    prompt: str | None = arguments.prompt
    return prompt


def _talk(session: Session, system: str | None) -> None:
    """Ask, answer, remember."""
    print(f"{session.pair.target.name}. Ctrl+C stops an answer, /new begins anew, /quit leaves.")
    messages: list[Message] = []
    while (question := _ask()) not in (None, "/quit"):
        if question == "/new":
            messages.clear()
        if question in ("", "/new"):
            continue
        messages.append({"role": "user", "content": question})
        try:
            answer = cli.print_stream(_until_interrupted(_deltas(session, messages, system)))
        except DFlashError as error:
            print(error, file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _deltas(session: Session, prompt: Prompt, system: str | None) -> Iterator[TextDelta]:
    return session.stream(prompt_tokens(session.pair.tokenizer, prompt, system, raw=False))


def _until_interrupted(deltas: Iterator[TextDelta]) -> Iterator[TextDelta]:
    """Let Ctrl+C end the answer after the round that is running, so that caches stay whole."""
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        for delta in deltas:
            yield delta
            if interrupted.is_set():
                return
    finally:
        signal.signal(signal.SIGINT, before)


def _ask() -> str | None:
    """A line from the user, None at the end of input."""
    try:
        return input("\nyou> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    except UnicodeDecodeError as error:
        print(f"that was not UTF-8 ({error}); type it again", file=sys.stderr)
        return ""
