"""What one thread leads: calls that come while others end."""

from types import SimpleNamespace

from aotc.errors import DeviceLostError
from aotc.runtime.led_engine import LedEngine, Wish


class Call:
    """Of a request by its id; `ended` is called when it ends with an error."""

    def __init__(self, request_id, ended=lambda: None):
        self.request, self.errors, self.notify = SimpleNamespace(request_id=request_id), [], ended

    def fail(self, error):
        self.errors.append(error)


class Engine:
    """Fails in its first step with work, if it is to."""

    slack = 0

    def __init__(self, broken):
        self.begun, self.broken = [], broken

    @property
    def has_work(self):
        return bool(self.begun)

    def submit(self, request):
        self.begun.append(request.request_id)

    def step(self):
        if self.broken:
            raise DeviceLostError("step 1 failed")
        return ()


def test_who_asks_again_when_a_step_has_failed_is_answered_by_the_next_engine():
    engines = [Engine(True), Engine(False)]
    made = iter(engines)
    led = LedEngine(lambda: next(made), lambda: None)

    def ask(call):
        led.calls[call.request.request_id] = call
        led.unattended.add(call)
        led.inbox.append(Wish(call))

    again, same_name = Call("again"), Call("first")
    first = Call("first", lambda: (ask(again), ask(same_name)))
    late = Call("late")
    ask(first)
    led.answer_inbox()
    ask(late)  # still in the inbox when the step fails
    led.inbox.rotate()
    led.step()
    assert engines[0].begun == ["first", "late"] and [len(c.errors) for c in (first, late, again, same_name)] == [1, 1, 0, 0]
    led.inbox.appendleft(Wish(first, DeviceLostError("too late")))  # of a call that has ended: its namesake goes on
    led.step()
    assert engines[1].begun == ["again", "first"] and led.engine is engines[1] and not same_name.errors
    assert led.calls == {"again": again, "first": same_name} and not led.inbox
