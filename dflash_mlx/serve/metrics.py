"""What the server counts, for Prometheus and whoever watches."""

from __future__ import annotations

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dflash_mlx.engine.delta import Delta

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds to the first token
_EACH = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)  # seconds for a token


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        count = "dflash_%s_total".__mod__
        self._responses = self._counter(count("responses"), "Responses", "path", "status")
        self._answers = self._counter(count("answers"), "Answers by how they ended", "ended")
        self._tokens = self._counter(count("tokens"), "Tokens of answers")
        self._prompt = self._counter(count("prompt_tokens"), "Tokens of prompts")
        self._cached = self._counter(count("cached_tokens"), "Prompt tokens found in caches")
        self._rounds = self._counter(count("rounds"), "Target passes of answers, one for each")
        self._drafted = self._counter(count("drafted"), "Drafted positions")
        self._accepted = self._counter(count("accepted"), "Drafted positions that were accepted")
        self._decoding = Gauge("dflash_decoding", "Answers decoded now", registry=self.registry)
        self._waiting = Gauge("dflash_waiting", "Answers that wait", registry=self.registry)
        self._caches = Gauge("dflash_cache_bytes", "Caches of answers", registry=self.registry)
        memory = Gauge("dflash_memory_bytes", "Memory that MLX holds", registry=self.registry)
        memory.set_function(mx.get_active_memory)
        first, each = "dflash_first_token_seconds", "dflash_token_seconds"
        self._first = Histogram(first, "Until it", registry=self.registry, buckets=_FIRST)
        self._each = Histogram(each, "For each further", registry=self.registry, buckets=_EACH)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self.registry)

    def responded(self, path: str, status: int) -> None:
        """Count a response. path: one of the server's own, "other" for any other."""
        self._responses.labels(path, str(status)).inc()

    def busy(self, decoding: int, waiting: int) -> None:
        """How many answers are in the making."""
        self._decoding.set(decoding)
        self._waiting.set(waiting)

    def told(self, piece: Delta) -> None:
        """Count the tokens of a piece."""
        self._tokens.inc(len(piece.tokens))

    def finished(self, last: Delta) -> None:
        """Count an answer with its last piece."""
        statistics = last.statistics
        self._answers.labels(last.finish_reason or "").inc()
        self._prompt.inc(statistics.prompt_tokens)
        self._cached.inc(statistics.reused_tokens)
        self._rounds.inc(statistics.rounds)
        self._drafted.inc(statistics.drafted.total())
        self._accepted.inc(statistics.accepted.total())
        self._first.observe(statistics.time_to_first_token)
        if statistics.tokens_per_second:
            self._each.observe(1 / statistics.tokens_per_second)

    def ended(self, how: str) -> None:
        """Count an answer that has no last piece: "gone" with its client, or "failed"."""
        self._answers.labels(how).inc()

    def page(self, cache_bytes: int) -> bytes:
        """The text that Prometheus reads."""
        self._caches.set(cache_bytes)
        return generate_latest(self.registry)
