"""The engine and its scheduler over a fake device whose next token is a hash of the history."""

import hypothesis.strategies as st
import pytest
from fake_executor import COMPUTE, COPY, VOCAB, all_free, expected, make, request, run, tokens
from hypothesis import given, settings

from aotc.errors import RequestError

pytestmark = pytest.mark.usefixtures("both_ways")


def test_one_request():
    engine, executor = make()
    engine.submit(request("a", [1, 2, 3]))
    out = run(engine)["a"]
    assert [o.token_id for o in out] == expected([1, 2, 3], 6)
    assert [o.finish_reason for o in out] == [None] * 5 + ["length"]
    assert all(o.logprobs == () and o.stop_reason is None for o in out)
    assert executor.steps == [[("a", 3, True)], *[[("a", 1, True)]] * 5]
    assert all_free(engine, executor) and engine.step() == []


def test_requests_join_and_leave_a_running_batch():
    engine, executor = make(runs_ahead=False, max_num_seqs=2)
    engine.submit(request("a", [1, 2], max_tokens=2))
    engine.submit(request("b", [3], max_tokens=5))
    engine.submit(request("c", [4, 5], max_tokens=2))
    out = run(engine)
    assert [sorted(name for name, *_ in step) for step in executor.steps] == [
        ["a", "b"], ["a", "b"], ["b", "c"], ["b", "c"], ["b"],
    ]  # fmt: skip
    for name, prompt, count in (("a", [1, 2], 2), ("b", [3], 5), ("c", [4, 5], 2)):
        assert tokens(out, name) == expected(prompt, count)
    assert all_free(engine, executor)


def test_a_long_prompt_comes_in_chunks_and_decoding_goes_on():
    engine, executor = make(max_num_batched_tokens=4, max_num_seqs=2)
    engine.submit(request("short", [1], max_tokens=8))
    out = {}
    for o in engine.step():
        out.setdefault(o.request_id, []).append(o)
    prompt = list(range(10))
    engine.submit(request("long", prompt, max_tokens=2))
    run(engine, out)
    assert executor.steps[1:5] == [
        [("short", 1, True), ("long", 3, False)], [("short", 1, True), ("long", 3, False)],
        [("short", 1, True), ("long", 3, False)], [("short", 1, True), ("long", 1, True)],
    ]  # fmt: skip
    assert tokens(out, "long") == expected(prompt, 2) and tokens(out, "short") == expected([1], 8)


def test_requests_start_in_the_order_they_came():
    engine, executor = make(max_num_seqs=1)
    for name in "abcd":
        engine.submit(request(name, [1], max_tokens=1))
    run(engine)
    assert [step[0][0] for step in executor.steps] == list("abcd")


def test_cancelling_while_waiting_prefilling_and_running():
    engine, executor = make(max_num_seqs=2, max_num_batched_tokens=4)
    engine.submit(request("running", [1], max_tokens=20))
    engine.submit(request("prefilling", range(12)))
    engine.submit(request("waiting", [2]))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["running", "prefilling"]
    assert len(engine.scheduler.waiting) == 1 and engine.scheduler.free_slots == 0
    assert engine.cancel("prefilling") and engine.scheduler.free_slots == 1
    assert engine.cancel("waiting") and not engine.scheduler.waiting
    engine.submit(request("next", [9], max_tokens=3))
    engine.step()
    assert engine.cancel("running")
    assert not engine.cancel("running") and not engine.cancel("nobody")
    out = run(engine)
    assert set(out) == {"next"} and all_free(engine, executor)


def test_stop_ids_and_the_end_of_sequence():
    prompt = [3, 1, 4]
    said = expected(prompt, 6)
    engine, executor = make(eos=(said[2],))
    stop = said[1]
    assert stop not in said[:1] and said[2] not in said[:2]
    engine.submit(request("stop", prompt, stop_token_ids=(stop,)))
    engine.submit(request("eos", prompt, ignore_eos=False))
    engine.submit(request("ignored", prompt))
    out = run(engine)
    assert tokens(out, "stop") == said[:2]
    assert (out["stop"][-1].finish_reason, out["stop"][-1].stop_reason) == ("stop", stop)
    assert tokens(out, "eos") == said[:3]
    assert (out["eos"][-1].finish_reason, out["eos"][-1].stop_reason) == ("stop", said[2])
    assert tokens(out, "ignored") == said and out["ignored"][-1].finish_reason == "length"


