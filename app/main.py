"""`dflash-chat`: the chat in a terminal, or one answer with `--prompt` or from a pipe."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version

from dflash_chat.options import ChatConfig
from dflash_mlx.cli import options as cli
from dflash_mlx.client import (
    DecodeConfig,
    DFlashError,
    PairConfig,
    PrefixConfig,
    SamplingConfig,
    Session,
    check_given,
    check_prompt,
    earlier_texts,
    parse,
    prefix_cache,
    prompt_tokens,
)

PROGRAM = "dflash-chat"
COMMANDS = ("models", "clean")  # of the disk


def main() -> None:
    """The console script."""
    cli.run(run, PROGRAM, mode=cli.RankMode.FOLLOW)


def run(argv: Sequence[str], reader: cli.TargetReader = cli.WHOLE) -> None:
    """Answer `--prompt`, or piped standard input, or open the chat; or clear up the disk."""
    if argv[:1] in (["models"], ["clean"]):
        from dflash_mlx.cli import disk

        {"models": disk.models, "clean": disk.clean}[argv[0]](argv[1:])
        return
    arguments = parse(_parser(), argv)
    pair = cli.read_pair_config(arguments)
    # what the default model's makers advise is known: greedy decoding
    config = cli.read_decode_config(arguments, may_sample=pair.model is not None)
    chat = cli.read_options(arguments, ChatConfig)
    prefixes = cli.read_options(arguments, PrefixConfig)
    prompt = _one_prompt(arguments)
    if prompt is None:
        _talk(pair, config, chat, prefixes, arguments)
    else:
        _check_one_prompt(arguments)
        _answer(arguments, config, chat, prompt, reader)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog=PROGRAM,
        description="Chat with a language model, fast, on your own machine. dflash-chat models and "
        "dflash-chat clean list, fetch and remove what lies on the disk.",
    )
    parser.add_argument("question", nargs="?", help="ask this, in the chat or, piped, for its text")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version(PROGRAM)}")
    parser.add_argument("--prompt", help="answer this and leave, - reads standard input")
    cli.add_options(parser, ChatConfig, PairConfig, PrefixConfig, DecodeConfig, SamplingConfig)
    return parser


def _one_prompt(arguments: argparse.Namespace) -> str | None:
    asked: str | None = arguments.question
    if asked is not None:
        if arguments.prompt is not None:
            raise DFlashError("there are two questions", "leave --prompt out, or the other one")
        if near := get_close_matches(asked, COMMANDS, n=1, cutoff=0.75):
            what = f"there is no command {asked}"
            raise DFlashError(what, f"did you mean {PROGRAM} {near[0]}? --prompt {asked} asks it")
        if sys.stdin.isatty() and sys.stdout.isatty():
            return None
        piped = "" if sys.stdin.isatty() else cli.read_stdin()
        return f"{asked}\n\n{piped}" if piped.strip() else asked
    if arguments.prompt == "-" or (arguments.prompt is None and not sys.stdin.isatty()):
        return cli.read_stdin()
    prompt: str | None = arguments.prompt
    return prompt


def _check_one_prompt(arguments: argparse.Namespace) -> None:
    """Raise DFlashError for an option of the screen, where there will be none."""
    for name in (f.name for c in (ChatConfig, PrefixConfig) for f in fields(c)):
        if name not in ("system", "config") and name in vars(arguments):
            what = f"{name} is for the chat on a terminal, and this is a single answer"
            raise DFlashError(what, "leave it out, or start without --prompt and a pipe", name)


def _answer(
    arguments: argparse.Namespace,
    config: DecodeConfig,
    chat: ChatConfig,
    prompt: str,
    reader: cli.TargetReader,
) -> None:
    check_prompt(prompt, chat.system, raw=False)
    pair = cli.open_pair(arguments, config, reader=reader)
    config = arguments.user.advise(config, pair.advised)
    tokens = prompt_tokens(pair.tokenizer, prompt, chat.system, template=pair.template)
    cli.print_stream(Session(pair, config).stream(tokens))


def _talk(
    pair_config: PairConfig,
    config: DecodeConfig,
    chat: ChatConfig,
    prefixes: PrefixConfig,
    arguments: argparse.Namespace,
) -> None:
    if question := arguments.question or "":
        check_prompt(question, chat.system, raw=False)
    check_given(pair_config, config.method)
    cli.check_alone("the chat on a terminal")
    for name, stream in (("output", sys.stdout), ("error", sys.stderr)):
        if not stream.isatty():
            raise DFlashError(
                f"standard {name} is not a terminal, which the chat needs",
                "give a question with --prompt, or leave the redirection out",
            )
    if os.environ.get("TERM") in ("dumb", "unknown"):
        what = f"this terminal (TERM={os.environ['TERM']}) cannot show a full screen"
        raise DFlashError(what, "give a question with --prompt, or start in another terminal")
    from dflash_chat.backend import Backend
    from dflash_chat.chat_app import ChatApp
    from dflash_chat.keymap import rebind
    from dflash_chat.terminal import caught_stderr, follow_background

    backend = Backend(partial(prefix_cache, prefixes), earlier_texts(prefixes))
    app, output = ChatApp(pair_config, config, chat, backend), deque[str](maxlen=200)
    app.first, app.user = question, arguments.user
    with app.user.telling():
        rebind(app, chat.keys)
    if chat.theme == "auto":
        follow_background(app, os.environ.get("COLORFGBG", ""))

    def read(text: str) -> None:
        output.append(text)
        app.read_output(text)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio replaces no other one
    with caught_stderr(read):
        app.run()
    if app.return_code:  # Textual has written its traceback, which goes into the log
        raise RuntimeError("the chat stopped\n" + "".join(output))
    if app.saved_as:
        again = os.environ.get("DFLASH_CHAT_AS", PROGRAM)  # as it was typed
        cli.say(f"Saved as “{app.saved_as}”; {again} --resume goes on.")
    for problem in filter(None, (app.left, backend.problem)):
        cli.say(f"{PROGRAM}: {problem}")
    cli.end_program(128 + signal.SIGINT if app.interrupted else cli.BAD_INPUT if app.left else 0)
