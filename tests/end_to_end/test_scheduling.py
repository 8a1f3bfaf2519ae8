"""Whatever the engine does with a request, its tokens are those that it gets alone: a tiny real model on the CPU, mixed
requests, both cache layouts, prefixes shared or not, pools so small that sequences lose their pages all the time."""

import numpy as np
import pytest

from aotc.runtime.engine import Engine
from aotc.runtime.executor import CacheOptions, CpuExecutor
from aotc.runtime.offload import Costs
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import UNKNOWN, Request
from aotc.runtime.step_frame import StepOutputs

COPY, COMPUTE = Costs(1.0, 0.0, fixed=True), Costs(0.0, 1.0, fixed=True)
COUNT = 40


def mixed(count):
    """Greedy and sampled, with penalties that look at the whole history; three of four begin like others do."""
    rng = np.random.default_rng(5)
    heads = [rng.integers(2, 200, 35).tolist() for _ in range(3)]
    for n in range(count):
        head = heads[n % 4][: int(rng.integers(10, 36))] if n % 4 < 3 else []
        prompt = head + rng.integers(2, 200, rng.integers(1, 20)).tolist()
        params = SamplingParams(
            temperature=n % 3 * 0.5, max_tokens=int(rng.integers(1, 36)), ignore_eos=True, repetition_penalty=1.2,
            frequency_penalty=0.4, min_tokens=n % 2, logit_bias={9: 1.5} if n % 5 == 0 else {}, logprobs=1,
            stop_token_ids=tuple(rng.integers(2, 200, 4).tolist()) if n % 2 else (),
        )  # fmt: skip
        yield Request(
            f"r{n}", tuple(prompt), params, seed=n, priority=int(rng.integers(-1, 2)), cache_salt="x" if n % 7 == 0 else ""
        )


def drain(engine, into):
    for output in engine.step():
        into.setdefault(output.request_id, []).append(output)


@pytest.fixture(scope="module")
def alone(both_layouts):
    """What each request gives when nothing runs beside it and nothing ran before that is shared."""
    engine, got = Engine(CpuExecutor(both_layouts, 1), (1,)), {}
    for request in mixed(COUNT):
        engine.submit(request)
        while engine.has_work:
            drain(engine, got)
    assert {o[-1].finish_reason for o in got.values()} == {"stop", "length"}
    return got


class Late(CpuExecutor):
    """Gives a step's results when one more has been launched, as a GPU does: until then nobody knows its tokens."""

    runs_ahead, guessed = True, 0

    def launch(self, rows):
        self.guessed += sum(UNKNOWN in r.sequence.tokens[r.start : r.start + r.count] for r in rows)
        found = super().launch(rows)
        return StepOutputs(found.token.copy(), found.logprobs.copy(), found.logprob_ids.copy(), found.logits)


CASES = {
    "static": (None, {}),
    "paged": (28, {}),
    "paged, nothing shared": (28, {"prefix_cache": False}),
    "tiny, computed again": (8, {"costs": COMPUTE}),
    "tiny, computed again, nothing shared": (8, {"costs": COMPUTE, "prefix_cache": False}),
    "tiny, copied": (8, {"costs": COPY, "offload_memory": 1 << 30}),
    "tiny, copied, nothing shared": (8, {"costs": COPY, "offload_memory": 1 << 30, "prefix_cache": False}),
    "tiny, copied where it fits": (8, {"costs": COPY, "offload_memory": 5 * 24576}),  # pages
}
ALL_COPIED = ("tiny, copied", "tiny, copied, nothing shared")


@pytest.mark.parametrize("kind", [CpuExecutor, Late])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_each_request_alone(both_layouts, alone, case, kind):
    pages, options = CASES[case]
    size = next(c.block_bytes for c in both_layouts.manifest.kv_caches if c.layout == "paged")
    cache = CacheOptions("paged", pages * size) if pages else CacheOptions("static")
    executor = kind(both_layouts, 4, cache)
    executor._kv[:] = 0xFF  # NaN: what is not written never counts
    engine, got, cancelled = Engine(executor, (1,), **options), {}, set()
    rng = np.random.default_rng(6)
    for n, request in enumerate(mixed(COUNT)):
        engine.submit(request)
        for _ in range(rng.integers(0, 6)):
            drain(engine, got)
        if n % 9 == 5:
            victim = f"r{rng.integers(n - 4, n + 1)}"
            cancelled |= {victim} if engine.cancel(victim) else set()
    while engine.has_work:
        drain(engine, got)
    for name, outputs in alone.items():
        mine = got.get(name, [])
        assert [o.token_id for o in mine] == [o.token_id for o in outputs[: len(mine)]], name
        if name not in cancelled:
            assert (mine[-1].finish_reason, len(mine)) == (outputs[-1].finish_reason, len(outputs))
    assert cancelled and engine.scheduler.free_slots == 4
    assert pages == 8 or kind is CpuExecutor or executor.guessed > 100
    if pages:
        assert engine.offload.used == 0
        assert engine.scheduler.pool.free_pages == pages
        assert engine.scheduler.preemptions >= (5 if pages == 8 else 0)
        assert (engine.offload.saves >= 3) == ("copied" in case)
        assert (engine.offload.saves < engine.scheduler.preemptions) == (pages == 8 and case not in ALL_COPIED)
        shared = sum(o[-1].cached_tokens for o in got.values())
        least = 0 if "nothing shared" in case else 200 if pages == 28 else 32
        assert shared >= least and bool(shared) == bool(least)
