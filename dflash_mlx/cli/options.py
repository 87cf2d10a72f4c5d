"""What the command lines share: options made from settings, and errors as sentences."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dflash_mlx.core.config import AUTO, DecodeConfig, PairConfig, SamplingConfig, StructureConfig
from dflash_mlx.core.config import option as option
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Given, values_given
from dflash_mlx.core.text import counted
from dflash_mlx.drafters.methods import check_given, choices, own_options, why_auto
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.grammar import check_structure
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.read import WHOLE as WHOLE
from dflash_mlx.models.read import TargetReader as TargetReader
from dflash_mlx.ranks import RankMode as RankMode
from dflash_mlx.ranks import check_alone as check_alone
from dflash_mlx.ranks import launched
from dflash_mlx.system import terminal
from dflash_mlx.system.machine import check_own_package

_Settings = TypeVar("_Settings")

BAD_INPUT = 2

_NO_NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: (.+)")  # argparse's words
_NO_CHOICE = re.compile(r"argument (\S+): invalid choice: (.+) \(choose from (.+)\)")
_ENDINGS = {"length": "cut at --max-tokens", "context": "cut: the context is full"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence on stderr, exit code 2."""

    def error(self, message: str) -> NoReturn:
        if wrong := _NO_NUMBER.match(message):
            option, kind, value = wrong.groups()
            message = f"{option} is {value}, not a {'whole ' * (kind == 'int')}number"
        elif wrong := _NO_CHOICE.match(message):
            option, value, offered = wrong.groups()
            message = f"{option} is {value}; choose one of " + offered.replace("'", "")
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see --help\n")


def add_options(
    parser: argparse.ArgumentParser, *settings: type, without: Sequence[str] = ()
) -> None:
    """Add an option for every field with a help text; `DecodeConfig` brings the methods' own."""
    if DecodeConfig in settings:
        settings = (*settings, own_options())
    for field in (field for each in settings for field in fields(each)):
        if "help" in field.metadata and field.name not in without:
            more = {"choices": choices()} if field.name == "method" else {}
            shown = "" if field.default in (None, ()) else f" (default: {field.default})"
            help = field.metadata["help"] + shown
            parser.add_argument(
                option_name(field.name),
                default=argparse.SUPPRESS,
                help=help.replace("%", "%%"),  # which argparse would fill in
                **{**field.metadata["argparse"], **more},
            )


def read_options(arguments: argparse.Namespace, settings_class: type[_Settings]) -> _Settings:
    """The settings that the command line gave, or the user's file; defaults elsewhere."""
    given = _given(arguments)
    names = {f.name for f in fields(settings_class)} & given.keys()  # type: ignore[arg-type]
    values = {name: given[name] for name in names}
    return settings_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**getattr(arguments, "kept", {}), **vars(arguments)}


def read_decode_config(arguments: argparse.Namespace, may_sample: bool = False) -> DecodeConfig:
    """Decoding and sampling settings together, and what an answer has to be.

    may_sample: whether a temperature that was not given may come from the model.
    """
    given = _given(arguments)
    sampling = read_options(arguments, SamplingConfig)
    structure = read_options(arguments, StructureConfig)
    config = read_options(arguments, DecodeConfig)
    names = [f.name for f in fields(own_options())]
    own = Given(tuple((n, given[n]) for n in names if given.get(n) is not None))
    config = replace(config, sampling=sampling, structure=structure, options=own)
    check_given(config)
    check_structure(structure)
    if not may_sample or "temperature" in vars(arguments):
        _check_greedy(config, vars(arguments))
    return config


def _check_greedy(config: DecodeConfig, typed: Collection[str]) -> None:
    if config.sampling.temperature > 0:
        return
    given = values_given(config.sampling)
    if config.acceptance == "reject":
        given["acceptance"] = "reject"
    for name in ("top_p", "top_k", "min_p", "acceptance"):
        if name in given and name in typed:
            what = f"{name} is {given[name]}, but at temperature 0 nothing is sampled"
            raise DFlashError(what, "leave it out, or give a --temperature above 0", name)


def read_pair_config(arguments: argparse.Namespace) -> PairConfig:
    """Which pair to load, and how."""
    return read_options(arguments, PairConfig)


def open_pair(
    arguments: argparse.Namespace, *uses: DecodeConfig, reader: TargetReader = WHOLE
) -> Pair:
    """The pair that the command line names, for `uses`; stderr says what loading had to change."""
    config = read_pair_config(arguments)
    check_given(config, *(use.method for use in uses))
    try:
        pair = load_pair(config, *uses, reader=reader)
    except DFlashError as error:
        raise arguments.user.blamed(error, config.model) if "user" in arguments else error from None
    notes = [*filter(None, [getattr(arguments, "problem", "")]), *pair.notes]
    if pair.fallback and any(use.method == AUTO for use in uses):
        notes.append(f"{pair.fallback}; --drafter names a drafter")
    notes += [why for use in uses if (why := why_auto(use, pair.capabilities))]
    for note in notes:
        say(note)
    return pair


