"""What the server counts, for Prometheus and whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.text import counted
from dflash_mlx.engine.delta import Delta

_FIRST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds to the first token
_EACH = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)  # seconds for a token
_COUNTERS: dict[str, tuple[str, Callable[[Statistics], int]]] = {  # counted when answers are over
    "prompt_tokens": ("Tokens of prompts", lambda s: s.prompt_tokens),
    "cached_tokens": ("Prompt tokens found in caches", lambda s: s.reused_tokens),
    "rounds": ("Target passes of answers, one for each", lambda s: s.rounds),
    "drafted": ("Drafted positions", lambda s: s.drafted.total()),
    "accepted": ("Drafted positions that were accepted", lambda s: s.accepted.total()),
}


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self._before = 0.0  # tokens at the last line
        self._counters = {
            name: Counter(f"dflash_{name}", what, registry=own)
            for name, (what, _) in _COUNTERS.items()
        }
        self._tokens = Counter("dflash_tokens", "Tokens of answers", registry=own)
        labels, how = ("path", "status"), ("ended",)
        self._responses = Counter("dflash_responses", "Responses", labels, registry=own)
        self._answers = Counter("dflash_answers", "Answers by how they ended", how, registry=own)
        self.decoding = Gauge("dflash_decoding", "Answers decoded now", registry=own)
        self.waiting = Gauge("dflash_waiting", "Answers that wait", registry=own)
        self._caches = Gauge("dflash_cache_bytes", "Caches of answers", registry=own)
        self._loaded = Gauge("dflash_loaded", "Models in memory: 1", ("model",), registry=own)
        memory = Gauge("dflash_memory_bytes", "Memory that MLX holds", registry=own)
        memory.set_function(mx.get_active_memory)
        first, each = "dflash_first_token_seconds", "dflash_token_seconds"
        self._first = Histogram(first, "Until it", registry=own, buckets=_FIRST)
        self._each = Histogram(each, "For each further", registry=own, buckets=_EACH)

    def responded(self, path: str, status: int) -> None:
        """Count a response. path: one of the server's own, "other" for any other."""
        self._responses.labels(path, str(status)).inc()

    def told(self, delta: Delta) -> None:
        """Count the tokens of a delta, and an answer with its last one."""
        self._tokens.inc(len(delta.tokens))
        if delta.finish_reason is None:
            return
        statistics = delta.statistics
        self._answers.labels(delta.finish_reason).inc()
        for name, (_, count) in _COUNTERS.items():
            self._counters[name].inc(count(statistics))
        self._first.observe(statistics.time_to_first_token)
        if statistics.tokens_per_second:
            self._each.observe(1 / statistics.tokens_per_second)

    def ended(self, how: str) -> None:
        """Count an answer that has no last delta: "gone" with its client, or "failed"."""
        self._answers.labels(how).inc()

    def line(self, seconds: float) -> str:
        """What the server is doing, "" for nothing. seconds: since the call before."""
        now = self._sum("tokens_total")
        new, self._before = now - self._before, now
        decoding, waiting = int(self._sum("decoding")), int(self._sum("waiting"))
        if not (new or decoding or waiting):
            return ""
        told = [f"{counted(decoding, 'answer')} in the making, {waiting} waiting"]
        told += [f"{new / seconds:.1f} tokens per second"]
        if rounds := self._sum("rounds_total"):  # of answers that are over
            told += [f"{1 + self._sum('accepted_total') / rounds:.2f} tokens per round so far"]
        return " · ".join([*told, f"{counted(int(self._sum('answers_total')), 'answer')} done"])

    def _sum(self, name: str) -> float:
        samples = (each for metric in self._registry.collect() for each in metric.samples)
        return sum(each.value for each in samples if each.name == f"dflash_{name}")

    def page(self, cache_bytes: int, loaded: Mapping[str, bool]) -> bytes:
        """The text that Prometheus reads. loaded: whether a model is in memory, by its name."""
        self._caches.set(cache_bytes)
        for name, is_loaded in loaded.items():
            self._loaded.labels(name).set(is_loaded)
        return generate_latest(self._registry)
