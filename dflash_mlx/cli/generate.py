"""`python -m dflash_mlx.generate`: one answer on stdout, statistics on stderr."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.user_config import FaceConfig, parse
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig, StructureConfig
from dflash_mlx.engine.delta import collect
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import check_prompt, prompt_tokens, read_messages

PROGRAM = "dflash_mlx.generate"


def main(argv: Sequence[str], reader: cli.TargetReader = cli.WHOLE) -> None:
    """Answer one prompt. Raises DFlashError for bad input."""
    arguments = parse(parser(), argv)
    if arguments.raw or arguments.messages is not None:
        arguments.kept.pop("system", None)  # which plain text cannot have, and a conversation has
    system = cli.read_options(arguments, FaceConfig).system
    config = cli.read_decode_config(arguments)
    prompt = cli.read_stdin(arguments.raw) if arguments.prompt == "-" else arguments.prompt
    if arguments.messages is not None:
        prompt = read_messages(arguments.messages)
    check_prompt(prompt, system, arguments.raw)
    pair = cli.open_pair(arguments, config, reader=reader)
    tokens = prompt_tokens(pair.tokenizer, prompt, system, arguments.raw, pair.template)
    deltas = Session(pair, config).stream(tokens)
    if arguments.json:
        answer = collect(deltas)
        told = {"text": answer.text, "tokens": answer.tokens, "finish_reason": answer.finish_reason}
        print(json.dumps({**told, **answer.statistics.as_dict()}, ensure_ascii=False))
    else:
        cli.print_stream(deltas)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Answer one prompt with speculative decoding.")
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to answer, - reads standard input")
    source.add_argument("--messages", type=Path, help="a JSON file with the conversation so far")
    result.add_argument(
        "--raw", action="store_true", help="send the text as it is, without a chat template"
    )
    result.add_argument("--json", action="store_true", help="print one JSON object at the end")
    cli.add_options(result, FaceConfig, without=("theme", "adapt"))
    cli.add_options(result, PairConfig, DecodeConfig, SamplingConfig, StructureConfig)
    return result
