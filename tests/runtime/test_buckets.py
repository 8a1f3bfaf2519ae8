"""Tensor models with a program a bucket of rows: which one runs, that answers stay, and what they take."""

import asyncio

import numpy as np
import onnx
import pytest
import torch
from interpreted_cuda import InterpretedDriver
from onnx import helper
from tensor_models import compiled, info, two_dims

import aotc
from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.cli.inspect_command import describe
from aotc.errors import DeviceError, RequestError
from aotc.runtime.devices.cpu import CpuProgram
from aotc.runtime.devices.cuda_program import CudaProgram

RNG = np.random.default_rng(0)
WEIGHTS = {n: RNG.standard_normal(s).astype(np.float32) / 2 for n, s in (("w", (6, 5)), ("b", (5,)), ("u", (4, 5)))}
BORDERS = {1: 1, 2: 4, 3: 4, 4: 4, 5: 16, 15: 16, 16: 16}
"""Rows, and the rows that the program takes which runs them, of an artifact for 1, 4 and 16."""


def cell(folder, dims=("batch=1..16",), arch="cpu", sizes=None, state=("batch", 5)):
    """y = softmax(x w + h), h_next = tanh(x w + h); x [batch, 6], h [batch, 5] f32, or a single row of it."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["a"]), helper.make_node("Add", ["a", "h"], ["s"]),
        helper.make_node("Softmax", ["s"], ["y"]), helper.make_node("Tanh", ["s"], ["t"]),
    ]  # fmt: skip
    if state[0] == "batch":
        nodes.append(helper.make_node("Identity", ["t"], ["h_next"]))
    else:
        nodes.append(helper.make_node("ReduceMax", ["t", "zero"], ["h_next"], keepdims=1))
    weights = {k: v for k, v in WEIGHTS.items() if k != "u"} | {"zero": np.array([0], np.int64)}
    inputs = [info("x", ["batch", 6]), info("h", list(state))]
    outputs = [info("y", ["batch", 5]), info("h_next", list(state))]
    return compiled(folder, nodes, inputs, outputs, weights, dims, arch, sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Programs for 1, 4 and 16 rows, for both devices."""
    return cell(tmp_path_factory.mktemp("buckets"), arch="cpu,sm90", sizes="1,4,16")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One program for up to 16, for both devices."""
    return cell(tmp_path_factory.mktemp("single"), arch="cpu,sm90", sizes="16")


@pytest.fixture(params=["cpu", "cuda"])
def model(request, folder, use_driver):
    if request.param == "cuda":
        use_driver(InterpretedDriver(open_artifact(folder)))
    with aotc.load(folder, device=request.param, max_wait_ms=0) as loaded:
        yield loaded


@pytest.fixture
def ran(monkeypatch):
    """The rows that the programs take which ran since it was last asked."""
    names = []

    def noting(owner, name):
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *a: (names.append(self.plan.program), whole(self, *a))[1])

    noting(CpuProgram, "set_dims")  # just before each run of a call, and by `bind`
    noting(CudaProgram, "launch")

    def asked():
        found = [int(n.rpartition("_")[2]) for n in names if n != "main"]  # that of `single`
        names.clear()
        return found

    return asked


def given(rows, seed=0, state=None):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal((state if n == "h" and state else rows, w)).astype(np.float32)
            for n, w in (("x", 6), ("h", 5))}  # fmt: skip


def same(got, expected, device):
    """Bits on the CPU; a GPU's kernels sum in an order of their own."""
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        if device == "cpu":
            assert got[name].tobytes() == array.tobytes(), name
        else:
            np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)


def device_of(model):
    return "cpu" if type(model._program).__name__ == "CpuTensorProgram" else "cuda"


# What is compiled


def test_the_manifest_has_a_program_a_bucket_on_the_same_weights(folder, single, capsys):
    artifact, one = open_artifact(folder), open_artifact(single)
    for target in artifact.manifest.targets:
        found = [(p.name, p.kind, p.bucket, artifact.plan(p.plan).dims[0].hi) for p in target.programs]
        assert found == [(f"main_{n}", "call", n, n) for n in (1, 4, 16)]
        assert target.arena_bytes == max(artifact.plan(p.plan).arena_bytes for p in target.programs)
    for target, other in zip(artifact.manifest.targets, one.manifest.targets, strict=True):
        (program,) = other.programs
        assert (program.name, program.kind, program.bucket) == ("main", "call", 0)
        assert (target.arena_bytes, target.weights) == (other.arena_bytes, other.weights)
    assert artifact.manifest.weights == one.manifest.weights
    assert [p["name"] for p in describe(artifact)["targets"][0]["programs"]] == ["main_1", "main_4", "main_16"]
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert [said.count(f"  main_{n} ") for n in (1, 4, 16)] == [2, 2, 2]
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("main_") == 3


