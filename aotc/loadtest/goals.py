"""`--slo`: what must hold of a run, and whether it does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from aotc.errors import RequestError
from aotc.loadtest.report import TIMES, Figures

_TIME = re.compile(rf"({'|'.join(TIMES)})_(mean|median|p\d{{1,2}}(?:\.\d+)?|p100)\Z", re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|)\Z", re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)(%?)\Z", re.ASCII)
_LEAST = {
    "request_throughput": "requests a second", "output_throughput": "tokens a second",
    "total_token_throughput": "tokens a second", "goodput": "requests a second",
}  # fmt: skip
NAMES = "ttft_p99=500ms, tpot_p99=30ms (or itl, e2el; mean, median), device_mem=80%, failed=1%, output_throughput=100"


@dataclass(frozen=True)
class Memory:
    """Bytes of the device that are in use and that it has; None where the server does not say."""

    used: float | None
    total: float | None

    @property
    def share(self) -> float | None:
        """Percent of the device in use."""
        return self.used / self.total * 100 if self.used is not None and self.total else None


@dataclass(frozen=True)
class Goal:
    """One entry of --slo: `name`, its bound in ms, percent or a count a second, and how it was written."""

    name: str
    bound: float
    text: str
    share: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether a goal was met, and the line that says so."""

    goal: str
    passed: bool
    found: str

    @property
    def line(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.goal}: {self.found}"


def parse_slo(text: str) -> tuple[Goal, ...]:
    """`ttft_p99=500ms,tpot_p99=30ms,device_mem=80%`. A failed request is no fast one: without `failed=`, none may
    fail. Raises RequestError."""
    goals = tuple(_parse(entry.strip()) for entry in text.split(","))
    names = [goal.name for goal in goals]
    if len(set(names)) < len(names):
        raise RequestError(f"--slo {text}: each name once")
    return goals if "failed" in names else (*goals, Goal("failed", 0, "failed=0"))


def _parse(entry: str) -> Goal:
    name, _, value = entry.partition("=")
    if _TIME.match(name) and (match := _DURATION.match(value)):
        return Goal(name, float(match[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}[match[2]], entry)
    match = _SHARE.match(value)
    if match and (name == "failed" or (name == "device_mem" and match[2])):
        return Goal(name, float(match[1]), entry, match[2] == "%")
    if match and name in _LEAST and not match[2]:
        return Goal(name, float(match[1]), entry)
    raise RequestError(f"--slo {entry}: write goals as {NAMES}")


def judge(goals: Sequence[Goal], figures: Figures, memory: Memory | None) -> list[Verdict]:
    """A verdict for each goal, in their order."""
    return [_judge(goal, figures, memory) for goal in goals]


def _judge(goal: Goal, figures: Figures, memory: Memory | None) -> Verdict:
    if goal.name == "device_mem":
        share = memory.share if memory is not None else None
        if share is None:
            return _verdict(
                goal, False, "unknown: the server's /metrics has no device_memory_used_bytes and _total_bytes"
            )
        return _verdict(goal, share <= goal.bound, f"{share:.1f}%")
    if goal.name == "failed":
        asked = figures.completed + figures.failed
        value = figures.failed / asked * 100 if goal.share else figures.failed
        return _verdict(goal, value <= goal.bound, f"{figures.failed} of {asked}")
    if goal.name in _LEAST:
        value = getattr(figures, goal.name)
        if value is None:
            return _verdict(goal, False, "unknown: say with --goodput what a good request is")
        return _verdict(goal, value >= goal.bound, f"{value:.2f} {_LEAST[goal.name]}")
    time, _, statistic = goal.name.partition("_")
    if not len(figures.times[time]):
        return _verdict(goal, False, "unknown: no answer has it")
    value = figures.milliseconds(time, statistic)
    return _verdict(goal, value <= goal.bound, f"{value:.2f} ms")


def _verdict(goal: Goal, passed: bool, found: str) -> Verdict:
    return Verdict(goal.text, passed, found)


def read_memory(metrics: str) -> Memory:
    """What a server's Prometheus text says of its device: the fullest one where there are several.

    Names end with device_memory_used_bytes and device_memory_total_bytes; series are paired by their labels.
    """
    found: dict[str, dict[str, float]] = {"used": {}, "total": {}}
    for line in metrics.splitlines():
        match = _METRIC.match(line)
        if match:
            found[match[1]][match[2] or ""] = float(match[3])
    known = [Memory(used, found["total"].get(labels)) for labels, used in found["used"].items()]
    return max(known, key=lambda m: m.share if m.share is not None else -1.0, default=Memory(None, None))


_METRIC = re.compile(
    r"[\w:]*device_memory_(used|total)_bytes(\{.*\})? (\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?: \d+)?\Z", re.ASCII
)