@pytest.mark.parametrize("least", [0, 1, 2, 3])
def test_min_tokens_lets_no_stop_through_before(least):
    prompt = [3, 1, 4]
    said = expected(prompt, 6)
    engine, _ = make()
    engine.submit(request("a", prompt, stop_token_ids=tuple(set(said)), min_tokens=least))
    assert tokens(run(engine), "a") == said[: least + 1]


def test_bans_hold_what_min_tokens_forbids():
    engine, _ = make(eos=(7, 9))
    engine.submit(request("a", [1], min_tokens=2, stop_token_ids=(3,), logit_bias={4: 1.5}))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.bans is not None and sequence.bans.tolist() == [3, 7, 9]
    assert sequence.bias is not None and sequence.bias[0].tolist() == [4] and sequence.bias[1].tolist() == [1.5]


def test_length_is_max_tokens_or_what_the_model_holds():
    engine, executor = make(max_model_len=10)
    engine.submit(request("context", range(7), max_tokens=None))
    engine.submit(request("limit", range(7), max_tokens=2))
    engine.submit(request("more", range(7), max_tokens=2**31 - 1))
    engine.submit(request("edge", range(9), max_tokens=5))
    out = run(engine)
    assert {n: len(o) for n, o in out.items()} == {"context": 3, "limit": 2, "more": 3, "edge": 1}
    assert {o[-1].finish_reason for o in out.values()} == {"length"}
    assert max(map(len, executor.cache.values())) < 10


def test_a_stop_on_the_last_token_is_a_stop():
    said = expected([1], 3)
    engine, _ = make()
    engine.submit(request("a", [1], max_tokens=3, stop_token_ids=(said[2],)))
    assert run(engine)["a"][-1].finish_reason == "stop"


def test_nan_fails_its_request_alone():
    engine, executor = make(poisoned=frozenset(["bad"]))
    engine.submit(request("good", [1, 2]))
    engine.submit(request("bad", range(12)))
    engine.submit(request("late", [5]))
    out = run(engine)
    (bad,) = out["bad"]
    assert (bad.token_id, bad.finish_reason, bad.logprobs) == (-1, "error", ())
    assert tokens(out, "good") == expected([1, 2], 6) and tokens(out, "late") == expected([5], 6)
    assert all_free(engine, executor)


def test_logprobs_are_the_sampled_one_and_those_asked_for():
    engine, _ = make()
    for asked in (None, 0, 1, 5):
        engine.submit(request(f"{asked}", [1], logprobs=asked, max_tokens=1))
    out = run(engine)
    said = expected([1], 1)[0]
    everything = ((said, -0.5), (1, -0.25), (2, -1.0))
    got = {name: o[0].logprobs for name, o in out.items()}
    assert got == {"None": (), "0": everything[:1], "1": everything[:2], "5": everything}


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "no tokens"),
        (range(40), {}, "40 tokens; the model was compiled for 40"),
        ([VOCAB], {}, f"outside 0..{VOCAB - 1}"),
        ([-1], {}, f"outside 0..{VOCAB - 1}"),
        ([1 << 70], {}, f"outside 0..{VOCAB - 1}"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids must hold token ids below"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias must hold token ids below"),
    ],
)
def test_what_can_never_run_is_refused(prompt, fields, message):
    engine, executor = make()
    with pytest.raises(RequestError, match=message):
        engine.submit(request("a", prompt, **fields))
    assert all_free(engine, executor)


def test_a_device_that_fails_to_start_a_sequence_keeps_no_slot(monkeypatch):
    engine, executor = make()
    monkeypatch.setattr(executor, "start", lambda sequence: 1 / 0)
    engine.submit(request("a", [1]))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.cancel("a")
    assert all_free(engine, executor)


def test_the_youngest_gives_its_pages_to_the_oldest_and_goes_on_later():
    """Two sequences of 3 pages each in a pool of 4: one is preempted and computed again from its tokens."""
    options = {"prefix_cache": False}
    engine, executor = make(num_pages=4, max_num_seqs=2, max_num_batched_tokens=40, options=options)
    for name in ("old", "young"):
        engine.submit(request(name, [1, 2, 3], max_tokens=10, repetition_penalty=1.5))
    out = run(engine)
    assert engine.scheduler.preemptions == 1
    again = next(n for n, step in enumerate(executor.steps[1:], 1) if step[-1][0] == "young" and step[-1][1] > 1)
    assert executor.steps[again][-1][1] == 3 + len([s for s in executor.steps[:again] if s[-1][0] == "young"])
    for name in ("old", "young"):
        assert tokens(out, name) == expected([1, 2, 3], 10)
    assert all_free(engine, executor)


