"""The circuit breaker under a clock of the test's own, and what the server says while it is open."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import events

from aotc.runtime.server.breaker import CircuitBreaker, State, Thresholds

LIMITS = Thresholds(window=10.0, least=4, rate=0.5, rest=5.0, longest=15.0, trials=2)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(LIMITS, clock)


def ends(breaker, *outcomes):
    """Requests one after the other."""
    for failed in outcomes:
        breaker.end(breaker.begin(), failed)


def test_it_stays_closed_below_the_rate_and_below_the_least(breaker):
    ends(breaker, True, True, True)
    assert breaker.state is State.CLOSED
    ends(breaker, False, False, False, False, True)  # four of eight are the rate
    assert breaker.state is State.OPEN


def test_a_success_never_opens_it(breaker):
    ends(breaker, True, True, True, False)
    assert breaker.state is State.CLOSED and breaker.retry_after() is None


def test_old_outcomes_are_forgotten(breaker, clock):
    ends(breaker, True, True, True)
    clock.now += 10.0
    ends(breaker, True)
    assert breaker.state is State.CLOSED
    ends(breaker, True, True, True)
    assert breaker.state is State.OPEN


def test_what_is_no_outcome_does_not_count(breaker):
    ends(breaker, *[None] * 9, True, True, True)
    assert breaker.state is State.CLOSED


def test_open_half_open_closed(breaker, clock):
    ends(breaker, *[True] * 4)
    assert breaker.retry_after() == 5
    clock.now += 3.5
    assert (breaker.state, breaker.retry_after()) == (State.OPEN, 2)
    clock.now += 1.5
    assert (breaker.state, breaker.retry_after()) == (State.HALF_OPEN, None)
    first, second = breaker.begin(), breaker.begin()
    assert breaker.retry_after() == 1  # no third one meanwhile
    breaker.end(first, False)
    assert breaker.state is State.HALF_OPEN and breaker.retry_after() is None
    breaker.end(second, False)
    assert breaker.state is State.CLOSED
    ends(breaker, True, True, True)  # it begins anew
    assert breaker.state is State.CLOSED


def test_a_trial_that_fails_opens_it_for_twice_as_long(breaker, clock):
    ends(breaker, *[True] * 4)
    for rest in (10, 15, 15):
        clock.now += 20
        stale = breaker.begin()
        ends(breaker, True)
        assert breaker.retry_after() == rest
        breaker.end(stale, True)  # let through before: says nothing about now
        assert breaker.retry_after() == rest
    clock.now += 20
    ends(breaker, False, False)
    ends(breaker, *[True] * 4)
    assert breaker.retry_after() == 5  # success forgets the long rests


def test_a_trial_whose_client_left_gives_its_place_back(breaker, clock):
    ends(breaker, *[True] * 4)
    clock.now += 5
    ends(breaker, None, None, None)
    assert (breaker.state, breaker.retry_after()) == (State.HALF_OPEN, None)


def test_requests_from_before_it_opened_say_nothing(breaker, clock):
    old = [breaker.begin() for _ in range(9)]
    ends(breaker, *[True] * 4)
    clock.now += 5
    for ticket in old:
        breaker.end(ticket, True)
    assert (breaker.state, breaker.retry_after()) == (State.HALF_OPEN, None)


@given(st.lists(st.tuples(st.sampled_from([None, True, False]), st.floats(0, 12)), max_size=60))
def test_any_history(history):
    """It never lets more than `trials` through while half-open, counts no trial twice, and its rests are bounded."""
    clock = Clock()
    breaker, running = CircuitBreaker(LIMITS, clock), collections.deque()
    for failed, seconds in history:
        half_open = breaker.state is State.HALF_OPEN
        if breaker.retry_after() is None:
            running.append(breaker.begin())
        if running and (len(running) > 3 or not half_open):
            breaker.end(running.popleft(), failed)
        clock.now += seconds
        wait = breaker.retry_after()
        assert 0 <= breaker._trials <= LIMITS.trials and (wait is None or 1 <= wait <= LIMITS.longest)
        assert breaker._failures == sum(f for _, f in breaker._outcomes)


def test_a_model_that_keeps_failing_is_left_alone_for_a_while(fresh, clock):
    running = fresh(breaker=CircuitBreaker(LIMITS, clock)).wait_ready()
    for _ in range(2):
        assert running.complete("abc", max_tokens=2).status_code == 200
    for _ in range(5):
        assert running.complete("abc", n=0).status_code == 400  # the client's fault
    assert running.complete("nan:0").status_code == 500
    assert events(running.complete("nan:1", stream=True))[-1]["error"]["type"] == "server_error"
    response = running.complete("abc")
    assert response.status_code == 503 and response.headers["retry-after"] == "5"
    assert response.json()["error"]["code"] == "circuit_open" and "try again in 5 s" in response.json()["error"]["message"]
    assert running.client.get("/health/ready").json() == {"status": "failing"}
    assert running.metric("aotc:circuit_breaker_state") == 2
    submitted = len(running.log("submit"))
    assert running.chat("abc", stream=True).status_code == 503 and len(running.log("submit")) == submitted
    clock.now += 5
    assert running.client.get("/health/ready").status_code == 200
    for _ in range(2):
        assert running.complete("abc", max_tokens=2).status_code == 200
    assert running.model.breaker.state is State.CLOSED and running.metric("aotc:circuit_breaker_state") == 0
