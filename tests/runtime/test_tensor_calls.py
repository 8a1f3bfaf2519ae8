"""Calls of a tensor model on the CPU: what is checked, what is remembered, whose arrays results are, and forks."""

import multiprocessing
import os
import threading

import numpy as np
import pytest
from tensor_models import mixed, two_dims

import aotc
from aotc.artifact.plan import evaluate
from aotc.errors import RequestError
from aotc.runtime import signature


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_dims(tmp_path_factory.mktemp("two"))


@pytest.fixture
def model(folder):
    with aotc.load(folder, device="cpu") as loaded:
        yield loaded


def given(batch, time, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((batch, time, 4)).astype(np.float32), "scale": rng.random(batch).astype(np.float32)}


def expected(x, scale):
    return np.maximum(x, 0).sum(1) * scale[:, None]


def test_shapes_that_are_known_give_the_same_as_new_ones(model):
    for _ in range(2):
        for batch, time in ((1, 1), (3, 5), (8, 2), (3, 4)):
            arrays = given(batch, time, batch)
            np.testing.assert_allclose(model(**arrays)["y"], expected(**arrays), rtol=1e-5, atol=1e-6)
    assert len(model._signature._known) == 4


def test_what_is_refused_is_not_remembered(model):
    for _ in range(2):
        with pytest.raises(RequestError, match="^dim batch is 9: the model was compiled for 1 to 8$"):
            model(**given(9, 2))
        with pytest.raises(RequestError, match="^input scale is float64, not f32: convert it before the call$"):
            model(x=given(2, 2)["x"], scale=np.ones(2))
        with pytest.raises(RequestError, match="^the inputs are x, scale: scale is missing$"):
            model(x=given(2, 2)["x"])
    assert model._signature._known == {}


def test_memory_of_shapes_is_bounded(model, monkeypatch):
    monkeypatch.setattr(signature, "REMEMBERED", 3)
    for time in range(1, 9):
        model(**given(1, time))
        assert len(model._signature._known) <= 3


def test_strided_swapped_and_unaligned_arrays(model):
    arrays = given(3, 4)
    wide = np.zeros((3, 8, 4), np.float32)
    wide[:, ::2] = arrays["x"]
    raw = np.zeros(3 * 4 * 4 * 4 + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(3, 4, 4)
    unaligned[:] = arrays["x"]
    assert not unaligned.flags.aligned
    for x in (wide[:, ::2], unaligned):
        np.testing.assert_allclose(model(x=x, scale=arrays["scale"])["y"], expected(**arrays), rtol=1e-5, atol=1e-6)
    with pytest.raises(RequestError, match="input x is >f4, not f32"):
        model(x=arrays["x"].astype(">f4"), scale=arrays["scale"])


def test_results_are_never_overwritten(model):
    arrays = given(2, 3)
    first = model(**arrays)["y"]
    kept = first.copy()
    for seed in range(20):
        model(**given(2, 3, seed))
    np.testing.assert_array_equal(first, kept)
    assert first.flags.owndata


def test_threads_get_their_own_answers(model):
    wrong = []

    def call(n):
        arrays = given(n, 3, n)
        for _ in range(50):
            if not np.allclose(model(**arrays)["y"], expected(**arrays), rtol=1e-5, atol=1e-6):
                wrong.append(n)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_outputs_that_are_the_same_value_are_arrays_of_their_own(tmp_path):
    with aotc.load(mixed(tmp_path), device="cpu") as model:
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        got = model(x=x)
    for name in ("same", "y", "again"):
        np.testing.assert_array_equal(got[name], x if name == "same" else x + 1)
    assert not any(np.shares_memory(got[a], b) for a, b in (("same", x), ("y", got["again"])))


def test_short_runs_take_one_thread(folder, monkeypatch):
    with aotc.load(folder, device="cpu") as model:
        program, used = model._program._programs[0], []
        work = [sum(evaluate(c.flops, d) + evaluate(c.bytes, d) for c in model.plan.calls())
                for d in ({"batch": 2, "time": 3}, {"batch": 8, "time": 16})]  # fmt: skip
        assert work[0] < work[1] - 1
        monkeypatch.setattr("aotc.runtime.tensor_model._SHORT", work[1] - 1)
        for name in ("call", "call_alone"):
            run = getattr(program, name)
            monkeypatch.setattr(program, name, lambda name=name, run=run: (used.append(name), run()))
        for _ in range(2):
            for sizes in ((2, 3), (8, 16)):
                arrays = given(*sizes)
                np.testing.assert_allclose(model(**arrays)["y"], expected(**arrays), rtol=1e-5, atol=1e-6)
    assert used == ["call_alone", "call"] * 2


def _in_child(model, folder, arrays, queue):
    try:
        model(**arrays)
    except RequestError as error:
        queue.put(str(error))
    with aotc.load(folder, device="cpu") as own:
        queue.put(own(**arrays)["y"])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("held", [False, True])
def test_a_forked_process_is_told_to_load_the_model_itself(folder, monkeypatch, held):
    monkeypatch.setenv("AOTC_NUM_THREADS", "2")
    monkeypatch.setattr("aotc.runtime.tensor_model._SHORT", -1)  # all threads run it
    model, arrays = aotc.load(folder, device="cpu"), given(2, 3)
    model(**arrays)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(model, folder, arrays, queue))
    if held:  # as by another thread that is within a call
        model._gate.lock.acquire()
    child.start()
    assert queue.get() == "the model was loaded before this process was forked off: load it again here, after the fork"
    np.testing.assert_allclose(queue.get(), expected(**arrays), rtol=1e-5, atol=1e-6)
    child.join()
    assert child.exitcode == 0
    if held:
        model._gate.lock.release()
    np.testing.assert_allclose(model(**arrays)["y"], expected(**arrays), rtol=1e-5, atol=1e-6)
    assert os.getpid() != child.pid