def programs(folder):
    return {t.device: [p.bucket for p in t.programs] for t in open_artifact(folder).manifest.targets}


@pytest.mark.parametrize(
    ("bounds", "sizes", "cpu", "cuda"),
    [
        ("1..64", None, [0], [1, 4, 16, 64]),
        ("1..20", None, [0], [1, 4, 16, 20]),
        ("5..17", None, [0], [16, 17]),
        ("1..1", None, None, None),
        ("1..64", "64", [0], [0]),
        ("1..64", "8,2", [2, 8, 64], [2, 8, 64]),
        (None, "16,1,4,4", [1, 4, 16], [1, 4, 16]),
    ],
)
def test_sizes_are_those_that_were_asked_for_or_the_usual_ones(tmp_path, bounds, sizes, cpu, cuda):
    dims = () if bounds is None else (f"batch={bounds}",)
    found = programs(cell(tmp_path, dims, "cpu,sm90", sizes))
    assert found == {"cpu": cpu or [0], "cuda": cuda or [0]}


def test_models_with_other_dims_keep_one_program(tmp_path):
    assert programs(two_dims(tmp_path, "cpu,sm90")) == {"cpu": [0], "cuda": [0]}


def saved(folder, x, y, node="Relu"):
    path = folder / "m.onnx"
    graph = helper.make_graph([helper.make_node(node, ["x"], ["y"])], "g", [info("x", x)], [info("y", y)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (["n", 3], "--batch-sizes 1,x", "--batch-sizes 1,x: write numbers from 1 on, for example --batch-sizes 1,4,16"),
        (["n", 3], "--batch-sizes 0,4", "--batch-sizes 0,4: write numbers from 1 on"),
        (["n", 3], "--batch-sizes ,", "--batch-sizes ,: write numbers"),
        (["n", 3], "--dim n=1..8 --batch-sizes 4,9", "--batch-sizes 9 is outside the bounds of dim n, 1 to 8"),
        (["n", 3], "--dim n=2..8 --batch-sizes 1,4", "--batch-sizes 1 is outside the bounds of dim n, 2 to 8"),
        ([2, 3], "--batch-sizes 1,4", "--batch-sizes is for a model with a dynamic batch, and this one's shapes are fixed"),
        (["n", 3], "--dim n=4 --batch-sizes 1,4", "this one's shapes are fixed: leave it out"),
        (["n", "t"], "--dim n=1..4 --dim t=1..8 --batch-sizes 1,4", "this one has n, t: make numbers of the others (--dim t=N)"),
        (["n", "t"], "--batch-sizes 1,4", "has dynamic dims without bounds: add --dim n=1..8 --dim t=1..512"),
        ([3, "t"], "--dim t=1..8 --batch-sizes 1,4", "the first axis of its inputs, and x is f32[3, t]: leave it out"),
    ],
)  # fmt: skip
def test_what_has_no_buckets_is_refused_in_one_line(capsys, tmp_path, shape, options, message):
    path = saved(tmp_path, shape, shape)
    assert main(["compile", str(path), "--arch", "cpu", "-o", str(tmp_path / "a"), "--quiet", *options.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("aotc: error: ") and said.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_modules_of_torch(tmp_path):
    module, batch = torch.nn.Linear(6, 5).eval(), torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(module, (torch.randn(4, 6),), dynamic_shapes=({0: batch},))
    with pytest.raises(RequestError, match="^--batch-sizes 9 is outside the bounds of dim input_0, 1 to 8: leave it out"):
        aotc.compile(program, tmp_path / "a", batch_sizes=[9])
    aotc.compile(program, tmp_path / "a", name="net_2", batch_sizes=(2,))
    assert [(p.name, p.bucket) for p in open_artifact(tmp_path / "a").manifest.targets[0].programs] == [
        ("net_2_2", 2), ("net_2_8", 8),
    ]  # fmt: skip
    with aotc.load(tmp_path / "a", device="cpu") as model:
        for rows in (1, 2, 3, 8):
            x = torch.randn(rows, 6)
            np.testing.assert_allclose(model(input=x.numpy())["output"], module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


# Which program runs


def test_calls_take_the_smallest_program_that_fits(model, single, ran):
    with aotc.load(single, device="cpu") as one:
        for rows, size in BORDERS.items():
            expected = one(**given(rows))
            ran()
            same(model(**given(rows)), expected, device_of(model))
            assert ran() == [size], rows
    for rows in (0, 17):
        with pytest.raises(RequestError, match=f"^dim batch is {rows}: the model was compiled for 1 to 16$"):
            model(**given(rows))
    assert model.plan.dims[0].hi == 16 and [t.name for t in model.inputs] == ["x", "h"]


def test_bound_arrays_on_the_cpu(folder, single, ran):
    with aotc.load(folder, device="cpu") as model, aotc.load(single, device="cpu") as one:
        bound = {}
        for rows in BORDERS:
            arrays = given(rows) | {n: np.zeros((rows, 5), np.float32) for n in ("y", "h_next")}
            bound[rows] = model.bind(**arrays), arrays
        assert ran() == list(BORDERS.values())
        for rows, (run, arrays) in bound.items():  # each after all were bound
            run()
            same({n: arrays[n] for n in ("y", "h_next")}, one(**given(rows)), "cpu")
        with pytest.raises(RequestError, match="^dim batch is 17"):
            model.bind(**given(17), **{n: np.zeros((17, 5), np.float32) for n in ("y", "h_next")})


def test_requests_that_run_together_take_the_program_of_all_their_rows(model, single, ran):
    model._submit(given(1), None).result(60)  # asks for the program once whether rows are apart
    with aotc.load(single, device="cpu") as one:
        for rows, size in BORDERS.items():
            ran()
            got = model.submit_sync(**given(rows, rows))
            assert ran() == [size], rows
            same(got, one(**given(rows, rows)), device_of(model))

    async def several():
        with model._gate.lock:  # a batch that has begun waits; what comes is collected
            futures = [model.submit(**given(1, 0))]
            while len(model._make_batcher()._policy):
                await asyncio.sleep(0.01)
            futures += [model.submit(**given(1, n)) for n in range(1, 7)]
        return await asyncio.gather(*futures)

    ran()
    answers = asyncio.run(several())
    assert ran() == [1, 16], "one, and six at once"
    for n, got in enumerate(answers):
        np.testing.assert_allclose(got["y"], model(**given(1, n))["y"], rtol=1e-5, atol=1e-6)
    with pytest.raises(RequestError, match="^dim batch is 17: the model was compiled for 1 to 16$"):
        model.submit_sync(**given(17))


def test_sessions_take_the_program_of_their_rows(model, single, ran):
    with aotc.load(single, device="cpu") as one:
        for rows, size in BORDERS.items():
            with model.session({"h": "h_next"}) as session, one.session({"h": "h_next"}) as reference:
                for step in range(3):
                    x = given(rows, step)["x"]
                    expected = reference(x=x)
                    ran()
                    same(session(x=x), expected, device_of(model))
                    assert ran() == [size]
                same(session.state, reference.state, device_of(model))


@pytest.fixture(scope="module")
def loose(tmp_path_factory):
    """A state of one row, whatever the batch is."""
    return cell(tmp_path_factory.mktemp("loose"), arch="cpu,sm90", sizes="1,4,16", state=(1, 5))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_state_goes_from_program_to_program(loose, use_driver, ran, device):
    """Both turns of the state, whichever program has run before."""
    if device == "cuda":
        use_driver(InterpretedDriver(open_artifact(loose)))
    with aotc.load(loose, device=device) as model, model.session({"h": "h_next"}) as session:
        h, sizes = np.zeros((1, 5), np.float32), []
        for step, rows in enumerate((3, 1, 16, 1, 1, 4, 16, 5)):
            x = given(rows, step)["x"]
            ran()
            y = session(x=x)["y"]
            sizes += ran()
            s = x @ WEIGHTS["w"] + WEIGHTS["b"] + h
            e = np.exp(s - s.max(1, keepdims=True))
            np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-4, atol=1e-5)
            h = np.tanh(s).max(0, keepdims=True)
            np.testing.assert_allclose(session.state["h"], h, rtol=1e-4, atol=1e-5)
        assert sizes == [4, 1, 16, 1, 1, 4, 16, 16]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_linear_layers_in_branches(tmp_path, use_driver, ran, device):
    """y = sum(x) > 0 ? x wt : -(x wt): a branch has the bounds of the program that it is in."""
    layer = helper.make_node("Gemm", ["x", "wt"], ["p"], transB=1)
    bodies = [helper.make_graph([layer, helper.make_node(op, ["p"], ["t"])], op, [], [info("t", None)])
              for op in ("Identity", "Neg")]  # fmt: skip
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0), helper.make_node("Greater", ["s", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=bodies[0], else_branch=bodies[1]),
    ]  # fmt: skip
    weights = {"wt": WEIGHTS["w"].T.copy(), "zero": np.float32(0)}
    where = compiled(tmp_path, nodes, [info("x", ["batch", 6])], [info("y", ["batch", 5])], weights, (), "cpu,sm90", "1,4")
    if device == "cuda":
        use_driver(InterpretedDriver(open_artifact(where)))
    with aotc.load(where, device=device) as model:
        for rows, size in ((1, 1), (3, 4), (4, 4)):
            for sign in (1, -1):
                x = np.abs(given(rows)["x"]) * np.float32(sign)
                y = model(x=x)["y"]
                assert ran() == [size]
                np.testing.assert_allclose(y, sign * (x @ WEIGHTS["w"]), rtol=1e-4, atol=1e-5)


# On a GPU


def test_memory_is_that_of_the_largest_program_and_calls_take_none(folder, use_driver):
    artifact = open_artifact(folder)
    driver = use_driver(InterpretedDriver(artifact))
    with aotc.load(folder, device="cuda") as model:
        assert model.memory.total == sum(map(len, driver.blocks.values()))
        assert model.memory.pinned == sum(map(len, driver.host.values()))
        (said,) = (t["memory"] for t in describe(artifact)["targets"] if t["name"] == "sm90")
        assert said["total"] == model.memory.total
        target = next(t for t in artifact.manifest.targets if t.name == "sm90")
        largest = next(p for p in target.programs if p.bucket == 16)
        assert model.memory.arena == artifact.plan(largest.plan).arena_bytes
        before, things = driver.allocations, driver.everything
        for rows in BORDERS:
            model(**given(rows))
        assert (driver.allocations, driver.everything) == (before, things)
    assert driver.everything == {}


def test_a_program_has_the_blocks_of_its_bucket(folder, use_driver):
    driver = use_driver(InterpretedDriver(open_artifact(folder)))
    with aotc.load(folder, device="cuda") as model:
        blocks = []
        for rows in (1, 4, 16):
            driver.launched.clear()
            model(**given(rows))
            nodes = [node for graph in driver.launched for node in driver.graphs[graph]]
            blocks.append(sum(n.gridDimX * n.gridDimY * n.gridDimZ for n in nodes))
    assert blocks[0] < blocks[1] < blocks[2]


def test_a_session_that_cannot_have_another_program_stays_usable(loose, use_driver):
    driver = use_driver(InterpretedDriver(open_artifact(loose)))
    with aotc.load(loose, device="cuda") as model:
        before = driver.everything
        session = model.session({"h": "h_next"})
        session(x=given(1)["x"])
        kept = session.state["h"]
        driver.failing["cuGraphInstantiate"] = 2
        with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            session(x=given(3)["x"])
        driver.failing.clear()
        np.testing.assert_array_equal(session.state["h"], kept)
        first = session(x=given(1, 1)["x"])["y"]
        session.reset({"h": kept})
        np.testing.assert_array_equal(session(x=given(1, 1)["x"])["y"], first)
        session(x=given(3)["x"])
        session.close()
        assert driver.everything == before


# Preferred sizes


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({}, (1, 4, 16)), ({"preferred_batch_sizes": [3, 8]}, (3, 8)), ({"preferred_batch_sizes": ()}, ())],
)
def test_batches_prefer_the_artifacts_buckets_unless_the_caller_says_others(folder, options, sizes):
    with aotc.load(folder, device="cpu", **options) as model:
        assert model._make_batcher().options.preferred == sizes


def test_one_program_prefers_no_size(single):
    with aotc.load(single, device="cpu") as model:
        assert model._make_batcher().options.preferred == ()
    with pytest.raises(RequestError, match="^preferred_batch_sizes has 0: give numbers from 1 on$"):
        aotc.load(single, device="cpu", preferred_batch_sizes=[4, 0])
