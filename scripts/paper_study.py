"""What a paper's tables need of a pair: prompts, answers, trained variants, and walks."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import compare_methods
import keep_clear
import paper_sets
import simulate_trees
from paper_tables import Row, Table
from paper_variants import trained

from dflash_mlx.benchmark.measure import groups
from dflash_mlx.benchmark.selection import read_methods
from dflash_mlx.cli.options import option_name, read_pair_config
from dflash_mlx.core.config import AS_STORED, PLAIN, DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.corpus import main as collect
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.paper import KNOBS
from dflash_mlx.models.load import load_pair, load_target, make_ready
from dflash_mlx.models.names import find_names
from dflash_mlx.system.files import kept_json, replace_text
from dflash_mlx.train.data import vocabulary_size
from dflash_mlx.train.rows import read_rows

ROOT = Path(__file__).resolve().parent
ANSWERS = ROOT / "answers" / "smollm2-135m.jsonl.gz"  # of the default model
PROMPTS = [ROOT / "prompts" / name for name in ("made.jsonl", "written.jsonl")]
SEED = "1"
REFUSED = "refused"


class Study:
    """One folder: what is there is not made again. rows: as `paper_sets.read_sets` has them.

    Raises DFlashError for a folder that was begun with another pair or other prompts.
    """

    def __init__(self, asked: argparse.Namespace, rows: list[paper_sets.Row]) -> None:
        self.asked, self.out, self._rows = asked, asked.out, rows
        self.config = replace(read_pair_config(asked), drafter_bits=AS_STORED)
        given = {name: vars(asked).get(name) for name in ("model", "drafter", "second_drafter")}
        given["template"] = vars(asked).get("template") or []
        begun = {**given, "max_tokens": asked.max_tokens, "prompts": rows}
        file = self.out / "study.json"
        if file.exists() and (before := kept_json(file)) != begun:
            other = ", ".join(name for name in begun if before.get(name) != begun[name])
            what = f"{self.out} was begun with another {other}"
            raise DFlashError(what, "give the same, or choose another folder with --out")
        self.out.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(begun))
        self._model = _words(model=given["model"])
        self._pair = _words(**given)

    def told(self, table: Table) -> str:
        """A table in Markdown, and below it which rows could not be had, and why."""
        found = {heat: self._walks(table.rows, heat) for heat in self.asked.temperatures}
        first = found[self.asked.temperatures[0]]
        names = list(next((f for f in first.values() if REFUSED not in f), {"all": {}}))
        speed = self._speeds(table, first) if self.asked.timed else {}
        heads = ["", *(f"T = {heat}" for heat in found), *(["speed-up"] if speed else [])]
        heads += ["rows", *(n for n in names if n != "all"), "trained", "published"]
        lines = [compare_methods.row(heads), compare_methods.row(["---"] * len(heads))]
        for row in table.rows:
            cells = [row.label, *(_mean(found[heat][row], "all", True) for heat in found)]
            cells += [speed.get(row.method, "-") if not row.is_trained else "-"] if speed else []
            own = first[row]
            cells.append("-" if REFUSED in own else f"{own['all']['rows_per_round']:.1f}")
            cells += [_mean(own, name) for name in names if name != "all"]
            lines.append(compare_methods.row([*cells, self._length(row), row.published]))
        lacking = [f"* {r.label}: {f[REFUSED]}" for r, f in first.items() if REFUSED in f]
        notes = ["", *lacking] if lacking else []
        head = [f"**{table.title}**", "", f"Published: {table.published}.", ""]
        return "\n".join([*head, *lines, *notes])

    def _walks(self, rows: Sequence[Row], heat: str) -> dict[Row, Any]:
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            groups.setdefault((row.drafter, row.second), []).append(row)
        return {
            row: found[row.method]
            for some in groups.values()
            for found in [self._walk(some, heat)]
            for row in some
        }

    def _walk(self, rows: Sequence[Row], heat: str) -> dict[str, Any]:
        """Figures of rows with the same draft models, by method."""
        row = rows[0]
        place = self.out / "walks" / self._place.name if row.is_trained else self.out / "walks"
        file = place / f"{row.drafter or 'own'}+{row.second or 'own'}-{heat}.json"
        known = kept_json(file) if file.exists() else {}
        lacking = [r.method for r in rows if r.method not in known]
        if not lacking:
            return dict(known)
        try:
            drafter, second = self._drafter(row.drafter), self._drafter(row.second)
        except DFlashError as error:
            return {**known, **{method: {REFUSED: error.what} for method in lacking}}
        config = replace(self.config, drafter=drafter or self.config.drafter)
        config = replace(config, second_drafter=second or config.second_drafter)
        found = {**known, **walked(config, lacking, self.answers(heat))}
        place.mkdir(parents=True, exist_ok=True)
        kept = {name: figures for name, figures in found.items() if REFUSED not in figures}
        replace_text(file, json.dumps(kept))
        return found

    def _drafter(self, name: str) -> str | None:
        if name in ("", PLAIN):
            return name or None
        ends = ["--minutes", str(self.asked.minutes)]
        ends = ends if self.asked.steps is None else ["--steps", str(self.asked.steps)]
        words = [*self._model, *ends, "--cache", str(self.out / "features"), *self.asked.options]
        own = find_names(self.config).drafter
        return str(trained(name, self._place, ["--corpus", str(self.corpus), *words], own))

    @property
    def _place(self) -> Path:
        """Of the variants that are trained alike."""
        asked = self.asked
        ends = f"{asked.minutes:g} minutes" if asked.steps is None else f"{asked.steps} steps"
        told = " ".join([ends, f"{asked.rows} rows", *asked.options])
        return self.out / "variants" / re.sub(r"[^\w.]+", "-", told)

    def _length(self, row: Row) -> str:
        """How long the last of its draft models was trained."""
        history = self._place / row.variant / "history.jsonl"
        if not row.is_trained or not history.exists():
            return "-"
        last = json.loads(history.read_text(encoding="utf-8").splitlines()[-1])
        return f"{last['step']} steps, {last['minutes']:.0f} min"

    def _speeds(self, table: Table, served: dict[Row, Any]) -> dict[str, str]:
        """Speed-ups of what trains nothing, by method."""
        rows = [row for row, found in served.items() if not row.is_trained and not row.second]
        methods = [row.method for row in rows if REFUSED not in served[row]]
        place = self.out / "speed" / re.sub(r"\W+", "-", table.title)
        place.mkdir(parents=True, exist_ok=True)
        asked = {**vars(self.asked), "out": place, "prompts": self.prompts, "options": self._pair}
        heat = self.asked.temperatures[0]
        report = compare_methods.timed(argparse.Namespace(**asked), [PLAIN, *methods], heat)
        return {name: f"{own['speedup']:.2f}" for name, own in groups(report)["all"].items()}

    @cached_property
    def prompts(self) -> Path:
        """Every turn of every conversation, behind the target's own greedy answers."""
        file = self.out / "prompts.jsonl"
        if not file.exists():
            asked = paper_sets.all_turns(self._rows, self._said)
            replace_text(file, "".join(json.dumps(row) + "\n" for row in asked))
        return file

    def _said(self, rows: list[paper_sets.Row], turn: int) -> dict[str, str]:
        file = self.out / f"turn-{turn}.jsonl"
        replace_text(file, "".join(json.dumps(row) + "\n" for row in rows))
        answers = read_rows(self._collected(file, f"turn-{turn}-answers.jsonl", "0"))
        tokenizer = load_target(self.config.model).tokenizer
        return {
            row.id: tokenizer.decode(list(row.answer), skip_special_tokens=True) for row in answers
        }

    @cache  # noqa: B019  # there is one study
    def answers(self, heat: str) -> Path:
        """The target's answers to all prompts at a temperature."""
        return self._collected(self.prompts, f"answers-{heat}.jsonl", heat)

    def _collected(self, prompts: Path, name: str, heat: str) -> Path:
        given = ["--prompts", str(prompts), "--out", str(self.out / name), "--seed", SEED]
        given += ["--max-tokens", str(self.asked.max_tokens), "--top-p", "1", *self._pair]
        greedy = float(heat) == 0
        collect([*given, *(["--greedy-share", "1"] if greedy else _drawn(heat))])
        return self.out / name

    @cached_property
    def corpus(self) -> Path:
        """The answers that variants learn from, which keep clear of the prompts."""
        file = self.out / f"corpus-{self.asked.rows}.jsonl"
        if file.exists():
            return file
        source = self.asked.corpus or (ANSWERS if self.config.model is None else None)
        if source is None:
            clear, source = self.out / "clear.jsonl", self.out / "collected.jsonl"
            given = [word for each in PROMPTS for word in ("--prompts", str(each))]
            keep_clear.main([*given, "--of", str(self.prompts), "--out", str(clear)])
            given = ["--limit", str(self.asked.rows), *self._pair]
            collect(["--prompts", str(clear), "--out", str(source), *given])
        count = len(read_rows(source))  # which refuses what is damaged
        opened = gzip.open if source.suffix == ".gz" else open
        with opened(source, "rt", encoding="utf-8") as text:
            lines = text.read().splitlines()
        header, rows = lines[:-count], lines[-count:]
        kept = rows[:: max(1, count // self.asked.rows)][: self.asked.rows]
        replace_text(file, "\n".join([*header, *kept, ""]))
        return file


def walked(config: PairConfig, methods: Sequence[str], answers: Path) -> dict[str, Any]:
    """Figures by method and category; one that the pair does not serve says why."""
    uses = read_methods(",".join(methods), DecodeConfig(), KNOBS)
    del uses[PLAIN]
    refused: dict[str, Any] = {}

    def served(ask: Callable[[DecodeConfig], Any]) -> dict[str, Any]:
        found = {}
        for name, use in [*uses.items()]:
            try:
                found[name] = ask(use)
            except DFlashError as error:
                refused[name] = {REFUSED: error.what}
                del uses[name]
        return found

    if not served(partial(make_ready, config)):
        return refused
    pair = load_pair(config, *uses.values())
    drafters = served(partial(make_drafter, pair))
    if not drafters:
        return refused
    try:
        rows = simulate_trees.read_answers(answers, vocabulary_size(pair.target))
        with simulate_trees.remembering() as memory:
            counts = simulate_trees.simulate(pair, drafters, rows, memory)
        return refused | {name: count.figures() for name, count in counts.items()}
    except DFlashError as error:
        if len(uses) == 1:
            return refused | {name: {REFUSED: error.what} for name in uses}
    return refused | {name: f for m in uses for name, f in walked(config, [m], answers).items()}


def _mean(figures: dict[str, Any], name: str, with_interval: bool = False) -> str:
    if REFUSED in figures or name not in figures:
        return "-"
    low_high = figures[name]["intervals"]["mean_accepted"]
    within = " [{:.2f}, {:.2f}]".format(*low_high) if with_interval and low_high else ""
    return f"{figures[name]['mean_accepted']:.2f}{within}"


def _drawn(heat: str) -> list[str]:
    return ["--greedy-share", "0", "--temperature", heat]


def _words(**given: Any) -> list[str]:
    """Of a command line; what is None is left out."""
    words = []
    for name, value in given.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [option_name(name), each] if each is not None else []
    return words
