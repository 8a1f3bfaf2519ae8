"""What the engine itself adds to a step: scheduling, pages, outputs. The executor takes no time.

    python -m benchmarks.engine_cost
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

import numpy as np

from aotc.runtime.engine import Engine
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Row, Sequence

LENGTH = 4096  # tokens that a sequence may have
GOALS = {1: 50.0, 64: 1000.0}  # microseconds a step in which all rows decode, by rows


@dataclass
class Result:
    """Of every step the same."""

    token: np.ndarray
    logprobs: np.ndarray
    logprob_ids: np.ndarray


class FreeExecutor:
    """Computes nothing. All time that passes is the engine's; `seconds` is what the executor took all the same."""

    vocab_size = 32000
    max_num_batched_tokens = 512
    max_model_len = LENGTH
    offload_memory = 0
    runs_ahead = False

    def __init__(self, seqs: int, page_size: int) -> None:
        self.max_num_seqs, self.page_size = seqs, page_size
        self.num_pages = seqs * LENGTH // page_size if page_size else 0
        self.page_bytes = page_size
        shape = (seqs, 21)
        self._result = Result(np.full(seqs, 5, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.int32))

    def start(self, sequence: Sequence) -> None:
        pass

    def wait(self, step: Result) -> Result:
        return step

    def launch(self, rows: list[Row]) -> Result:
        return self._result

    def save_pages(self, ids: np.ndarray, data: np.ndarray) -> None:
        pass

    def load_pages(self, data: np.ndarray, ids: np.ndarray) -> None:
        pass


def decode_costs(seqs: int, page_size: int, logprobs: int | None, steps: int) -> list[float]:
    """Microseconds of each step in which `seqs` sequences decode."""
    engine = Engine(FreeExecutor(seqs, page_size), (1,))
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=logprobs)
    for n in range(seqs):
        engine.submit(Request(f"r{n}", tuple(range(n, n + 100)), params))
    while any(s.pending > 1 for s in (*engine.scheduler.waiting, *engine.scheduler.running)):
        engine.step()
    return [_microseconds(engine) for _ in range(steps)]


def arrival_costs(seqs: int, page_size: int, steps: int) -> list[float]:
    """The same where each step a request ends and a new one begins, half of whose 400 tokens are known; `seqs` more
    wait."""
    engine = Engine(FreeExecutor(seqs, page_size), (1,))
    head = tuple(range(200))
    times = []
    for n in range(steps + seqs):
        params = SamplingParams(max_tokens=seqs, ignore_eos=True)
        engine.submit(Request(f"r{n}", head + tuple(range(n, n + 200)), params))
        times.append(_microseconds(engine))
    return times[seqs:]


def _microseconds(engine: Engine) -> float:
    begin = time.perf_counter()
    engine.step()
    return 1e6 * (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    gc.collect()
    gc.freeze()
    print(f"{'rows':>4}  {'what':24} {'p50':>8} {'p99':>8}   microseconds a step")
    for seqs in (1, 64):
        kinds = {
            "decode, static": lambda n=seqs: decode_costs(n, 0, None, steps),
            "decode, paged": lambda n=seqs: decode_costs(n, 16, None, steps),
            "decode, paged, logprobs": lambda n=seqs: decode_costs(n, 16, 5, steps),
            "arrivals, paged": lambda n=seqs: arrival_costs(n, 16, steps),
        }
        for name, measure in kinds.items():
            times = measure()
            p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
            verdict = "met" if p50 <= GOALS[seqs] else "MISSED"
            goal = "" if name.startswith("arrivals") else f"   goal {GOALS[seqs]:.0f}: {verdict}"
            print(f"{seqs:4}  {name:24} {p50:8.1f} {p99:8.1f}{goal}")


if __name__ == "__main__":
    main()
