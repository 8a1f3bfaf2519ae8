"""Figures of a run, as vLLM's benchmark defines them, its table, and the rows of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.errors import RequestError
from aotc.loadtest.generator import Outcome

TIMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""The four times that are measured, by the names that vLLM has for them."""


@dataclass(frozen=True)
class Figures:
    """What a run gave. `times` has the samples of each of TIMES in seconds: itl one a gap, the others one a request,
    tpot for those of two tokens or more. Failed requests count in `failed` alone."""

    duration: float
    completed: int
    failed: int
    total_input: int
    total_output: int
    good: int | None
    times: Mapping[str, np.ndarray]
    peak_concurrency: int
    peak_output_throughput: float

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration

    @property
    def goodput(self) -> float | None:
        """Requests a second that met all of --goodput; None where it was not given."""
        return None if self.good is None else self.good / self.duration

    def milliseconds(self, time: str, statistic: str) -> float:
        """`mean`, `median`, `std` or a percentile such as `p99` of one of TIMES; 0 without a sample."""
        values = self.times[time]
        if not len(values):
            return 0.0
        if statistic.startswith("p"):
            return float(np.percentile(values, float(statistic[1:]))) * 1e3
        return float({"mean": np.mean, "median": np.median, "std": np.std}[statistic](values)) * 1e3


def summarise(outcomes: Sequence[Outcome], duration: float, goals: Mapping[str, float] | None = None) -> Figures:
    """Figures of a run of `duration` seconds. `goals`: most milliseconds of ttft, tpot or e2el of a good request."""
    done = [o for o in outcomes if o.error is None]
    times = {
        "ttft": np.array([o.ttft for o in done]),
        "tpot": np.array([o.tpot for o in done if o.output_len > 1]),
        "itl": np.array([gap for o in done for gap in o.itl]),
        "e2el": np.array([o.latency for o in done]),
    }
    good = None
    if goals:
        read = {"ttft": lambda o: o.ttft, "tpot": lambda o: o.tpot, "e2el": lambda o: o.latency}
        good = sum(all(read[name](o) * 1e3 <= most for name, most in goals.items()) for o in done)
    return Figures(
        duration, len(done), len(outcomes) - len(done), sum(o.prompt_len for o in done), sum(o.output_len for o in done),
        good, times, _peak_concurrency(done), _peak_throughput(done),
    )  # fmt: skip


def _peak_concurrency(done: Sequence[Outcome]) -> int:
    changes = sorted([(o.start, 1) for o in done] + [(o.start + o.latency, -1) for o in done])
    return max(np.cumsum([step for _, step in changes]).tolist(), default=0)


def _peak_throughput(done: Sequence[Outcome]) -> float:
    """Most events with tokens in one of the seconds since the first request."""
    if not done:
        return 0.0
    first = min(o.start for o in done)
    at = np.concatenate([o.start - first + o.ttft + np.cumsum([0.0, *o.itl]) for o in done])
    return float(np.bincount(at.astype(int)).max())


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """`--goodput ttft:500 tpot:30` as milliseconds. Raises RequestError."""
    goals = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = math.nan
        if name not in ("ttft", "tpot", "e2el") or not most >= 0:
            raise RequestError(f"--goodput {word}: write ttft, tpot or e2el and milliseconds, as ttft:500")
        goals[name] = most
    return goals


def costs(figures: Figures, price_per_hour: float) -> dict[str, float]:
    """What a million tokens cost at the rates of the run; infinite where there were none."""

    def million(rate: float) -> float:
        return price_per_hour / 3600 / rate * 1e6 if rate else math.inf

    return {
        "cost_per_million_output_tokens": million(figures.output_throughput),
        "cost_per_million_total_tokens": million(figures.total_token_throughput),
    }


def as_json(figures: Figures, statistics: Sequence[str], price_per_hour: float | None) -> dict[str, Any]:
    """The figures under the keys of vLLM's --save-result."""
    result: dict[str, Any] = {
        "duration": figures.duration, "completed": figures.completed, "failed": figures.failed,
        "total_input_tokens": figures.total_input, "total_output_tokens": figures.total_output,
        "request_throughput": figures.request_throughput, "request_goodput": figures.goodput,
        "output_throughput": figures.output_throughput, "total_token_throughput": figures.total_token_throughput,
        "max_output_tokens_per_s": figures.peak_output_throughput, "max_concurrent_requests": figures.peak_concurrency,
    }  # fmt: skip
    for time in TIMES:
        result |= {f"{s}_{time}_ms": figures.milliseconds(time, s) for s in ("mean", "median", "std", *statistics)}
    if price_per_hour is not None:
        result |= {name: cost if cost < math.inf else None for name, cost in costs(figures, price_per_hour).items()}
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What vLLM's --save-detailed adds: a list entry a request, times in seconds."""
    return {
        "input_lens": [o.prompt_len for o in outcomes], "output_lens": [o.output_len for o in outcomes],
        "start_times": [o.start for o in outcomes], "ttfts": [o.ttft for o in outcomes], "itls": [o.itl for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }  # fmt: skip


def table(figures: Figures, settings: Mapping[str, Any], statistics: Sequence[str], price: float | None) -> str:
    """The table of one run, as vLLM prints it."""
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=50, c="=")]

    def row(name: str, value: float | int, digits: int = 2) -> None:
        lines.append(f"{name:<40} {f'{value:.{digits}f}' if isinstance(value, float) else value:<10}".rstrip())

    row("Successful requests:", figures.completed)
    row("Failed requests:", figures.failed)
    for name, value in settings.items():
        row(f"{name}:", value)
    row("Benchmark duration (s):", figures.duration)
    row("Total input tokens:", figures.total_input)
    row("Total generated tokens:", figures.total_output)
    row("Request throughput (req/s):", figures.request_throughput)
    if figures.goodput is not None:
        row("Request goodput (req/s):", figures.goodput)
    row("Output token throughput (tok/s):", figures.output_throughput)
    row("Peak output token throughput (tok/s):", figures.peak_output_throughput)
    row("Peak concurrent requests:", figures.peak_concurrency)
    row("Total token throughput (tok/s):", figures.total_token_throughput)
    if price is not None:
        output, total = costs(figures, price).values()
        row("Cost of 1M output tokens:", output, 4)
        row("Cost of 1M total tokens:", total, 4)
    for time, title in TIMES.items():
        lines.append(f"{title:-^50}")
        for statistic in ("mean", "median", *statistics):
            row(f"{statistic.capitalize()} {time.upper()} (ms):", figures.milliseconds(time, statistic))
    return "\n".join([*lines, "=" * 50])


def sweep_table(kind: str, rows: Sequence[tuple[float, Figures]], price: float | None) -> str:
    """A line for each load of a sweep; `kind` says what the load is."""
    names = [kind, "failed", "req/s", "output tok/s", "total tok/s"]
    names += [f"{t} {s}" for t in ("ttft", "tpot") for s in ("median", "p99")] + ["e2el p99"]
    names += ["1M output", "1M total"] if price is not None else []
    cells = [names]
    for load, f in rows:
        values = [f.request_throughput, f.output_throughput, f.total_token_throughput]
        values += [f.milliseconds(t, s) for t in ("ttft", "tpot") for s in ("median", "p99")]
        values += [f.milliseconds("e2el", "p99")]
        line = [f"{load:g}", str(f.failed), *(f"{value:.2f}" for value in values)]
        cells.append(line + ([f"{c:.4f}" for c in costs(f, price).values()] if price is not None else []))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
