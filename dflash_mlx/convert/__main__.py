"""`python -m dflash_mlx.convert SRC DST`: a published checkpoint becomes an MLX folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dflash_mlx.cli import options as cli
from dflash_mlx.convert.conversion import ConvertConfig, plan
from dflash_mlx.convert.plan import check_spaces, convert, find_part, report, resolve_destination
from dflash_mlx.core.errors import DFlashError

PROGRAM = "dflash_mlx.convert"


def main(argv: Sequence[str]) -> None:
    """Convert, or say what would be done. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    try:
        _run(arguments)
    except DFlashError as error:  # of checks that name the options of other programs
        step = error.next_step.replace("with --drafter", "as SRC").replace("with --model", "as SRC")
        raise DFlashError(
            error.what, step.replace(", or --method none", ""), error.setting
        ) from error


def _run(arguments: argparse.Namespace) -> None:
    settings = cli.read_options(arguments, ConvertConfig)
    destination = resolve_destination(arguments.dst)
    what = plan(find_part(arguments.src, settings.mtp), settings)
    if arguments.check:
        print(report(what, destination))
    check_spaces(what, destination)
    if not arguments.check:
        convert(what, destination, settings)
        print(f"wrote {destination}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Convert a published target or drafter to an MLX folder that --model and "
        "--drafter accept. DST is complete in the end, or absent.",
    )
    result.add_argument("src", metavar="SRC", help="a Hugging Face id or a local folder")
    result.add_argument("dst", metavar="DST", help="the folder to make; it must be absent or empty")
    result.add_argument(
        "--check",
        action="store_true",
        help="read only configs and headers, and say what would be done and what it needs",
    )
    cli.add_options(result, ConvertConfig)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
