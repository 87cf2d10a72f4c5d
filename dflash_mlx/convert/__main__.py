"""`python -m dflash_mlx.convert SRC DST`: a published checkpoint becomes an MLX folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dflash_mlx.cli import options as cli
from dflash_mlx.convert.conversion import ConvertConfig
from dflash_mlx.convert.plan import ALONE, check_spaces, convert, make_plan, report
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.names import TARGET
from dflash_mlx.models.source import DRAFTER, SECOND_DRAFTER

PROGRAM = "dflash_mlx.convert"


def main(argv: Sequence[str]) -> None:
    """Convert, or say what would be done. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    try:
        _run(arguments)
    except DFlashError as error:  # of checks that name the options of other programs
        given = "as SRC" if arguments.pair is None else "with --pair"
        step = error.next_step.replace("with --drafter", given).replace("with --model", "as SRC")
        raise DFlashError(
            error.what, step.replace(", or --method none", ""), error.setting
        ) from error


def _run(arguments: argparse.Namespace) -> None:
    settings = cli.read_options(arguments, ConvertConfig)
    plan = make_plan(_names(arguments), arguments.dst, settings)
    if arguments.check:
        print(report(plan))
    check_spaces(plan)
    if not arguments.check:
        convert(plan, settings)
        print(f"wrote {plan.destination}")


def _names(arguments: argparse.Namespace) -> dict[str, str]:
    if arguments.pair is not None:
        names = {TARGET: arguments.src, DRAFTER: arguments.pair}
        second = arguments.second_drafter
        return names if second is None else {**names, SECOND_DRAFTER: second}
    if arguments.second_drafter is not None:
        raise DFlashError("a second drafter needs a first one", "name one with --pair")
    return {ALONE: arguments.src}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Convert a published target or drafter to an MLX folder that --model and "
        "--drafter accept. DST is complete in the end, or absent.",
    )
    result.add_argument(
        "src", metavar="SRC", help="a Hugging Face id, a local folder or a GGUF file"
    )
    result.add_argument("dst", metavar="DST", help="the folder to make; it must be absent or empty")
    result.add_argument(
        "--pair", metavar="DRAFTER", help="convert this drafter too; DST holds both, for --model"
    )
    result.add_argument(
        "--second-drafter",
        metavar="DRAFTER",
        help="with --pair: d2sd's variable-prefix drafter, too",
    )
    result.add_argument(
        "--check",
        action="store_true",
        help="read only configs and headers, and say what would be done and what it needs",
    )
    cli.add_options(result, ConvertConfig)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