def run(
    main: Callable[..., None],
    program: str,
    leave: Callable[[int], NoReturn] = sys.exit,
    mode: RankMode = RankMode.ALONE,
) -> NoReturn:
    """Run a command line and leave: 0, 2 for bad input, 130 for Ctrl+C, 1 for a fault of ours.

    Every failure is one sentence on stderr; a fault's traceback goes to a file that it names.
    main: takes the words; what several ranks give it besides is in `ranks/loading.py`. leave: is
    given the code; `end_program` where another thread may still work, or much would be freed.
    """
    terminal.open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    terminal.guard_terminal()
    interruptible = False
    try:
        interruptible = terminal.raise_on_interrupt()
        if launched():
            from dflash_mlx.ranks.loading import take_part

            main, leave = take_part(main, program, mode), end_program
        code = _outcome(main, program)
    except KeyboardInterrupt:
        say("")
        code = terminal.INTERRUPTED
    if interruptible:
        terminal.leave_on_interrupt()
    leave(code)


def end_program(code: int) -> NoReturn:
    """Leave without waiting for other threads: a pass that still runs would abort Python's end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _outcome(main: Callable[[Sequence[str]], None], program: str) -> int:
    try:
        check_own_package()
        main(sys.argv[1:])
        sys.stdout.flush()
        return 0
    except Exception as error:
        if terminal.is_behind(error):
            raise KeyboardInterrupt from None
        return _failed(error, program)


def _failed(error: Exception, program: str) -> int:
    if isinstance(error, DFlashError):
        say(f"{program}: {error.told(option_name)}")
        return BAD_INPUT
    if isinstance(error, BrokenPipeError):  # the reader has left, as `head` does; nobody listens
        _drop_output()
        return 0
    if isinstance(error, OSError):  # a full disk behind stdout, say; a log would not fit there
        _drop_output()
        reason = error.strerror or str(error)
        what = f"{error.filename}: {reason}" if error.filename else reason
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        say(f"{program}: {what}; {'free some space, or ' * full}write elsewhere")
        return BAD_INPUT
    what = f"something went wrong ({in_short(error)}); if it does so again"
    say(f"{program}: {what}, report it with {keep_traceback(error)}")
    return 1


def option_name(setting: str) -> str:
    """What a command line calls a setting."""
    return "--" + setting.replace("_", "-")


def say(text: str) -> None:
    """Print a sentence on stderr, to a terminal without what it would obey."""
    print(terminal.for_terminal(text) if sys.stderr.isatty() else text, file=sys.stderr)


def _drop_output() -> None:
    # Python would fail once more when it flushes what could not be written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_short(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def keep_traceback(error: Exception) -> str:
    """The file that now holds the traceback, or other words where none can be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="dflash-chat-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            log.write("".join(traceback.format_exception(error)))
    except OSError:
        return "what you did"
    return log.name


def check_output(file: Path | None) -> None:
    """Raise DFlashError for a file that could not be written, before the work it would hold."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        raise DFlashError(f"{file} is a folder or in none", "name a file in a folder that exists")
    try:
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        what = f"nothing can be written into {file.parent} ({error.strerror or error})"
        raise DFlashError(what, "name another folder") from None


def read_stdin(raw: bool = False) -> str:
    """All of standard input as UTF-8, else DFlashError; unless raw, without its last line break."""
    check_alone("standard input")  # mlx.launch gives every rank one that never ends
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("" if raw else "\n")
    except UnicodeDecodeError as error:
        what = f"standard input is not UTF-8: byte {data[error.start]:#04x} at {error.start}"
        raise DFlashError(what, "convert it first, with iconv for example") from None


def print_stream(deltas: Iterator[Delta]) -> None:
    """Text on stdout as it comes, then a line of statistics on stderr."""
    delta = None
    try:
        for delta in deltas:
            print(delta.text, end="", flush=True)
    finally:
        if delta is not None:
            print(flush=True)
    if delta is not None:
        print(summary(delta), file=sys.stderr)


def summary(delta: Delta) -> str:
    """One line for people, after the last delta."""
    statistics = delta.statistics
    parts = [
        f"{statistics.tokens_per_second:.1f} tok/s",
        f"{counted(statistics.generated_tokens, 'token')} in {statistics.decode_seconds:.2f} s",
        f"first after {statistics.time_to_first_token:.2f} s",
    ]
    if statistics.drafted:
        parts.append(f"{statistics.mean_accepted:.2f} tokens/round")
        parts.append(f"accepted {statistics.acceptance_rate:.0%}")
    if (ties := statistics.near_ties) is not None:
        parts.append(f"{ties.checks} near-ties in {ties.seconds:.2f} s, {ties.changed} changed")
    if delta.finish_reason in _ENDINGS:
        parts.append(_ENDINGS[delta.finish_reason])
    return " | ".join(parts)
