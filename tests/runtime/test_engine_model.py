"""An engine under random load for long: whatever arrives, is cancelled, is late or loses its pages, every page has the
owners that it should have and every answer is the one that its request gets alone. `AOTC_SOAK_STEPS` says for how many
steps.
"""

import os
from collections import Counter

import numpy as np
import pytest
from fake_executor import COMPUTE, COPY, VOCAB, Clock, all_free, expected, make, request

from aotc.errors import OverloadedError
from aotc.runtime.sequence import NO_SLOT

pytestmark = pytest.mark.usefixtures("both_ways")

STEPS = int(os.environ.get("AOTC_SOAK_STEPS", "5000"))
PAGE = 4
HEADS = [[n] * 9 for n in range(3)]


class Load:
    """Random requests against one engine; `clock` is the number of the step."""

    def __init__(self, seed, staging=0, **options):
        self.rng, self.clock = np.random.default_rng(seed), Clock()
        self.engine, self.executor = make(
            num_pages=14, page_size=PAGE, max_num_seqs=4, max_num_batched_tokens=12, max_model_len=48, staging=staging,
            options={"clock": self.clock, "max_num_queued_reqs": 8, "max_queue_ms": 40_000, **options},
        )  # fmt: skip
        self.asked, self.got, self.left = {}, {}, set()
        self.seen = Counter()

    def arrive(self):
        rng, name = self.rng, f"r{len(self.asked)}"
        head = HEADS[rng.integers(len(HEADS))] if rng.random() < 0.6 else []
        prompt = head + rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()
        late = self.clock.now + int(rng.integers(5, 60)) if rng.random() < 0.3 else None
        made = request(
            name, prompt, int(rng.integers(3)), priority=int(rng.integers(-1, 2)), deadline=late,
            salt="x" if rng.random() < 0.2 else "", max_tokens=int(rng.integers(1, 24)),
            stop_token_ids=tuple(rng.integers(0, VOCAB, 3 if rng.random() < 0.4 else 0).tolist()),
        )  # fmt: skip
        try:
            self.engine.submit(made)
        except OverloadedError as error:
            assert 1 <= error.retry_after <= 60
            self.seen["refused"] += 1
        else:
            self.asked[name], self.got[name] = made, []
            self.left.add(name)

    def step(self, arrivals):
        if self.rng.random() < arrivals:
            self.arrive()
        if self.left and self.rng.random() < 0.03:
            name = sorted(self.left)[self.rng.integers(len(self.left))]
            assert self.engine.cancel(name)
            self.left.remove(name)
            self.seen["cancelled"] += 1
        self.clock.now += 1
        self.executor.steps.clear()
        preemptions = self.engine.scheduler.preemptions
        for output in self.engine.step():
            assert output.request_id in self.left
            self.take(output)
        late = {n for n in self.left if (self.asked[n].deadline or self.clock.now + 1) <= self.clock.now}
        assert not late, "past a deadline"
        self.check(preemptions)

    def take(self, output):
        name = output.request_id
        if output.finish_reason == "deadline":
            assert self.asked[name].deadline <= self.clock.now
        else:
            self.got[name].append(output.token_id)
        if output.finish_reason:
            self.seen[output.finish_reason] += 1
            self.left.remove(name)
            asked = self.asked[name]
            assert self.got[name] == expected(asked.prompt_token_ids, len(self.got[name]), asked.seed)
            if output.finish_reason == "stop":
                assert output.token_id in asked.params.stop_token_ids
            if output.finish_reason == "length":
                assert len(self.got[name]) == asked.params.max_tokens

    def check(self, preemptions):
        """Slots, pages and copies after a step: a slot and pages are a running sequence's, copies a waiting one's."""
        scheduler, engine = self.engine.scheduler, self.engine
        pool = scheduler.pool
        running, waiting = scheduler.running, scheduler.waiting
        assert {s.request.request_id for s in (*running, *waiting)} == self.left
        assert [s.turn for s in running] == sorted(s.turn for s in running)
        assert [s.turn for s in waiting] == sorted(s.turn for s in waiting)
        slots = [s.slot for s in running]
        assert len(set(slots)) == len(slots) == 4 - scheduler.free_slots and NO_SLOT not in slots
        assert all((s.slot, s.computed) == (NO_SLOT, 0) for s in waiting)
        leaving, coming = [s for s in waiting if s.pages.count], [s for s in running if s.saved]
        assert scheduler.copying == bool(leaving or coming)
        assert all(s.saved and s.pages.count == s.saved.copy.left > 0 for s in leaving)
        assert engine.offload.used == sum(s.saved.data.nbytes for s in (*running, *waiting) if s.saved)
        assert self.executor.staging or not leaving and not coming
        self.seen["leaving"], self.seen["coming"] = self.seen["leaving"] + len(leaving), self.seen["coming"] + len(coming)
        computed = sum(count for step in self.executor.steps for _, count, _ in step)
        if computed < self.executor.max_num_batched_tokens and scheduler.preemptions == preemptions and not leaving:
            assert all(s.pending == 1 for s in running if not s.saved), "a step had room for more of a prompt"
        contents = {}
        for s in leaving:
            for n, page in enumerate(s.pages.ids[: s.pages.count].tolist()):
                held = s.tokens[: (n + 1) * PAGE][: s.saved.computed]
                contents.setdefault(page, []).append((s.request.cache_salt, tuple(held)))
        for s in running:
            reached = s.saved.computed if s.saved else s.reached
            assert s.pages.count == -(-reached // PAGE)
            for n, page in enumerate(s.pages.ids[: s.pages.count].tolist()):
                contents.setdefault(page, []).append((s.request.cache_salt, tuple(s.tokens[: (n + 1) * PAGE][:reached])))
        assert [pool.owners(p) for p in range(pool.num_pages)] == [len(contents.get(p, ())) for p in range(pool.num_pages)]
        assert pool.free_pages == pool.num_pages - len(contents)
        shared = [c for c in contents.values() if len(c) > 1]
        assert all(len(set(c)) == 1 and len(c[0][1]) % PAGE == 0 for c in shared)
        self.seen["shared"] += len(shared)


@pytest.mark.parametrize(
    "options",
    [
        {"costs": COPY, "offload_memory": 1 << 20}, {"costs": COPY, "offload_memory": 8 * PAGE * 6},
        {"costs": COMPUTE}, {"costs": COMPUTE, "prefix_cache": False},
        {"costs": COPY, "offload_memory": 1 << 20, "prefix_cache": False},
        {"costs": COPY, "offload_memory": 1 << 20, "staging": 1},
        {"costs": COPY, "offload_memory": 1 << 20, "staging": 2, "prefix_cache": False},
    ],
)  # fmt: skip
def test_under_random_load(options):
    load = Load(1, **options)
    for n in range(STEPS):
        load.step(arrivals=0.5 if n // 200 % 2 else 0.1)  # overloaded, and nearly idle, in turn
    while load.left:
        load.step(arrivals=0)
    engine, copies = load.engine, load.executor.copied
    assert all_free(engine, load.executor)
    assert all(load.seen[kind] > STEPS // 500 for kind in ("refused", "cancelled", "deadline", "length", "stop")), load.seen
    assert engine.scheduler.preemptions > STEPS // 50
    assert (engine.offload.saves > STEPS // 500) == bool(copies) == (options["costs"] is COPY)
    slow = "staging" in options
    assert (load.seen["leaving"] > STEPS // 100) == (load.seen["coming"] > STEPS // 100) == slow, load.seen
    if engine.prefixes:
        assert engine.prefixes.hits > engine.prefixes.queries // 10 and load.seen["shared"] > STEPS // 50
    else:
        assert not load.seen["shared"]
