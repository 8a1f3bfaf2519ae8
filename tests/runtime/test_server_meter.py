"""What the engine's process counts, held against an engine whose steps are known, with a clock of the test's own."""

import pytest
from fake_executor import FakeExecutor

from aotc.runtime.engine import Engine
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request
from aotc.runtime.server import engine_process
from aotc.runtime.server.engine_meter import EngineMeter
from aotc.runtime.server.messages import Alive, Load, Outputs, Submit, pack, unpack


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def metered(clock, **options):
    """(engine, its meter); every step takes a quarter of a second."""
    executor = FakeExecutor(**options)
    real = executor.step

    def step(rows):
        clock.now += 0.25
        return real(rows)

    executor.step = step
    engine = Engine(executor, (), clock=clock)
    return engine, EngineMeter(engine, clock)


def submit(engine, meter, name, prompt=(1, 2, 3), max_tokens=2):
    engine.submit(Request(name, tuple(prompt), SamplingParams(temperature=0, max_tokens=max_tokens)))
    meter.submitted(name)


def test_waits_and_steps(clock):
    engine, meter = metered(clock, max_num_seqs=2)
    submit(engine, meter, "a")
    submit(engine, meter, "b")
    submit(engine, meter, "c")  # waits for a slot: two steps
    clock.now += 1
    while engine.has_work:
        meter.step()
    load = meter.load()
    assert load.waits == [1.0, 1.0, 1.5]
    assert load.steps == [(0.25, 2, 6), (0.25, 2, 2), (0.25, 1, 3), (0.25, 1, 1)]
    assert (load.running, load.waiting, load.cache_usage) == (0, 0, 0.0)
    assert meter.load() == Load(0, 0, 0.0)  # differences


def test_who_leaves_before_it_runs_did_not_wait_for_anything(clock):
    engine, meter = metered(clock, max_num_seqs=1)
    submit(engine, meter, "a")
    submit(engine, meter, "b")
    meter.step()
    meter.cancelled("b")
    engine.cancel("b")
    load = meter.load()
    assert (load.running, load.waiting, load.cache_usage, load.waits) == (1, 0, 1.0, [0.0])
    while engine.has_work:
        meter.step()
    assert meter.load().waits == [] and not meter._since


def test_one_token_is_a_whole_life(clock):
    """It runs and ends within one step: it is in no list afterwards."""
    engine, meter = metered(clock)
    submit(engine, meter, "a", max_tokens=1)
    meter.step()
    load = meter.load()
    assert (load.waits, load.steps) == ([0.0], [(0.25, 1, 3)])


def test_the_cache_of_prefixes_and_preemptions(clock):
    engine, meter = metered(clock, num_pages=4, page_size=4, max_num_seqs=2)
    prompt = tuple(range(1, 10))
    submit(engine, meter, "a", prompt, 1)
    while engine.has_work:
        meter.step()
    assert (load := meter.load()).prefix_queries == 9 and load.prefix_hits == 0
    submit(engine, meter, "b", prompt, 1)
    while engine.has_work:
        meter.step()
    assert (load := meter.load()).prefix_queries == 9 and load.prefix_hits == 8
    submit(engine, meter, "c", (1, 2, 3), 9)
    submit(engine, meter, "d", (4, 5, 6), 9)
    while engine.has_work:
        meter.step()
    assert meter.load().preemptions == engine.scheduler.preemptions > 0
    assert meter.load().preemptions == 0


def test_messages_keep_their_fields():
    load = Load(1, 2, 0.5, 3, 4, 5, [0.1], [(0.2, 6, 7)])
    assert unpack(pack(Outputs([], load))[4:]).load == load
    asked = Submit("a", [1, 2], {}, 3, 4, -5, "salt", 1.5)
    assert unpack(pack(asked)[4:]) == asked
    alive = Alive(load, 8, {"device_used": 1 << 40})
    assert unpack(pack(alive)[4:]) == alive


def test_tokens_of_steps_that_run_ahead_are_counted_when_they_have_ended(clock):
    engine, meter = metered(clock, runs_ahead=True, max_num_batched_tokens=2)
    submit(engine, meter, "a", (1, 2, 3), 3)
    while engine.has_work:
        meter.step()
    assert [tokens for _, _, tokens in meter.load().steps] == [0, 2, 1, 1, 1]


def test_a_gpu_is_asked_now_and_then(gpu, monkeypatch, clock):
    device, driver = gpu()
    monkeypatch.setattr(engine_process.time, "monotonic", clock)
    memory, total = engine_process.GpuMemory(device), 1 << 40
    assert memory.news() == {"device_used": total - driver.free, "device_total": total}
    driver.free -= 4096
    assert memory.news() == {}
    clock.now += engine_process.HEARTBEAT
    assert memory.news() == {"device_used": total - driver.free, "device_total": total}
    assert engine_process.GpuMemory(None).news() == {}
