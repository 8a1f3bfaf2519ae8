"""Prometheus metrics, with vLLM's suffixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from aotc.runtime.server.messages import Load

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)


class Metrics:
    """One server's metrics in a registry of their own, under `prefix:`; each is labelled with the model's name."""

    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._families: dict[str, Any] = {}

    def family(self, kind: Callable[..., Any], name: str, text: str, *labels: str, **options: Any) -> Any:
        """The metric of that name, made on first use: models share it."""
        if name not in self._families:
            made = kind(f"{self._prefix}:{name}", text, ["model_name", *labels], registry=self.registry, **options)
            self._families[name] = made
        return self._families[name]

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return metrics.family(Gauge, name, text).labels(model)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return metrics.family(Histogram, name, text, buckets=buckets).labels(model)

        def counter(name: str, text: str) -> Counter:
            return metrics.family(Counter, name, text).labels(model)

        self._running = gauge("num_requests_running", "Requests in the engine's batch.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting for a slot.")
        self._cache_usage = gauge("kv_cache_usage_perc", "Share of cache slots in use, 1 is all.")
        self._memory = metrics.family(Gauge, "device_memory_bytes", "Memory that the engine took, by purpose.", "purpose")
        self._device = {
            "device_used": metrics.family(Gauge, "device_memory_used_bytes", "Memory in use on the engine's GPU, by all."),
            "device_total": metrics.family(Gauge, "device_memory_total_bytes", "Memory of the engine's GPU."),
        }
        self._breaker = gauge("circuit_breaker_state", "0 closed, 1 half-open, 2 open: requests are refused.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that gave a token.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.engine_restarts = counter("engine_restarts", "Engine processes started again.")
        self._preemptions = counter("num_preemptions", "Sequences that lost their pages to others.")
        self._prefix_queries = counter("prefix_cache_queries", "Tokens of prompts looked up in the cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Tokens of prompts found in the cache.")
        self._success = metrics.family(Counter, "request_success", "Finished requests.", "finished_reason")
        self._model = model
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "Between tokens.", _TOKEN_SECONDS)
        self._end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._queue_time = histogram("request_queue_time_seconds", "From submission to the first step.", _SECONDS)
        self._step_time = histogram("engine_step_seconds", "Duration of a step of the engine.", _TOKEN_SECONDS)
        self._batch = histogram("engine_step_sequences", "Sequences in a step of the engine.", _SEQUENCES)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens in a step of the engine.", _STEP_TOKENS)
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS)
        self._lengths = histogram("request_generation_tokens", "Tokens generated for a finished request.", _TOKENS)

    def finished(self, reason: str, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """Counts a finished request by its reason: stop, length, abort or error."""
        self._success.labels(self._model, reason).inc()
        self._prompt_lengths.observe(prompt_tokens)
        self._lengths.observe(tokens)
        self._end_to_end.observe(seconds)

    def absorb(self, load: Load) -> None:
        """Counts what an engine did since its last message."""
        if load.preemptions:
            self._preemptions.inc(load.preemptions)
        if load.prefix_queries:
            self._prefix_queries.inc(load.prefix_queries)
            self._prefix_hits.inc(load.prefix_hits)
        for seconds in load.waits:
            self._queue_time.observe(seconds)
        for seconds, sequences, tokens in load.steps:
            self._step_time.observe(seconds)
            self._batch.observe(sequences)
            if tokens:  # none where a step has only begun
                self._step_tokens.observe(tokens)

    def remember(self, memory: Mapping[str, int]) -> None:
        """Sets an engine's bytes: its own by purpose, and of a GPU what is in use by all processes (`device_used`) and what
        there is (`device_total`)."""
        for purpose, nbytes in memory.items():
            if purpose in self._device:
                self._device[purpose].labels(self._model).set(nbytes)
            elif purpose != "kv_blocks":
                self._memory.labels(self._model, purpose).set(nbytes)

    def update(self, load: Load, unfinished: int, breaker: int) -> None:
        """Sets the gauges. Of `unfinished` requests those that the engine does not run are waiting."""
        self._running.set(load.running)
        self._waiting.set(max(0, unfinished - load.running))
        self._cache_usage.set(load.cache_usage)
        self._breaker.set(breaker)
