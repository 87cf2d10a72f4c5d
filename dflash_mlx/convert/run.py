"""A whole conversion: plan, fetch, write; and the words for what a plan would do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from dflash_mlx.convert import hub
from dflash_mlx.convert.plan import ALONE, Plan, Request, check_spaces, make_plan, plan_sources
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.source import fetch
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
        if any(source.heads_only for source in plan.sources.values()):
            sources = {part: fetch(source) for part, source in plan.sources.items()}
            plan = plan_sources(plan.destination, sources, settings)
        with staged(plan.destination, plan.size) as folder:
            write(plan, folder)
    return plan.destination


def write(plan: Plan, folder: Path) -> None:
    """Write all models of the plan into `folder`; the conversions are empty afterwards.

    Raises DFlashError for a source that cannot be read, OSError for a full disk.
    """
    total = sum(conversion.weight_bytes for conversion in plan.conversions.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", file=sys.stderr) as bar:
        for part, conversion in plan.conversions.items():
            (folder / part).mkdir(exist_ok=True)
            conversion.write_rest(folder / part)
            try:
                write_shards(folder / part, conversion.weights, bar)
            except RuntimeError as error:  # MLX's own, of a file that was whole when it was planned
                raise DFlashError(
                    f"{conversion.name} can no longer be read ({in_one_line(error)})",
                    "check the disk that it is on, then convert again; nothing was left behind",
                ) from None
    if ALONE not in plan.sources:
        names = {part: source.name for part, source in plan.sources.items()}
        pair_folder.write(folder, names, describe_versions())


def report(plan: Plan) -> str:
    """What would be done and what it needs, for people."""
    lines = [
        f"{conversion.kind:<9} {conversion.name}: {conversion.description}, "
        f"{gigabytes(conversion.weight_bytes)}"
        for conversion in plan.conversions.values()
    ]
    free = shutil.disk_usage(plan.destination.parent).free
    lines.append(f"disk      {gigabytes(plan.size)} in {plan.destination}; {gigabytes(free)} free")
    if plan.download:
        free = shutil.disk_usage(hub.cache_folder()).free
        lines.append(f"download  {gigabytes(plan.download)}; {gigabytes(free)} free for it")
    lines.append(f"memory    at most about {gigabytes(plan.memory)} while converting")
    return "\n".join(lines)
