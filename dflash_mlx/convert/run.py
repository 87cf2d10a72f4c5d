"""A whole conversion: plan, fetch, write; and the words for what a plan would do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from dflash_mlx.convert.plan import (
    ALONE,
    Plan,
    Request,
    cache_folder,
    check_spaces,
    fetched,
    make_plan,
)
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.staging import gigabytes, staged
from dflash_mlx.convert.tensors import write_shards
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.models import pair_folder
from dflash_mlx.system.machine import describe_versions


def convert(request: Request, settings: ConvertConfig) -> Path:
    """Convert and return the destination; DFlashError, and no destination, where that fails."""
    with TemporaryDirectory(prefix="dflash-heads-") as scratch:
        plan = make_plan(request, settings, Path(scratch))
        check_spaces(plan)
        plan = fetched(plan, settings)
        with staged(plan.destination, plan.size) as folder:
            write(plan, folder)
    return plan.destination


def write(plan: Plan, folder: Path) -> None:
    """Write all models of the plan into `folder`; the conversions are empty afterwards.

    Raises DFlashError for a source that cannot be read, OSError for a full disk.
    """
    total = sum(conversion.weight_bytes for conversion in plan.conversions.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", file=sys.stderr) as bar:
        for place, conversion in plan.conversions.items():
            (folder / place).mkdir(exist_ok=True)
            conversion.write_rest(folder / place)
            try:
                write_shards(folder / place, conversion.weights, bar)
            except RuntimeError as error:  # MLX's own, of a file that was whole when it was planned
                raise DFlashError(
                    f"{conversion.name} can no longer be read ({in_one_line(error)})",
                    "check the disk that it is on, then convert again; nothing was left behind",
                ) from None
    if ALONE not in plan.parts:
        names = {place: part.name for place, part in plan.parts.items()}
        pair_folder.write(folder, names, describe_versions())


def report(plan: Plan) -> str:
    """What would be done and what it needs, for people."""
    lines = [
        f"{plan.parts[place].kind:<9} {conversion.name}: {conversion.description}, "
        f"{gigabytes(conversion.weight_bytes)}"
        for place, conversion in plan.conversions.items()
    ]
    free = shutil.disk_usage(plan.destination.parent).free
    lines.append(f"disk      {gigabytes(plan.size)} in {plan.destination}; {gigabytes(free)} free")
    if plan.download:
        free = shutil.disk_usage(cache_folder()).free
        lines.append(f"download  {gigabytes(plan.download)}; {gigabytes(free)} free for it")
    lines.append(f"memory    at most about {gigabytes(plan.memory)} while converting")
    return "\n".join(lines)
