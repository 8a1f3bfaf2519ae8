"""The batcher's policy, on a clock that the test turns: who leaves with whom, and when."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotc.runtime.batcher import IDLE_QUEUES, MARGIN, BatchOptions, BatchPolicy


def policy(**options):
    return BatchPolicy(BatchOptions(**{"max_batch_size": 4, "max_wait": 5.0, **options}))


def test_a_lone_request_does_not_wait():
    p = policy()
    for now in (0.0, 100.0, 200.0):
        p.add("q", now, now)
        assert p.wake() == now
        assert p.take(now).items == [now]
        assert (p.take(now), p.wake(), len(p)) == (None, None, 0)


def steady(p, gap, count=20, start=0.0):
    """Arrivals of many callers, so that the queue knows their gap and that they are many. The time of the next one."""
    for n in range(count):
        p.add("q", n, start + n * gap)
        if n % 2:
            while p.take(start + n * gap + 1000):
                p.ran("q", 0.0)
    return start + count * gap


def callers(options, count, run_time, seconds, think=0.0):
    """Callers that ask again once they are answered, and a worker. (mean size of a batch, mean wait)."""
    p, now, sizes, waits = BatchPolicy(options), 0.0, [], []
    due = [(n * 1e-5, n) for n in range(count)]
    while now < seconds:
        for at, n in [d for d in due if d[0] <= now]:
            due.remove((at, n))
            p.add("q", (n, at), at)
        batch = p.take(now)
        if batch is not None:
            sizes.append(len(batch.items))
            waits += [now - at for _, at in batch.items]
            done = now + run_time
            for at, n in sorted(d for d in due if d[0] <= done):  # they come while it runs
                due.remove((at, n))
                p.add("q", (n, at), at)
            p.ran("q", run_time)
            due += [(done + think + 1e-5 * (k + 1), n) for k, (n, _) in enumerate(batch.items)]
            now = done
            continue
        now = min([t for t in (p.wake(), *(at for at, _ in due)) if t is not None and t > now])
    later = sizes[len(sizes) // 2 :], waits[len(waits) // 2 :]
    return tuple(sum(a) / len(a) for a in later)


@pytest.mark.parametrize("think", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("run_time", [0.0001, 0.002])
def test_one_caller_that_asks_again_is_never_waited_for(think, run_time):
    assert callers(BatchOptions(16), 1, run_time, 2.0, think) == (1.0, 0.0)


def test_who_is_left_alone_is_soon_not_waited_for():
    p = policy()
    now, waits = steady(p, 0.5), 0
    for n in range(10):
        p.add("q", n, now)
        leaves = p.wake()
        waits += leaves > now
        assert p.take(leaves).items == [n]
        p.ran("q", 0.1)
        now = leaves + 0.3
    assert 1 <= waits <= 3


@pytest.mark.parametrize(("run_time", "least"), [(0.0001, 11), (0.002, 6)])
def test_callers_that_ask_again_run_together(run_time, least):
    """All at once, or, where runs are long, in two groups of which one waits while the other runs."""
    size, wait = callers(BatchOptions(64), 12, run_time, 1.0)
    assert size >= least and wait < run_time + 0.0005


@pytest.mark.parametrize(("gap", "waits"), [(0.0005, True), (0.05, False)])
def test_callers_that_do_not_know_of_each_other(gap, waits):
    """Arrivals at random, whoever is answered: at short gaps they share runs, at long ones nobody waits."""
    rng, now, requests = random.Random(0), 0.0, []
    for _ in range(1000):
        now = rng.expovariate(1 / gap)
        requests.append((now, "a", 1, None))
    arrivals, batches, _ = simulate(BatchOptions(64), requests, 0.0001)
    mean = sum(at - arrivals[n][0] for at, b in batches for n in b.items) / len(arrivals)
    assert (len(batches) < 500) == waits
    assert (mean > 0.0005) == waits and mean < 0.003


def test_it_waits_while_another_one_is_expected_and_not_longer():
    p = policy()
    now = steady(p, 1.0)
    p.add("q", "a", now)
    assert p.take(now) is None and p.take(now + 1.99) is None
    assert p.wake() == pytest.approx(now + 2.0), "two gaps without an arrival are enough"
    p.add("q", "b", now + 1)
    assert p.take(now + 2) is None
    assert p.wake() == pytest.approx(now + 3.0)
    assert p.take(now + 3).items == ["a", "b"]


def test_it_does_not_wait_for_what_comes_too_late():
    p = policy()
    now = steady(p, 6.0)
    p.add("q", "a", now)
    assert p.take(now).items == ["a"]


def test_the_oldest_waits_no_longer_than_max_wait():
    p = policy(max_batch_size=100)
    now = steady(p, 1.0)
    for n in range(5):
        p.add("q", n, now + n)
        assert p.take(now + n) is None
    assert p.wake() == pytest.approx(now + 5.0)
    assert p.take(now + 5).items == [0, 1, 2, 3, 4]


def test_a_full_batch_leaves_at_once():
    p = policy()
    now = steady(p, 0.001)
    for n in range(9):
        p.add("q", n, now)
    assert [p.take(now).items, p.take(now).items, p.take(now)] == [[0, 1, 2, 3], [4, 5, 6, 7], None]
    assert p.take(now + 5).items == [8]


def test_min_batch_size_waits_also_at_low_load():
    p = policy(min_batch_size=2)
    p.add("q", "a", 0.0)
    assert p.take(4.9) is None and p.wake() == 5.0
    p.add("q", "b", 4.9)
    assert p.wake() <= 5.0
    assert p.take(5.0).items == ["a", "b"]
    p.add("q", "c", 100.0)
    assert p.take(104.9) is None
    assert p.take(105.0).items == ["c"], "also when nothing new arrives"


def test_load_after_an_idle_time_is_seen_soon():
    p = policy(max_batch_size=1000)
    now = steady(p, 0.01) + 1e6
    for n in range(20):
        p.add("q", n, now + n * 0.01)
        if p.take(now + n * 0.01) is None:
            break
    assert 0 < n < 15


def test_no_wait_for_others_where_max_wait_is_zero():
    p = policy(max_wait=0.0)
    now = steady(p, 0.0)
    p.add("q", "a", now)
    assert p.take(now).items == ["a"]


def test_queues_do_not_mix_and_the_oldest_goes_first():
    p = policy()
    for n, key in enumerate("abab"):
        p.add(key, (key, n), float(n))
    assert [p.take(20.0).items, p.take(20.0).items] == [[("a", 0), ("a", 2)], [("b", 1), ("b", 3)]]


def test_rows_count_and_order_is_kept():
    p = policy()
    for n, rows in enumerate((3, 2, 1, 4)):
        p.add("q", n, 0.0, rows)
    assert [(b.items, b.rows) for b in iter(lambda: p.take(10.0), None)] == [([0], 3), ([1, 2], 3), ([3], 4)]


def test_a_batch_of_a_preferred_size_waits_no_longer():
    p = policy(max_batch_size=16, preferred=(1, 2, 4, 8, 32), min_batch_size=3)
    now, waits = steady(p, 1.0), []
    for n in range(1, 10):
        p.add("q", n, now)
        waits.append(p.wake() > now)
    assert waits == [True, True, True, False, True, True, True, False, False], "4, and from 8 on: 16 is no program's"
    p.add("q", 10, now)
    assert p.take(now).rows == 10, "one larger program is faster than two"


def test_a_single_row_waits_where_one_is_a_preferred_size():
    p = policy(preferred=(1, 4))
    now = steady(p, 1.0)
    p.add("q", "a", now)
    assert p.take(now) is None and p.wake() == pytest.approx(now + 2.0)


@pytest.mark.parametrize("gap", [0.0001, 0.0005, 0.001])
def test_preferred_sizes_shorten_the_wait_of_callers_that_do_not_know_of_each_other(gap):
    def mean_wait(preferred):
        rng = random.Random(0)
        requests = [(rng.expovariate(1 / gap), "a", 1, None) for _ in range(1000)]
        arrivals, batches, _ = simulate(BatchOptions(64, preferred=preferred), requests, 0.0001)
        return sum(at - arrivals[n][0] for at, b in batches for n in b.items) / len(arrivals)

    assert mean_wait((1, 4, 16, 64)) < 0.6 * mean_wait(())


def test_a_batch_leaves_before_a_deadline_of_its_own():
    p = policy(min_batch_size=4)
    p.add("q", "a", 0.0, deadline=3.0)
    assert p.wake() == pytest.approx(3.0 - MARGIN) and p.take(2.9) is None
    p.ran("q", 4.0)
    assert p.wake() == pytest.approx(2.0 - MARGIN), "early enough to run, by the average"
    assert p.take(2.0).items == ["a"]


def test_expired_requests_come_out_and_are_not_computed():
    p = policy(min_batch_size=4)
    for n in range(3):
        p.add("q", n, 0.0, deadline=1.0 if n != 1 else None)
    p.add("r", "other", 0.0, deadline=2.0)
    assert p.expire(0.5) == [] and p.expire(1.0) == [0, 2]
    assert len(p) == 2 and p.expire(1.0) == []
    assert p.take(5.0).items == [1]
    assert p.expire(9.0) == ["other"] and len(p) == 0 and p.wake() is None


def test_memory_of_idle_queues_is_bounded():
    p = policy()
    for n in range(10 * IDLE_QUEUES):
        p.add(n, n, 0.0)
        p.take(0.0)
    assert len(p._idle) == IDLE_QUEUES and not p._active


def test_clear_takes_everything_out():
    p = policy(min_batch_size=4)
    for n in range(3):
        p.add(n % 2, n, 0.0)
    assert sorted(p.clear()) == [0, 1, 2] and len(p) == 0 and p.clear() == []


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 0.02), st.sampled_from("abc"), st.integers(1, 4), st.none() | st.floats(0, 0.02)
    ), max_size=40,
)  # fmt: skip
OPTIONS = st.builds(
    BatchOptions, st.integers(4, 9), st.sampled_from([0.0, 0.001, 0.005]), st.integers(1, 4),
    st.sampled_from([(), (2, 4), (1, 2, 4, 8)]),
)  # fmt: skip


def simulate(options, requests, run_time):
    """A worker that turns to the policy whenever it says so. (batches as (time, items), expired as (time, item), the
    times at which the worker was free, arrivals)."""
    p, arrivals, now = BatchPolicy(options), [], 0.0
    for n, (gap, key, rows, limit) in enumerate(requests):
        now += gap
        arrivals.append((now, n, key, rows, None if limit is None else now + limit))
    batches, expired, pending, now = [], [], list(arrivals), 0.0
    while pending or len(p):
        while pending and pending[0][0] <= now:
            at, n, key, rows, deadline = pending.pop(0)
            p.add(key, n, at, rows, deadline)
        expired += [(now, n) for n in p.expire(now)]
        batch = p.take(now)
        if batch is not None:
            batches.append((now, batch))
            now += run_time
            while pending and pending[0][0] <= now:
                at, n, key, rows, deadline = pending.pop(0)
                p.add(key, n, at, rows, deadline)
            p.ran(batch.key, run_time)
            continue
        times = [t for t in (p.wake(), pending[0][0] if pending else None) if t is not None]
        if times:
            assert min(times) > now, "a worker that is told to come at once finds nothing to do"
            now = min(times)
    return arrivals, batches, expired


@settings(max_examples=300)
@given(OPTIONS, REQUESTS, st.sampled_from([0.0, 0.0004, 0.02]))
def test_any_load(options, requests, run_time):
    arrivals, batches, expired = simulate(options, requests, run_time)
    out = [n for _, b in batches for n in b.items] + [n for _, n in expired]
    assert sorted(out) == list(range(len(requests))), "each request once"
    for key in "abc":
        order = [n for _, b in batches if b.key == key for n in b.items]
        assert order == sorted(order), "in the order of the queue"
    for at, batch in batches:
        assert {arrivals[n][2] for n in batch.items} == {batch.key}
        assert batch.rows == sum(arrivals[n][3] for n in batch.items) <= options.max_batch_size
        for n in batch.items:
            arrived, _, _, _, deadline = arrivals[n]
            assert deadline is None or at < deadline, "nothing is computed after its deadline"
            if run_time == 0.0:  # a worker that is always free
                assert at <= arrived + options.max_wait + 1e-9
    for at, n in expired:
        assert at >= arrivals[n][4]
        assert run_time or arrivals[n][4] == arrivals[n][0], "a worker that is free lets nobody miss a deadline"
