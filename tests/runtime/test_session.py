"""Sessions: outputs that come back as inputs, on the CPU and on a GPU that an interpreter plays."""

import gc
import multiprocessing
import threading

import numpy as np
import pytest
import torch
from interpreted_cuda import InterpretedDriver
from onnx import helper
from tensor_models import compiled, info

import aotc
from aotc.artifact.reader import open_artifact
from aotc.errors import RequestError

STATE = {"h": "h_next"}
WEIGHTS = {n: np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) / 2 for i, n in enumerate("wuv")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """h_next = tanh(x w + h u), y = h_next v, twice = h_next + h_next; all [batch 1..4, 4] f32."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("MatMul", ["h", "u"], ["hu"]),
        helper.make_node("Add", ["xw", "hu"], ["sum"]), helper.make_node("Tanh", ["sum"], ["h_next"]),
        helper.make_node("MatMul", ["h_next", "v"], ["y"]), helper.make_node("Add", ["h_next", "h_next"], ["twice"]),
    ]  # fmt: skip
    ins, outs = ([info(n, ["batch", 4]) for n in names] for names in (("x", "h"), ("y", "h_next", "twice")))
    return compiled(tmp_path_factory.mktemp("cell"), nodes, ins, outs, WEIGHTS, ("batch=1..4",), "cpu,sm90")


@pytest.fixture(params=["cpu", "cuda"])
def model(request, folder, use_driver):
    if request.param == "cuda":
        use_driver(InterpretedDriver(open_artifact(folder)))
    with aotc.load(folder, device=request.param) as loaded:
        yield loaded


def steps(count, batch=1, seed=0):
    return np.random.default_rng(seed).standard_normal((count, batch, 4)).astype(np.float32)


def cell(x, h):
    h = np.tanh(x @ WEIGHTS["w"] + h @ WEIGHTS["u"])
    return h, h @ WEIGHTS["v"]


def follow(session, xs, h):
    """Steps, each compared with numpy. The last state."""
    for x in xs:
        h, y = cell(x, h)
        got = session(x=x)
        assert sorted(got) == ["twice", "y"], "states do not come to the caller"
        np.testing.assert_allclose(got["y"], y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got["twice"], 2 * h, rtol=1e-4, atol=1e-5)
    return h


def test_outputs_are_fed_back(model):
    session = model.session(STATE)
    h = follow(session, steps(5), np.zeros((1, 4), np.float32))
    np.testing.assert_allclose(session.state["h"], h, rtol=1e-4, atol=1e-5)
    session.state["h"][:] = 9
    follow(session, steps(2, seed=1), h)


def test_first_values_and_reset(model):
    first = steps(1, 2, seed=7)[0]
    given = first.copy()
    session = model.session(STATE, initial={"h": given})
    given[:] = 0
    np.testing.assert_array_equal(session.state["h"], first)
    follow(session, steps(3, 2), first)
    session.reset()
    follow(session, steps(3, 2), np.zeros((2, 4), np.float32))
    session.reset({"h": first})
    follow(session, steps(3, 2), first)
    session.reset()
    follow(session, steps(3, 4), np.zeros((4, 4), np.float32))  # of another batch
    with pytest.raises(RequestError, match="^input h has batch = 4, another input has 2$"):
        session(x=steps(1, 2)[0])
    assert session.state["h"].shape == (4, 4)


def test_sessions_and_calls_are_apart(model):
    sessions, states = [model.session(STATE) for _ in range(3)], [np.zeros((n + 1, 4), np.float32) for n in range(3)]
    for turn in range(4):
        for n, session in enumerate(sessions):
            states[n] = follow(session, steps(1, n + 1, 10 * n + turn), states[n])
        x, h = steps(2, 2, turn)
        np.testing.assert_allclose(model(x=x, h=h)["y"], cell(x, h)[1], rtol=1e-4, atol=1e-5)


def test_what_is_refused_changes_no_state(model):
    session = model.session(STATE)
    h = follow(session, steps(2), np.zeros((1, 4), np.float32))
    for arrays, message in (
        ({}, "the inputs are x, h: x is missing"),
        ({"x": steps(1)[0], "z": 1}, "the inputs are x, h: z is unknown"),
        ({"x": steps(1)[0], "h": h}, "h is a state that the session keeps: leave it out, or reset it"),
        ({"x": np.zeros((1, 4))}, "input x is float64, not f32: convert it before the call"),
    ):
        with pytest.raises(RequestError) as caught:
            session(**arrays)
        assert str(caught.value) == message
    follow(session, steps(1, seed=3), h)


@pytest.mark.parametrize(
    ("state", "initial", "message"),
    [
        ({}, None, 'give states as {"input": "output"}, at least one, each output once'),
        ({"h": "h_next", "x": "h_next"}, None, 'give states as {"input": "output"}, at least one, each output once'),
        ({"g": "h_next"}, None, "g is no input of the model: its inputs are x, h"),
        ({"h": "g"}, None, "g is no output of the model: its outputs are y, h_next, twice"),
        (STATE, {"x": 0}, "initial has x, the states are h"),
        (STATE, {"h": np.zeros((1, 4))}, "initial h is float64 with 2 axes, not f32 with 2 axes"),
        (STATE, {"h": np.zeros(4, np.float32)}, "initial h is float32 with 1 axes, not f32 with 2 axes"),
    ],
)
def test_sessions_that_do_not_fit(folder, state, initial, message):
    with aotc.load(folder, device="cpu") as model, pytest.raises(RequestError) as caught:
        model.session(state, initial)
    assert str(caught.value) == message


def test_first_values_of_a_wrong_shape(folder):
    with aotc.load(folder, device="cpu") as model:
        for width in (5, 1):
            session = model.session(STATE, {"h": np.zeros((1, width), np.float32)})
            with pytest.raises(RequestError, match=rf"^initial h has shape \(1, {width}\), not \(1, 4\)$"):
                session(x=steps(1)[0])
        with pytest.raises(RequestError, match="^input h has batch = 2, another input has 1$"):
            model.session(STATE, {"h": np.zeros((2, 4), np.float32)})(x=steps(1)[0])


def test_states_that_change_type_or_shape(tmp_path):
    nodes = [helper.make_node("Concat", ["past", "x"], ["longer"], axis=0), helper.make_node("Shape", ["x"], ["n"])]
    ins = [info("x", [1, 3]), info("past", ["time", 3])]
    outs = [info("longer", ["total", 3]), info("n", [2], 7)]
    with aotc.load(compiled(tmp_path, nodes, ins, outs, (), ("time=1..8",)), device="cpu") as model:
        with pytest.raises(RequestError, match="^input past is f32 with 2 axes, output n i64 with 1 axes: a state keeps its"):
            model.session({"past": "n"})
        session = model.session({"past": "longer"})
        with pytest.raises(RequestError, match=r"^output longer has shape \(2, 3\), input past \(1, 3\): a state keeps its"):
            session(x=np.ones((1, 3), np.float32))


def test_a_batch_beyond_the_bound_takes_no_memory(model):
    session = model.session(STATE)
    with pytest.raises(RequestError, match="^dim batch is 5: the model was compiled for 1 to 4$"):
        session(x=steps(1, 5)[0])
    assert session._memory is None
    with pytest.raises(RequestError, match="^dim batch is 5: the model was compiled for 1 to 4$"):
        model.session(STATE, {"h": steps(1, 5)[0]})(x=steps(1, 5)[0])


def test_closed_sessions_and_models(model):
    session, other = model.session(STATE), model.session(STATE)
    for s in (session, other):
        s(x=steps(1)[0])
    session.close()
    session.close()
    for use in (lambda: session(x=steps(1)[0]), session.reset, lambda: session.state):
        with pytest.raises(RequestError, match="^the session was closed: begin another one$"):
            use()
    with model.session(STATE) as third:
        third(x=steps(1)[0])
    model.close()
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        other(x=steps(1)[0])
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        model.session(STATE)
    other.close()


def test_threads_share_a_session(folder):
    with aotc.load(folder, device="cpu") as model:
        session, h, x = model.session(STATE), np.zeros((1, 4), np.float32), steps(1)[0]
        threads = [threading.Thread(target=lambda: [session(x=x) for _ in range(20)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(60):
            h, _ = cell(x, h)
        np.testing.assert_allclose(session.state["h"], h, rtol=1e-4, atol=1e-5)


def test_on_a_gpu_states_stay_there_and_are_given_back(folder, use_driver):
    driver = use_driver(InterpretedDriver(open_artifact(folder)))
    model = aotc.load(folder, device="cuda")
    before = driver.everything
    session = model.session(STATE)
    session(x=steps(1)[0])
    taken, at = driver.allocations, len(driver.trace)
    session(x=steps(1)[0])
    assert driver.allocations == taken
    assert [(s[0], s[2] if s[0] == "down" else 0) for s in driver.trace[at:]] == [
        ("up", 0), ("launch", 0), ("down", 16), ("down", 16),
    ]  # fmt: skip
    session.close()
    assert driver.everything == before
    dropped = model.session(STATE)
    dropped(x=steps(1)[0])
    del dropped
    gc.collect()
    with model.session(STATE) as third:
        third(x=steps(1)[0])
    assert driver.everything == before
    driver.failing["cuGraphInstantiate"] = 2
    with pytest.raises(aotc.DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        model.session(STATE)(x=steps(1)[0])
    driver.failing.clear()
    assert driver.everything == before
    model.close()
    assert driver.everything == {}


def test_a_gru_cell_of_torch(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.GRUCell(5, 6).eval()
    batch = torch.export.Dim("batch", min=1, max=4)
    example = (torch.randn(2, 5), torch.randn(2, 6))
    program = torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}))
    aotc.compile(program, tmp_path / "gru", name="gru")
    with aotc.load(tmp_path / "gru") as model:
        x, h = (t.name for t in model.inputs)
        (out,) = (t.name for t in model.outputs)
        session, state = model.session({h: out}), torch.zeros(3, 6)
        for _ in range(4):
            given = torch.randn(3, 5)
            with torch.no_grad():
                state = module(given, state)
            assert session(**{x: given.numpy()}) == {}
            np.testing.assert_allclose(session.state[h], state.numpy(), rtol=1e-4, atol=1e-6)


def _say(session, queue):
    try:
        session(x=steps(1)[0])
    except RequestError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_process_a_session_raises(folder):
    with aotc.load(folder, device="cpu") as model:
        session, context = model.session(STATE), multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_say, args=(session, queue))
        child.start()
        assert queue.get() == "the model was loaded before this process was forked off: load it again here, after the fork"
        child.join()
