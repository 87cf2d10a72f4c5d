"""What the command lines share: options made from settings, and errors as sentences."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from dflash_mlx.core.config import AUTO, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.config import option as option
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import check_given, choices, why_auto
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.stream import TextDelta

_Settings = TypeVar("_Settings")

BAD_INPUT = 2
INTERRUPTED = 130

_ENDINGS = {"length": "cut at --max-tokens", "context": "cut: the context is full"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence on stderr, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence and leave."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see --help\n")


def add_options(
    parser: argparse.ArgumentParser, *settings: type, without: Sequence[str] = ()
) -> None:
    """Add an option for every field of the settings classes that has a help text."""
    for settings_class in settings:
        for field in fields(settings_class):
            if "help" in field.metadata and field.name not in without:
                more = {"choices": choices()} if field.name == "method" else {}
                shown = "" if field.default in (None, ()) else f" (default: {field.default})"
                parser.add_argument(
                    "--" + field.name.replace("_", "-"),
                    default=argparse.SUPPRESS,
                    help=field.metadata["help"] + shown,
                    **{**field.metadata["argparse"], **more},
                )


def read_options(arguments: argparse.Namespace, settings_class: type[_Settings]) -> _Settings:
    """The settings that the command line gave, defaults elsewhere."""
    given = vars(arguments)
    names = {f.name for f in fields(settings_class)} & given.keys()  # type: ignore[arg-type]
    values = {name: given[name] for name in names}
    return settings_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def read_decode_config(arguments: argparse.Namespace) -> DecodeConfig:
    """Decoding and sampling settings together."""
    sampling = read_options(arguments, SamplingConfig)
    config = replace(read_options(arguments, DecodeConfig), sampling=sampling)
    check_given(config)
    return config


def read_pair_config(arguments: argparse.Namespace) -> PairConfig:
    """Which pair to load."""
    return read_options(arguments, PairConfig)


def open_pair(arguments: argparse.Namespace, *uses: DecodeConfig) -> Pair:
    """The pair that the command line names, for `uses`; stderr says what loading had to change."""
    pair = load_pair(read_pair_config(arguments), *uses)
    notes = list(pair.notes)
    if pair.fallback and any(use.method == AUTO for use in uses):
        notes.append(f"{pair.fallback}; --drafter names a drafter")
    notes += [why for use in uses if (why := why_auto(use, pair.means))]
    for note in notes:
        print(note, file=sys.stderr)
    return pair


def run(main: Callable[[Sequence[str]], None], program: str) -> NoReturn:
    """Run a command line and leave: 0, 2 for bad input, 130 for Ctrl+C, 1 for a fault of ours.

    Every failure is one sentence on stderr; a fault's traceback goes to a file that it names.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    code = 0
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except DFlashError as error:
        code = _say(f"{program}: {error}", BAD_INPUT)
    except KeyboardInterrupt:
        code = _say("", INTERRUPTED)
    except BrokenPipeError:  # the reader has left, as `head` does; nobody is to be told
        _drop_output()
    except OSError as error:  # a full disk behind stdout, say; a log would not fit there either
        _drop_output()
        code = _say(f"{program}: {error}; free some space or write elsewhere", BAD_INPUT)
    except Exception as error:
        what = f"something went wrong ({in_short(error)}); if it does so again"
        code = _say(f"{program}: {what}, report it with {keep_traceback(error)}", 1)
    sys.exit(code)


def _drop_output() -> None:
    """Keep Python from failing once more when it flushes what could not be written."""
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


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def check_output(file: Path | None) -> None:
    """Raise DFlashError for a file that could not be written, before the work it would hold."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise DFlashError(f"{file} is a folder or in none", "name a file in a folder that exists")


def read_stdin() -> str:
    """All of standard input as UTF-8; DFlashError when it is something else."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DFlashError(
            f"standard input is not UTF-8: byte {data[error.start]:#04x} at position {error.start}",
            "convert it first, with iconv for example",
        ) from None


def print_stream(deltas: Iterator[TextDelta]) -> None:
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


def summary(delta: TextDelta) -> str:
    """One line for people, after the last delta."""
    statistics = delta.statistics
    parts = [
        f"{statistics.tokens_per_second:.1f} tok/s",
        f"{statistics.generated_tokens} tokens in {statistics.decode_seconds:.2f} s",
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
