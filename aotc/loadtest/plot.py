"""Latency against load, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aotc.loadtest.report import Figures as Run


def check() -> None:
    """Raises ModuleNotFoundError, before anything was measured, where matplotlib is not installed."""
    import matplotlib  # noqa: F401


def draw(path: Path, kind: str, rows: Sequence[tuple[float, Run]], title: str) -> None:
    """Writes an SVG: TTFT and TPOT (median and p99) over the load, and output tokens a second beside them."""
    import matplotlib
    from matplotlib.figure import Figure

    loads = [load for load, _ in rows]
    picture = Figure(figsize=(13, 4), layout="constrained")
    axes = picture.subplots(1, 3)
    for axis, time in zip(axes, ("ttft", "tpot"), strict=False):
        for statistic, style in (("median", "o-"), ("p99", "s--")):
            axis.plot(loads, [f.milliseconds(time, statistic) for _, f in rows], style, label=statistic)
        axis.set_ylabel(f"{time.upper()}, ms")
        axis.legend()
    axes[2].plot(loads, [f.output_throughput for _, f in rows], "o-")
    axes[2].set_ylabel("output tokens a second")
    for axis in axes:
        axis.set_xlabel({"concurrency": "requests at once", "rate": "requests a second"}[kind])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    picture.suptitle(title)
    with matplotlib.rc_context({"svg.hashsalt": "aotc", "svg.fonttype": "none"}):  # text as text; the same file again
        picture.savefig(path, format="svg", metadata={"Date": None})
