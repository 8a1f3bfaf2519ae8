"""Who goes first, who is refused at once, who ends because it is late, and how long anybody waits."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from fake_executor import VOCAB, Clock, all_free, expected, make, request, run, tokens

import aotc
from aotc.errors import OverloadedError, RequestError
from aotc.runtime.deadlines import Deadlines, deadline_after
from aotc.runtime.sequence import Sequence

pytestmark = pytest.mark.usefixtures("both_ways")


def waiting(engine):
    return [s.request.request_id for s in engine.scheduler.waiting]


def test_lower_priorities_go_first_and_equal_ones_as_they_came():
    engine, executor = make(max_num_seqs=1)
    for name, priority in (("b1", 1), ("a1", 0), ("z", -7), ("b2", 1), ("a2", 0)):
        engine.submit(request(name, [1], priority=priority, max_tokens=1))
    assert waiting(engine) == ["z", "a1", "a2", "b1", "b2"]
    assert list(run(engine)) == ["z", "a1", "a2", "b1", "b2"] and all_free(engine, executor)


@pytest.mark.parametrize("pages", [0, 20])
def test_a_deadline_ends_a_request_within_a_step_wherever_it_is(pages):
    """One decodes, one is in the middle of its prompt, one waits; one has ended before, one has time left."""
    clock = Clock()
    engine, executor = make(
        runs_ahead=False, num_pages=pages, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=80, options={"clock": clock}
    )
    engine.submit(request("done", [1], deadline=2.0, max_tokens=1))
    engine.submit(request("decodes", [1, 2], deadline=2.0, max_tokens=50))
    engine.submit(request("fine", [1, 2, 3], deadline=2.1, max_tokens=8))
    out = {}
    for _ in range(3):
        for output in engine.step():
            out.setdefault(output.request_id, []).append(output)
    engine.submit(request("prompt", [5] * 40, deadline=1.5))
    engine.submit(request("waits", [1], deadline=0.5))
    for _ in range(2):
        for output in engine.step():
            out.setdefault(output.request_id, []).append(output)
    assert [s.computed for s in engine.scheduler.running][-1] == 8 and waiting(engine) == ["waits"]
    clock.now = 2.0
    ended = {o.request_id: o for o in engine.step() if o.finish_reason}
    assert list(ended) == ["waits", "prompt", "decodes"], "the latest first"
    assert all((o.token_id, o.logprobs, o.finish_reason) == (-1, (), "deadline") for o in ended.values())
    assert [s.request.request_id for s in engine.scheduler.running] == ["fine"]
    assert engine.scheduler.free_slots == 2
    run(engine, out)
    assert tokens(out, "decodes") == expected([1, 2], 5)
    assert out["done"][-1].finish_reason == "length" == out["fine"][-1].finish_reason
    assert all_free(engine, executor)


def test_a_step_in_which_all_are_late_computes_nothing():
    clock = Clock()
    engine, executor = make(runs_ahead=False, options={"clock": clock})
    engine.submit(request("a", [1], deadline=1.0))
    clock.now = 0.5
    assert [o.request_id for o in engine.step()] == ["a"]
    clock.now = 1.0
    assert [(o.request_id, o.finish_reason) for o in engine.step()] == [("a", "deadline")]
    assert len(executor.steps) == 1 and engine.step() == [] and all_free(engine, executor)


def test_a_name_that_comes_again_has_a_deadline_of_its_own():
    clock = Clock()
    engine, _ = make(options={"clock": clock})
    engine.submit(request("a", [1], deadline=1.0, max_tokens=1))
    run(engine)
    engine.submit(request("a", [1], max_tokens=9))
    clock.now = 2.0
    assert len(run(engine)["a"]) == 9


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, "5", True, [1.0], np.ones(2)])
def test_a_deadline_is_a_number(wrong):
    with pytest.raises(RequestError, match="^deadline_ms is [-a-zA-Z ]+: give milliseconds from now, above 0$"):
        deadline_after(3.0, wrong)
    engine, executor = make()
    with pytest.raises(RequestError, match="^the deadline is [-a-zA-Z ]+: give a time of the engine's clock, in seconds$"):
        engine.submit(request("a", [1], deadline=wrong))
    assert all_free(engine, executor)


def test_milliseconds_from_now():
    given = (None, 1, 0.5, np.float32(2), np.int64(4), Fraction(1, 2))
    assert [deadline_after(3.0, ms) for ms in given] == [None, 3.001, 3.0005, 3.002, 3.004, 3.0005]
    for wrong in (0, -1, -0.0):
        with pytest.raises(RequestError, match=f"^deadline_ms is {wrong}: "):
            deadline_after(3.0, wrong)


def test_deadlines_of_what_has_ended_are_not_kept():
    deadlines, live = Deadlines(), []
    for n in range(1000):
        sequence = Sequence(request("a", [1], deadline=1e9 - n), 0, [1], number=n)
        deadlines.add(sequence)
        if n % 100:
            sequence.ended = True
        else:
            live.append(sequence)
    assert len(deadlines) <= 2 * len(live) + 64
    assert deadlines.passed(1e9 - 901) == [] and deadlines.passed(2e9) == live[::-1]


@pytest.fixture
def looks(monkeypatch):
    """looks(): how often a sequence was looked at, whose turn it has and whether it is another one, since asked last."""
    seen, turn = [0], Sequence.turn

    def look(answer):
        def method(*given):
            seen[0] += 1
            return answer(*given)

        return method

    monkeypatch.setattr(Sequence, "turn", property(look(turn.fget)))
    monkeypatch.setattr(Sequence, "request", _Looked(Sequence.request, look))
    monkeypatch.setattr(Sequence, "__eq__", look(lambda a, b: a is b))

    def count():
        before, seen[0] = seen[0], 0
        return before

    return count


class _Looked:
    """An attribute of a class with slots, whose reads are counted."""

    def __init__(self, slot, look):
        self._read, self._write = look(slot.__get__), slot.__set__

    def __get__(self, one, kind=None):
        return self._read(one, kind)

    def __set__(self, one, value):
        self._write(one, value)


@pytest.mark.parametrize("options", [{}, {"max_num_queued_reqs": 5000}, {"max_queue_ms": 9e9}])
def test_in_a_long_queue_nobody_is_looked_at_in_vain(looks, options):
    """To be queued, cancelled or late, and to see a queue that is too long, costs a few looks for each doubling of it."""
    clock, few = Clock(), 100
    engine, executor = make(max_num_seqs=1, options={"clock": clock, **options})
    engine.submit(request("runs", [1], max_tokens=9))
    engine.step()
    most = []
    for n in range(1000):
        engine.submit(request(f"r{n}", [1], priority=n % 3, deadline=2.0 if n % 2 else 9.0 - n / 1000))
        most.append(looks())
    for n in range(0, 1000, 4):
        assert engine.cancel(f"r{n}") and not engine.cancel(f"r{n}")
        most.append(looks())
    clock.now = 3.0
    engine.step()
    most.append(looks() / 500)
    left = waiting(engine)
    assert [int(name[1:]) % 4 for name in left] == [2] * 250
    looks()  # the test's own
    for name in ("runs", *left):
        assert engine.cancel(name)
        most.append(looks())
    assert max(most) < few and all_free(engine, executor)


def test_a_name_is_taken_while_its_request_is_not_done():
    engine, executor = make(max_num_seqs=1)
    for name in ("runs", "waits"):
        engine.submit(request(name, [1]))
        engine.step()
    for name in ("runs", "waits"):
        with pytest.raises(RequestError, match=f"^a request '{name}' is not done: give this one a name of its own$"):
            engine.submit(request(name, [2]))
    assert engine.cancel("waits")
    engine.submit(request("waits", [3], max_tokens=2))
    assert tokens(run(engine), "waits") == expected([3], 2) and all_free(engine, executor)


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_wait_of_those_that_go_before(seed):
    """With many priorities and preempted sequences among them, against a look at everybody."""
    rng, clock = random.Random(seed), Clock()
    options = {"max_queue_ms": 1e12, "clock": clock, "prefix_cache": False}
    engine, _ = make(num_pages=9, max_num_seqs=3, max_num_batched_tokens=40, options=options)
    preempted = 0
    for n in range(150):
        engine.submit(request(f"r{n}", [n % VOCAB] * rng.randrange(1, 9), priority=rng.choice([-9, 0, 1, 2, 8]), max_tokens=12))
        clock.now += 1
        if rng.randrange(3) == 0:
            engine.step()
        if rng.randrange(4) == 0:
            engine.cancel(f"r{rng.randrange(n + 1)}")
        queue = engine.scheduler.waiting
        preempted += any(s.cached_tokens is not None for s in queue)
        for priority in (-10, -9, -1, 0, 1, 5, 8, 9):
            waits = [clock.now - s.since for s in queue if s.request.priority <= priority and s.cached_tokens is None]
            assert engine._limits._oldest(priority) == max(waits, default=0.0)
    assert preempted > 10


@pytest.mark.parametrize("most", [0, 2])
def test_more_than_may_wait_are_refused_at_once(most):
    engine, executor = make(max_num_seqs=2, options={"max_num_queued_reqs": most})
    for n in range(2 + most):
        engine.submit(request(f"r{n}", [n], max_tokens=4))
    for _ in range(2):
        with pytest.raises(OverloadedError, match=r"^too many requests are waiting: try again in 1 s$") as caught:
            engine.submit(request("more", [1]))
        assert (caught.value.status, caught.value.retry_after) == (429, 1.0) and isinstance(caught.value, aotc.RequestError)
        engine.step()
        assert len(waiting(engine)) == most
    out = run(engine)
    engine.submit(request("more", [1]))
    assert set(run(engine, out)) == {*(f"r{n}" for n in range(2 + most)), "more"}
    assert all_free(engine, executor)


def test_a_queue_that_waits_for_pages_is_full_though_slots_are_free():
    engine, _ = make(num_pages=4, max_num_seqs=3, options={"max_num_queued_reqs": 1})
    engine.submit(request("runs", [1] * 10, max_tokens=6))
    for _ in range(2):
        engine.step()
    engine.submit(request("waits", [2] * 10))
    engine.step()
    assert waiting(engine) == ["waits"] and engine.scheduler.free_slots == 2
    with pytest.raises(OverloadedError):
        engine.submit(request("more", [1]))
    run(engine)
    engine.submit(request("more", [1]))


def test_nobody_queues_behind_one_that_has_waited_too_long():
    clock = Clock()
    engine, executor = make(max_num_seqs=1, options={"max_queue_ms": 2500, "clock": clock})
    engine.submit(request("runs", [1], max_tokens=9))
    engine.step()
    clock.now = 100.0
    engine.submit(request("waits", [1], max_tokens=1))
    clock.now = 102.5
    engine.submit(request("also", [1], max_tokens=1))
    clock.now = 103.6
    with pytest.raises(OverloadedError, match="^requests have been waiting for 3.6 s: try again in 4 s$") as caught:
        engine.submit(request("more", [1]))
    assert caught.value.retry_after == 4.0
    engine.submit(request("urgent", [1], priority=-1, max_tokens=1))
    with pytest.raises(OverloadedError):
        engine.submit(request("lazy", [1], priority=1))
    clock.now = 10000.0
    with pytest.raises(OverloadedError, match="try again in 60 s"):
        engine.submit(request("more", [1]))
    assert list(run(engine)) == ["runs", "urgent", "waits", "also"]
    engine.submit(request("more", [1]))
    assert run(engine)["more"] and all_free(engine, executor)


def test_a_preempted_request_does_not_count_as_one_that_waits_for_its_first_turn():
    clock = Clock()
    options = {"max_queue_ms": 1000, "clock": clock, "prefix_cache": False}
    engine, _ = make(num_pages=4, max_num_seqs=2, max_num_batched_tokens=40, options=options)
    for name in ("old", "young"):
        engine.submit(request(name, [1, 2, 3], max_tokens=10))
    while not engine.scheduler.preemptions:
        engine.step()
    clock.now = 1000.0
    engine.submit(request("more", [1]))
    clock.now = 1001.5
    with pytest.raises(OverloadedError):
        engine.submit(request("yet more", [1]))


def test_who_is_told_to_come_back_is_told_how_long_a_slot_took():
    clock = Clock()
    engine, _ = make(runs_ahead=False, max_num_seqs=1, options={"max_num_queued_reqs": 1, "clock": clock})
    for _ in range(30):
        engine.submit(request("a", [1], max_tokens=1))
        clock.now += 10.0
        engine.step()
    engine.submit(request("runs", [1]))
    engine.submit(request("waits", [1]))
    with pytest.raises(OverloadedError, match="try again in 10 s"):
        engine.submit(request("more", [1]))


@pytest.mark.parametrize("pages", [0, 100])
def test_decoding_never_waits_longer_than_one_chunk(pages):
    """Long prompts arrive all the time: whoever decodes has a token in every step, and no step is longer than a chunk."""
    engine, executor = make(num_pages=pages, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=100)
    engine.submit(request("first", [1], max_tokens=60))
    engine.submit(request("second", [2], max_tokens=60))
    engine.step()
    for n in range(58):
        if n % 7 == 0:
            engine.submit(request(f"long{n}", [n % VOCAB] * 50, max_tokens=1, priority=-1))
        got = [o.request_id for o in engine.step()]
        assert [name for name in got if not name.startswith("long")] == ["first", "second"]
        assert sum(count for _, count, _ in executor.steps[-1]) <= 8
    full = [step for step in executor.steps[1:] if len(step) > 2]
    assert len(full) > 50 and all(sum(count for _, count, _ in step) == 8 for step in full[:40]), "prompts take the rest"


@pytest.mark.parametrize("done", [1, 2, 3])
def test_cancelling_in_the_middle_of_a_prompt_frees_its_pages_at_once(done):
    engine, executor = make(num_pages=10, max_num_batched_tokens=8)
    engine.submit(request("a", [1] * 30))
    for _ in range(done):
        assert engine.step() == []
    assert engine.scheduler.pool.free_pages == 10 - 2 * done
    assert engine.cancel("a") and not engine.cancel("a")
    assert all_free(engine, executor) and engine.step() == []
