"""The next step is launched late, but never too late: the device does not wait, and who comes is not two steps behind."""

import pytest
from fake_executor import Clock, FakeExecutor, expected, request, tokens

from aotc.runtime.engine import Engine
from aotc.runtime.led_engine import LedEngine
from aotc.runtime.pace import MARGIN, MOST, SHARE, Pace

HOST = 0.0003  # seconds that the host takes to launch a step


class Timed(FakeExecutor):
    """Steps take `seconds` each, one after the other; waiting for one lasts as long as it runs."""

    def __post_init__(self):
        super().__post_init__()
        self.runs_ahead, self.clock, self.seconds, self.free, self.idle, self.begun = True, Clock(), 0.01, 0.0, [], []

    def launch(self, rows):
        self.clock.now += HOST
        result = super().launch(rows)
        self.begun.append(max(self.free, self.clock.now))
        self.idle.append(self.begun[-1] - self.free)
        self.free = self.begun[-1] + self.seconds
        result.end = self.free
        return result

    def wait(self, step):
        self.clock.now = max(self.clock.now, step.end)
        return super().wait(step)


@pytest.fixture
def timed():
    executor = Timed(max_num_seqs=3, max_model_len=200)
    return Engine(executor, (), clock=executor.clock), executor


def go_on(engine, executor, out):
    executor.clock.now += engine.slack
    for o in engine.step():
        out.setdefault(o.request_id, []).append(o)


def test_the_device_never_waits_and_the_host_waits_as_long_as_it_can(timed):
    engine, executor = timed
    engine.submit(request("a", [1, 2], max_tokens=60))
    out, slacks = {}, []
    while engine.has_work:
        slacks.append(engine.slack)
        go_on(engine, executor, out)
    assert tokens(out, "a") == expected([1, 2], 60)
    assert max(executor.idle[1:]) == 0
    usual = 0.01 * (1 - SHARE) - MARGIN - 2 * HOST
    assert usual < slacks[30] < 0.01 - HOST, "nothing was known of a step of one token before"
    assert slacks[0] == slacks[1] == 0


def test_who_comes_while_a_step_runs_is_in_the_next_one(timed):
    engine, executor = timed
    engine.submit(request("a", [1, 2], max_tokens=90))
    out = {}
    for _ in range(30):
        go_on(engine, executor, out)
    executor.clock.now += engine.slack
    launched = len(executor.steps)
    engine.submit(request("b", [3], max_tokens=2))
    engine.step()
    assert [name for name, *_ in executor.steps[launched]] == ["a", "b"]
    assert executor.idle[-1] == 0


def test_a_step_that_became_shorter_is_believed_at_once_and_a_longer_one_slowly():
    pace = Pace()
    pace.ran(4, 4, 0.010)
    first = pace.slack(4, 4, 0.0)
    pace.ran(4, 4, 0.004)
    assert pace.slack(4, 4, 0.0) == pytest.approx(first - 0.006 * (1 - SHARE))
    pace.ran(4, 4, 0.010)
    assert pace.slack(4, 4, 0.0) == pytest.approx(0.004 * 1.02 * (1 - SHARE) - MARGIN)


def test_slack_is_of_steps_of_the_kind_and_never_long():
    pace = Pace()
    pace.ran(4, 4, 1.0)
    assert pace.slack(4, 4, 0.0) == MOST and pace.slack(3, 3, 0.0) == MOST
    assert pace.slack(5, 5, 0.0) == pace.slack(1, 4, 0.0) == 0.0, "nothing is known of these"
    assert pace.slack(4, 4, 0.895) == pytest.approx(0.9 - 0.895 - MARGIN)
    assert pace.slack(4, 4, 0.9) == pace.slack(4, 4, 5.0) == 0.0
    pace.launched(0.002)
    assert pace.slack(4, 4, 0.895) == pytest.approx(0.9 - 0.895 - MARGIN - 0.002)
    for _ in range(100):
        pace.launched(0.0001)
    assert pace.slack(4, 4, 0.895) == pytest.approx(0.9 - 0.895 - MARGIN - 0.0001)


def test_a_device_that_is_not_ahead_is_not_waited_for():
    executor = FakeExecutor(runs_ahead=False)
    engine = Engine(executor, (), clock=Clock())
    engine.submit(request("a", [1]))
    while engine.has_work:
        assert engine.slack == 0
        engine.step()


def test_who_leads_sleeps_for_as_long_as_it_was_told():
    """What the slack is later is less: nobody asks for it twice."""

    class Told:
        has_work = False
        said = iter((0.0005, -1.0))

        @property
        def slack(self):
            return next(self.said)

    told = Told()
    LedEngine(lambda: told, lambda: None).step()
    assert next(told.said) == -1.0