def test_cancelling_frees_pages_at_once_also_of_a_preempted_request():
    engine, _ = make(num_pages=4, max_num_seqs=2)
    for name in ("old", "young"):
        engine.submit(request(name, [1, 2, 3, 4], max_tokens=12))
    pool = engine.scheduler.pool
    while not engine.scheduler.preemptions:
        engine.step()
    assert [w.request.request_id for w in engine.scheduler.waiting] == ["young"] and engine.scheduler.free_slots == 1
    assert engine.cancel("young") and not engine.cancel("young")
    assert pool.free_pages == 4 - 3
    assert engine.cancel("old") and pool.free_pages == 4 and not engine.has_work


def test_a_request_that_no_pool_holds_is_refused_and_one_without_a_length_takes_what_there_is():
    engine, executor = make(num_pages=3)
    message = "needs a KV cache of 13 tokens, this one holds 12: ask for less, or give more with --kv-cache-memory"
    for prompt, asked in ((range(13), None), (range(13), 1), (range(8), 6)):
        with pytest.raises(RequestError, match=message):
            engine.submit(request("a", prompt, max_tokens=asked))
    engine.submit(request("edge", range(8), max_tokens=5))
    engine.submit(request("open", range(8), max_tokens=None))
    out = run(engine)
    assert tokens(out, "edge") == expected(range(8), 5) == tokens(out, "open")
    assert out["open"][-1].finish_reason == "length" and all_free(engine, executor)


def test_requests_wait_for_pages_in_the_order_they_came():
    """A short one does not overtake the long one before it."""
    engine, executor = make(num_pages=4, max_num_seqs=3, max_num_batched_tokens=40)
    engine.submit(request("first", range(8), max_tokens=4))
    engine.submit(request("long", range(12), max_tokens=1))
    engine.submit(request("short", [1], max_tokens=1))
    out = run(engine)
    assert list(out) == ["first", "long", "short"] and all_free(engine, executor)


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20) | st.integers(1, 30).map(lambda n: [3] * n)
REQUESTS = st.lists(
    st.fixed_dictionaries({
        "prompt": PROMPTS,
        "priority": st.integers(-1, 1),
        "salt": st.sampled_from(["", "tenant"]),
        "seed": st.integers(0, 3),
        "max_tokens": st.none() | st.integers(1, 12),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
        "ignore_eos": st.booleans(),
        "arrives": st.integers(0, 10),
        "cancelled": st.none() | st.integers(0, 12),
    }),
    min_size=1, max_size=10,
)  # fmt: skip


OPTIONS = st.fixed_dictionaries({
    "prefix_cache": st.booleans(),
    "offload_memory": st.sampled_from([0, 64 * 4, 1 << 20]),  # none, 4 pages, plenty
    "costs": st.sampled_from([COPY, COMPUTE]),
})  # fmt: skip


@settings(max_examples=300)
@given(
    REQUESTS, st.integers(1, 4), st.integers(1, 9), st.sets(st.integers(0, 7), max_size=1),
    st.sampled_from([0, 5, 7, 10]), OPTIONS,
)  # fmt: skip
def test_outputs_equal_those_of_each_request_alone(asked, seqs, budget, bad, pages, options):
    """Whatever runs beside it, arrives, is cancelled, fails or takes its pages: a request's tokens do not change."""
    wanted = []
    for n, fields in enumerate(asked):
        wanted.append(request(f"r{n}", **{k: v for k, v in fields.items() if k not in ("arrives", "cancelled")}))
    poisoned = frozenset(f"r{n}" for n in bad)
    # Sequences of up to 40 tokens, so that pools of 5 and 10 pages of 8 hold one or two of them whole.
    engine, executor = make(
        max_num_seqs=seqs, max_num_batched_tokens=budget, poisoned=poisoned, num_pages=pages, page_size=8,
        options=options,
    )  # fmt: skip
    out = {}
    for clock in range(1000):
        for item, fields in zip(wanted, asked, strict=True):
            if fields["arrives"] == clock:
                engine.submit(item)
            if fields["cancelled"] is not None and clock == fields["arrives"] + fields["cancelled"]:
                engine.cancel(item.request_id)
        for output in engine.step():
            out.setdefault(output.request_id, []).append(output)
        if clock > 10 and not engine.has_work:
            break
    assert all_free(engine, executor)
    for item, fields in zip(wanted, asked, strict=True):
        alone, _ = make(poisoned=poisoned)
        alone.submit(item)
        full = run(alone)[item.request_id]
        got = out.get(item.request_id, [])
        assert [o._replace(cached_tokens=0) for o in got] == full[: len(got)]
        assert len(got) == len(full) or fields["cancelled"] is not None
