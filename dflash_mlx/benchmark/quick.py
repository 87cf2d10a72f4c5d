"""A dozen prompts that come with the program, every method that a pair serves, one sentence."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from dflash_mlx.benchmark.measure import MethodStats, Run, run_all, summarise
from dflash_mlx.benchmark.plots import draw_report
from dflash_mlx.benchmark.prompts import questions
from dflash_mlx.benchmark.report import Report, describe, save, settings
from dflash_mlx.benchmark.selection import read_methods, settle_all
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import PLAIN, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import find_method, serving
from dflash_mlx.engine.pair import Capabilities, Pair
from dflash_mlx.models.names import SHIPPED

PROMPTS = SHIPPED / "prompts.jsonl"
TOKENS = 48  # of each answer
PAYS = 1.05  # times plain decoding, below which nobody would notice


@dataclass(frozen=True)
class BenchStep:
    """How far a short benchmark is."""

    answers: int  # written so far
    of: int  # in all
    prompts: int = 0  # finished by all methods
    report: Report = field(default_factory=dict)  # over those prompts, {} before the first


def bench(
    pair: Pair, config: PairConfig, sampling: SamplingConfig, methods: Sequence[str] = ()
) -> Generator[BenchStep, None, None]:
    """Answer the dozen prompts with plain decoding and with `methods`, which take turns.

    config: that the pair was loaded with. methods: as of --methods; by default all that the pair
    serves. Raises DFlashError for methods that are unknown or that it does not serve.
    """
    base = DecodeConfig(max_tokens=TOKENS, sampling=sampling.with_seed())
    named = read_methods(",".join(methods or serving(pair.capabilities)), base)
    settled = settle_all(named, pair.capabilities)
    asked = questions(pair.tokenizer, read_prompts(PROMPTS, None), (), (), pair.template)
    report = describe(pair, config)
    given = {"prompts_file": PROMPTS.name, "limit": None}
    report["settings"] = given | settings(asked, settled, base.sampling)
    step, runs = BenchStep(0, len(asked) * len(settled)), list[Run]()
    for some in run_all(pair, asked, settled):
        runs += some
        if some:
            told = report | summarise(runs)
            step = replace(step, prompts=step.prompts + 1, report=told)
        else:
            step = replace(step, answers=step.answers + 1)
        yield step


def what_pays(report: Report, capabilities: Capabilities) -> str:
    """One sentence on the fastest method. capabilities: of the pair, for its name."""
    methods: dict[str, MethodStats] = report["methods"]
    best: str = max(methods, key=lambda name: methods[name]["speedup"])
    figures, plain = methods[best], methods[PLAIN]["tokens_per_second"]
    if best == PLAIN or figures["speedup"] < PAYS:
        return (
            f"Drafts do not pay on this machine: nothing was more than {PAYS:.2f} times as fast "
            f"as plain decoding, which writes {plain:.1f} tokens a second"
        )
    label = find_method(best.partition(":")[0]).called(capabilities)
    by_kind: dict[str, dict[str, MethodStats]] = report["categories"]
    kinds = {kind: float(found[best]["speedup"]) for kind, found in by_kind.items()}
    most, least = (pick(kinds, key=lambda kind: kinds[kind]) for pick in (max, min))
    return (
        f"{label} pays on this machine: {figures['speedup']:.2f} times as fast as plain decoding "
        f"({figures['tokens_per_second']:.1f} against {plain:.1f} tokens a second), most for "
        f"{most} ({kinds[most]:.2f}), least for {least} ({kinds[least]:.2f})"
    )


def save_bench(report: Report, folder: Path, prompts: int) -> tuple[list[Path], str]:
    """Write a report as JSON and PNG into `folder`; the files, and why there is no picture.

    prompts: that are finished. Raises DFlashError where nothing can be written.
    """
    stem = f"bench-{datetime.now():%Y-%m-%d-%H%M%S}"
    file, picture = folder / f"{stem}.json", folder / f"{stem}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder} cannot be made ({error.strerror or error})"
        raise DFlashError(what, "make the folder above it writable") from None
    whole = prompts == report["settings"]["prompts"]
    save(file, {**report, "finished_prompts": prompts}, None if whole else ())
    try:
        draw_report(report, picture)
    except DFlashError as error:
        return [file], str(error)
    except OSError as error:  # a disk that has become full; the figures are kept
        return [file], f"{picture} cannot be written ({error.strerror or error})"
    return [file, picture], ""
