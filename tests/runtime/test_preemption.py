"""Who loses its pages when there are none, how it gets them back, and that its answer stays."""

import pytest
from fake_executor import COMPUTE, COPY, Clock, all_free, expected, make, request, run, tokens

from aotc.runtime.offload import Costs, Offload

pytestmark = pytest.mark.usefixtures("both_ways")

PLENTY = 1 << 20


def waiting(engine):
    return [s.request.request_id for s in engine.scheduler.waiting]


def until_preempted(engine, count=1):
    while engine.scheduler.preemptions < count:
        engine.step()


def two(costs, memory=PLENTY, **options):
    """Two sequences of 3 pages each in a pool of 4, one of which was just preempted."""
    options = {"costs": costs, "offload_memory": memory, "prefix_cache": False} | options
    engine, executor = make(num_pages=4, max_num_seqs=2, max_num_batched_tokens=40, options=options)
    for name in ("old", "young"):
        engine.submit(request(name, [1, 2, 3], max_tokens=9, repetition_penalty=1.5))
    until_preempted(engine)
    assert waiting(engine) == ["young"]
    return engine, executor


def test_pages_are_copied_out_and_back_and_nothing_is_computed_again():
    engine, executor = two(COPY)
    assert executor.copied == [("save", 2)] and engine.offload.used == 2 * executor.page_bytes
    before = len(executor.steps)
    out = run(engine)
    assert executor.copied == [("save", 2), ("load", 2)] and engine.offload.saves == 1
    assert [count for step in executor.steps[before:] for _, count, _ in step] == [1] * (len(executor.steps) - before)
    assert tokens(out, "young") == expected([1, 2, 3], 9)[-len(out["young"]) :]
    assert all_free(engine, executor)


@pytest.mark.parametrize(("costs", "memory"), [(COMPUTE, PLENTY), (COPY, 0), (COPY, 63)])
def test_what_is_dearer_to_copy_or_does_not_fit_is_computed_again(costs, memory):
    """2 pages of 32 bytes each."""
    engine, executor = two(costs, memory)
    run(engine)
    assert executor.copied == [] and engine.offload.saves == 0
    assert max(count for step in executor.steps[1:] for _, count, _ in step) > 8
    assert all_free(engine, executor)


def test_host_memory_for_exactly_what_is_copied_is_enough():
    _, executor = two(COPY, memory=64)
    assert executor.copied == [("save", 2)]


def test_only_pages_that_are_not_known_any_more_are_copied_back():
    engine, executor = make(
        num_pages=6, max_num_seqs=2, max_num_batched_tokens=40, options={"costs": COPY, "offload_memory": PLENTY}
    )
    engine.submit(request("old", [1] * 9, max_tokens=8))
    engine.submit(request("young", [2] * 9, max_tokens=8))
    out = run(engine)
    assert executor.copied == [("save", 3), ("load", 1)], "of three full pages, the other sequence took the last one"
    assert tokens(out, "young") == expected([2] * 9, 8) and all_free(engine, executor)


def test_pages_that_came_back_are_known_again():
    engine, executor = make(
        num_pages=4, max_num_seqs=2, max_num_batched_tokens=40, options={"costs": COPY, "offload_memory": PLENTY}
    )
    engine.submit(request("old", [1, 1, 1], max_tokens=14))
    engine.submit(request("young", [2, 2, 2], max_tokens=14))
    out = run(engine)
    assert executor.copied == [("save", 2), ("load", 2)], "the other sequence took both"
    engine.submit(request("again", [2, 2, 2, *tokens(out, "young")[:6]], max_tokens=1))
    assert run(engine)["again"][0].cached_tokens == 8


def test_a_sequence_that_comes_back_takes_what_others_computed_meanwhile():
    """Its copies hold 5 tokens of its prompt; another request with the same prompt has computed all of it since."""
    engine, executor = make(
        runs_ahead=False, num_pages=10, max_num_seqs=2, max_num_batched_tokens=6,
        options={"costs": COPY, "offload_memory": PLENTY},
    )  # fmt: skip
    engine.submit(request("other", [1] * 5, max_tokens=4))
    engine.step()
    engine.submit(request("late", [2] * 12, priority=1, max_tokens=3))
    engine.step()
    (late,) = [s for s in engine.scheduler.running if s.request.request_id == "late"]
    assert late.computed == 5
    engine.scheduler._preempt(late)
    engine.submit(request("same", [2] * 12, max_tokens=3))
    out = run(engine)
    assert executor.copied == [("save", 2)], "nothing had to be copied back"
    assert {o.cached_tokens for o in out["late"]} == {0}
    assert tokens(out, "late") == expected([2] * 12, 3) == tokens(out, "same") and all_free(engine, executor)
    assert [c for step in executor.steps for name, c, _ in step if name == "late"][:2] == [5, 4]


def slow(num_pages, **requests):
    """Copies of a page a step; name=(prompt, max_tokens)."""
    options = {"costs": COPY, "offload_memory": PLENTY, "prefix_cache": False}
    engine, executor = make(num_pages=num_pages, max_num_batched_tokens=60, staging=1, options=options)
    for name, (prompt, count) in requests.items():
        engine.submit(request(name, prompt, max_tokens=count))
    return engine, executor


