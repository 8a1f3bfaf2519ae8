"""Steps that begin before the one before them has ended: the host learns a token when its successor is under way."""

import pytest
from fake_executor import COMPUTE, all_free, expected, make, request, run, tokens


def names(engine):
    return [(o.request_id, o.token_id) for o in engine.step()]


def ahead(**fields):
    return make(runs_ahead=True, **fields)


def test_a_token_comes_while_the_next_one_is_computed():
    engine, executor = ahead()
    engine.submit(request("a", [1, 2, 3], max_tokens=3))
    said = expected([1, 2, 3], 3)
    assert names(engine) == [] and len(executor.steps) == 1
    assert names(engine) == [("a", said[0])] and len(executor.steps) == 2
    assert names(engine) == [("a", said[1])] and len(executor.steps) == 3
    assert engine.has_work, "its last token is not known yet"
    assert names(engine) == [("a", said[2])] and len(executor.steps) == 3, "how long it becomes is known beforehand"
    assert all_free(engine, executor) and engine.step() == []


@pytest.mark.parametrize("pages", [0, 20])
def test_who_stops_is_computed_once_more_for_nothing(pages):
    """The token after the one that stopped it is nobody's; its slot and pages are another's while it is computed."""
    engine, executor = ahead(num_pages=pages, max_num_seqs=1)
    said = expected([1, 2], 6)
    stop = next(n for n in range(1, 6) if said[n] not in said[:n])
    engine.submit(request("a", [1, 2], stop_token_ids=(said[stop],)))
    engine.submit(request("b", [5] * 9))
    out = run(engine)
    assert tokens(out, "a") == said[: stop + 1] and out["a"][-1].finish_reason == "stop"
    assert [s for s in executor.steps if s[0][0] == "a"][1:] == [[("a", 1, True)]] * (stop + 1)
    assert tokens(out, "b") == expected([5] * 9, 6) and all_free(engine, executor)


@pytest.mark.parametrize("pages", [0, 20])
def test_a_cancelled_request_is_free_at_once_in_the_middle_of_a_step(pages):
    engine, executor = ahead(num_pages=pages, max_num_seqs=2)
    engine.submit(request("a", [1] * 5, max_tokens=30))
    engine.submit(request("b", [2] * 3, max_tokens=9))
    out = {}
    for n in range(5):
        for o in engine.step():
            out.setdefault(o.request_id, []).append(o)
        if n == 3:
            assert engine.cancel("a") and engine.scheduler.free_slots == 1
            assert not pages or engine.scheduler.pool.free_pages >= pages - 3
            engine.submit(request("c", [3] * 7))
    run(engine, out)
    assert tokens(out, "a") == expected([1] * 5, len(out["a"])) and len(out["a"]) < 5
    assert tokens(out, "b") == expected([2] * 3, 9) and tokens(out, "c") == expected([3] * 7, 6)
    assert all_free(engine, executor)


def test_a_faulty_request_ends_alone():
    engine, executor = ahead(num_pages=20, poisoned=frozenset({"bad"}))
    for name in ("bad", "good"):
        engine.submit(request(name, [1, 2, 3, 4, 5]))
    out = run(engine)
    assert [(o.token_id, o.finish_reason) for o in out["bad"]] == [(-1, "error")]
    assert tokens(out, "good") == expected([1, 2, 3, 4, 5], 6) and all_free(engine, executor)


def test_log_probabilities_are_those_of_their_token():
    engine, _ = ahead()
    engine.submit(request("a", [1], logprobs=1))
    assert all(o.logprobs[0][0] == o.token_id for o in run(engine)["a"])


def test_nobody_loses_pages_to_a_step_that_runs():
    """Where one has to give its pages up, the step that computes it ends first."""
    engine, executor = ahead(num_pages=6, max_num_seqs=3, options={"costs": COMPUTE, "prefix_cache": False})
    prompts = {"a": [1] * 5, "b": [2] * 5, "c": [3] * 5}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=14))
    out = run(engine)
    assert engine.scheduler.preemptions and all_free(engine, executor)
    assert all(tokens(out, name) == expected(prompt, 14) for name, prompt in prompts.items())


def test_errors_come_where_a_step_is_waited_for(monkeypatch):
    engine, executor = ahead()
    engine.submit(request("a", [1]))
    engine.step()

    def broken(step):
        raise ZeroDivisionError

    monkeypatch.setattr(executor, "wait", broken)
    with pytest.raises(ZeroDivisionError):
        engine.step()
