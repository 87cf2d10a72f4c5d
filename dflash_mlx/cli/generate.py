"""`python -m dflash_mlx.generate`: one answer on stdout, statistics on stderr."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.user_config import FaceConfig, parse
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.delta import collect
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import Conversation, check_prompt, prompt_of, read_messages
from dflash_mlx.vision.pictures import Picture, open_picture
from dflash_mlx.vision.remote import fetch, is_address

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
    if arguments.image:
        prompt = with_pictures(prompt, arguments)
    pair = cli.open_pair(arguments, config, reader=reader)
    deltas = Session(pair, config).stream(prompt_of(pair, prompt, system, arguments.raw))
    if arguments.json:
        answer = collect(deltas)
        told = {"text": answer.text, "tokens": answer.tokens, "finish_reason": answer.finish_reason}
        print(json.dumps({**told, **answer.statistics.as_dict()}, ensure_ascii=False))
    else:
        cli.print_stream(deltas)


def with_pictures(prompt: Conversation, arguments: argparse.Namespace) -> Conversation:
    """The conversation with the pictures before its last words; DFlashError for others' files."""
    if arguments.raw:
        raise DFlashError("raw works on plain text alone", "leave it out, or --image", "raw")
    pictures = [picture_at(each, arguments.allow_image_urls) for each in arguments.image]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    shown = [{"type": "image", "picture": each} for each in pictures]
    last = messages.pop()
    words = {"type": "text", "text": last["content"]}
    return [*messages, {**last, "content": [*shown, words]}]


def picture_at(place: str, allow_urls: bool) -> Picture:
    """The picture in a file, or at an address where these are allowed."""
    if not is_address(place):
        return open_picture(Path(place), place)
    if not allow_urls:
        what = f"image is {place[:200]!r}, an address, and nothing is read from the internet"
        raise DFlashError(what, "save the picture, or add --allow-image-urls", "image")
    return open_picture(fetch(place), place[:200])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Answer one prompt with speculative decoding.")
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to answer, - reads standard input")
    source.add_argument("--messages", type=Path, help="a JSON file with the conversation so far")
    result.add_argument(
        "--raw", action="store_true", help="send the text as it is, without a chat template"
    )
    result.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="a picture that the question is about, for models that see; may be repeated",
    )
    result.add_argument(
        "--allow-image-urls",
        action="store_true",
        help="let --image be an https address, which is then read from the internet",
    )
    result.add_argument("--json", action="store_true", help="print one JSON object at the end")
    cli.add_options(result, FaceConfig, without=("theme", "adapt"))
    cli.add_options(result, PairConfig, DecodeConfig, SamplingConfig, StructureConfig)
    return result