def test_while_one_is_copied_out_no_other_is_preempted():
    """Both others need a page in the same step, and two are copied, one a step."""
    asked = {"old": ([1] * 8, 5), "middle": ([2] * 8, 5), "young": ([3] * 8, 5)}
    engine, executor = slow(6, **asked)
    until_preempted(engine)
    assert engine.scheduler.running[-1].request.request_id == "middle" and engine.scheduler.copying
    assert [name for name, _, _ in executor.steps[-1]] == ["old"], "the other waits for the second page"
    out = run(engine)
    assert executor.copied == [("save", 2), ("load", 2)] and engine.scheduler.preemptions == 1
    for name, (prompt, count) in asked.items():
        assert tokens(out, name) == expected(prompt, count)[-len(out[name]) :]
    assert all_free(engine, executor)


def test_a_sequence_that_comes_back_can_lose_its_pages_again():
    """In the middle of a copy: what was copied out is still whole."""
    engine, executor = slow(6, old=([1] * 8, 12), brief=([2] * 4, 3), young=([3] * 9, 8))
    out = run(engine)
    assert executor.copied == [("save", 3), ("load", 3), ("load", 3)] and engine.scheduler.preemptions == 2
    assert tokens(out, "young") == expected([3] * 9, 8) and tokens(out, "old") == expected([1] * 8, 12)
    assert all_free(engine, executor)


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_copies_of_a_request_that_ends_are_dropped(end):
    clock = Clock()
    options = {"costs": COPY, "offload_memory": PLENTY, "clock": clock}
    engine, executor = make(num_pages=4, max_num_seqs=2, max_num_batched_tokens=40, options=options)
    for name in ("old", "young"):
        engine.submit(request(name, [1, 2, 3], max_tokens=12, deadline=5.0 if name == "young" else None))
    until_preempted(engine)
    assert engine.offload.used
    if end == "cancel":
        assert engine.cancel("young")
    else:
        clock.now = 5.0
        (late, _) = engine.step()
        assert (late.request_id, late.token_id, late.finish_reason) == ("young", -1, "deadline")
    assert engine.offload.used == 0 and waiting(engine) == []
    run(engine)
    assert all_free(engine, executor)


def test_the_lowest_priority_loses_first_then_the_youngest():
    engine, executor = make(num_pages=4, max_num_seqs=4, max_num_batched_tokens=40, max_model_len=17)
    prompts = {"low": [1], "old": [1, 2], "young": [1], "high": [1, 2, 3]}
    for name, priority in (("low", 1), ("old", 0), ("young", 0), ("high", -1)):
        engine.submit(request(name, prompts[name], priority=priority, max_tokens=12))
    out = {}
    lost = []
    while engine.has_work:
        for output in engine.step():
            out.setdefault(output.request_id, []).append(output)
        lost += [name for name in waiting(engine) if name not in lost]
    assert lost == ["low", "young", "old"], "each gave way to those before it"
    for name, prompt in prompts.items():
        assert tokens(out, name) == expected(prompt, 12)
    assert all_free(engine, executor)


def test_the_one_that_goes_first_is_never_preempted():
    """A new request of a higher priority takes pages of all others, and none takes its."""
    engine, executor = make(num_pages=6, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=24)
    for n in range(2):
        engine.submit(request(f"low{n}", [n] * 8, priority=5, max_tokens=10))
    for _ in range(5):
        engine.step()
    engine.submit(request("high", [9] * 7, max_tokens=16))
    ran = []
    while engine.has_work:
        engine.step()
        ran.append("high" in [s.request.request_id for s in engine.scheduler.running])
    first = ran.index(True)
    assert ran[first:] == [True] * sum(ran) + [False] * (len(ran) - first - sum(ran))
    assert engine.scheduler.preemptions >= 2 and all_free(engine, executor)


def test_costs_follow_what_is_measured():
    clock = Clock()
    engine, executor = make(num_pages=10, max_num_batched_tokens=40, options={"clock": clock})
    step = executor.step

    def slow(rows):
        clock.now += 0.5 * sum(r.count for r in rows)
        return step(rows)

    executor.step = slow
    before = engine.costs.token
    engine.submit(request("a", [1] * 20, max_tokens=3))
    run(engine)
    assert engine.costs.token == before + 0.2 * (0.5 - before), "the prompt counts, single tokens do not"


def test_the_cheaper_way_is_taken():
    class Pages:
        page_bytes = 1000

    def worth(limit=10**9, **costs):
        return Offload(Pages(), limit, Costs(**costs, fixed=True), Clock()).worth(100, 3)

    assert worth(token=1.0, byte=0.016) and not worth(token=1.0, byte=0.017), "6000 bytes there and back"
    assert worth(3000, token=1.0, byte=0.0) and not worth(2999, token=1.0, byte=0.0)
    assert not Offload(Pages(), 10**9, Costs(1.0, 0.0), Clock()).worth(0, 0), "there is nothing to copy"
    measured = Costs(1.0, 1.0)
    measured.copied(10, 20.0)
    measured.computed(10, 0.0)
    assert (measured.token, measured.byte) == (pytest.approx(0.8), pytest.approx(1.2))
    measured.fixed = True
    measured.copied(10, 50.0)
    measured.computed(10, 50.0)
    assert (measured.token, measured.byte) == (pytest.approx(0.8), pytest.approx(1.2))
