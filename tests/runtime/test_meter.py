"""What times kernels, over a fake driver: its graphs and memory are real, and the first call of each trial computes
under Triton's interpreter."""

import ctypes
import json

import numpy as np
import pytest
from fake_cuda import FakeDriver

from aotc.backends import BACKENDS
from aotc.codegen.cuda.build import Cubin
from aotc.codegen.cuda.fake_device import Request, run_request
from aotc.compiler import buckets, device_programs, optimise
from aotc.errors import DeviceError, DeviceLostError, RequestError
from aotc.frontend.checkpoint import open_checkpoint
from aotc.frontend.decoder import trace_decoder
from aotc.harness import relative_error
from aotc.ir.interpret import interpret
from aotc.meter import LAUNCHES, LEAST_CALLS, MOST_CALLS, copies_of, open_meter, step_dims
from aotc.runtime.devices.driver import CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
from aotc.tuner import Trial, jobs_of

SYMBOL_CUBIN = b"\x7fELF"


class Driver(FakeDriver):
    """Graphs of one kernel run interpreted; longer ones, which are timed, only count."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sources, self.seen = {}, []

    def expect(self, source):
        self.sources[source.symbol] = source
        self.arity[source.symbol], self.map_count[source.symbol] = len(source.signature) + 2, len(source.maps)

    def do_cuDeviceGetAttribute(self, attribute, device):
        return 1 << 10 if attribute == CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE else super().do_cuDeviceGetAttribute(attribute, device)

    def do_cuGraphLaunch(self, executable, stream):
        nodes = self.graphs[executable]
        self.launched.append(executable)
        if len(nodes) > 1:
            return
        (node,) = nodes
        blocks = {str(a): np.ctypeslib.as_array(b).copy() for a, b in self.blocks.items()}
        self.seen.append((node, blocks))
        places = list(zip(self.sources[node.func].signature, [(str(a), 0) for a in node.arguments[:-2]], strict=True))
        grid = (node.gridDimX, node.gridDimY, node.gridDimZ)
        steps = [("call", node.func, grid, places)]
        for address, data in run_request(Request({node.func: self.sources[node.func]}, blocks, steps)).items():
            ctypes.memmove(int(address), np.ascontiguousarray(data).ctypes.data, len(self.blocks[int(address)]))


EVEN = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture(scope="module", params=[{}, EVEN], ids=["odd", "even"])
def jobs(request, tmp_path_factory, tiny_config):
    """Of a model whose layers have any depth, or one that `chain` takes."""
    folder = tmp_path_factory.mktemp("meter")
    (folder / "config.json").write_text(json.dumps({**tiny_config, "num_hidden_layers": 1, **request.param}))
    model = trace_decoder(open_checkpoint(str(folder), weights="random:1"), "bf16", 64)
    graph = optimise(model, lambda *_: None)
    return jobs_of(device_programs(graph, model, BACKENDS["cuda"](), buckets(2, 8), lambda *_: None)[1], "sm90")


def trial_of(job, schedule):
    source = job.source("sm90", schedule)
    return Trial(
        source, Cubin(source.symbol, SYMBOL_CUBIN + source.symbol.encode(), 60000, source.num_warps, 1, 0, 0, 32, 0)
    )


@pytest.fixture
def driver(use_driver, monkeypatch):
    monkeypatch.setattr("aotc.meter.LEAST_L2", 1 << 17)
    return use_driver(Driver())


def job_of(jobs, start):
    """The first job of a family, `skinny` or what takes its place."""
    starts = (start, start.replace("skinny", "phase"))
    return next(j for j in jobs if j.key.startswith(starts))


@pytest.mark.parametrize("start", ["matvec 1 ", "skinny 2 ", "attention_decode 1", "attention_decode 2", "attention 8"])
def test_trials_compute_what_the_interpreter_does_and_agree(jobs, driver, start):
    job = job_of(jobs, start)
    meter = open_meter("sm90")
    first, second, *_ = job.choice.family.tries("sm90", job.choice.shape)
    outputs = []
    for schedule in (first, second):
        trial = trial_of(job, schedule)
        driver.expect(trial.source)
        timing = meter(job, trial)
        graphs = [driver.graphs[g] for g in driver.launched[-LAUNCHES - 2 :]]
        calls = len(graphs[-1])
        assert [len(g) for g in graphs] == [1] + [calls] * (LAUNCHES + 1) and calls >= LEAST_CALLS
        assert timing.microseconds == pytest.approx(1000 / calls)
        rotated = {n.arguments[i] for n in graphs[-1] for i in range(len(n.arguments))}
        assert len(rotated) > len(graphs[-1][0].arguments)  # weights or caches have copies
        assert len({n.arguments[0] for n in graphs[-1]}) in (1, calls) and driver.shared[-1] == 60000
        outputs.append(timing.outputs)
    dims, (node, blocks) = step_dims(job.program), driver.seen[-1]
    body = job.program.kernels[job.call.kernel].body
    arrays = {}
    for value, address in zip(body.inputs, node.arguments, strict=False):
        shape = value.type.at(dims).ints
        data = blocks[str(address)][: int(np.prod(shape)) * value.type.dtype.itemsize]
        arrays[value.name] = data.view(value.type.dtype.np).reshape(shape)
    updated = {name for name, _ in body.aliases}
    expected = [a for n, a in interpret(body, arrays, dims=dims).items() if n not in updated]
    for got in outputs:
        assert all(relative_error(g, e) < 2e-2 for g, e in zip(got, expected, strict=True)) and got
    assert job.key.startswith("attention") or relative_error(outputs[0][0], np.zeros_like(outputs[0][0])) > 0


def test_memory_of_a_job_goes_back_when_the_next_one_begins(jobs, driver):
    meter = open_meter(None)
    assert (meter.arch, meter.device) == ("sm90", "Fake GPU")
    taken = []
    for start in ("matvec 1 ", "skinny 2 ", "matvec 1 "):
        job = job_of(jobs, start)
        trial = trial_of(job, job.choice.schedule)
        driver.expect(trial.source)
        meter(job, trial)
        taken.append((len(driver.blocks), driver.live["executable"], driver.live["module"]))
    assert taken[0] == taken[2] and taken[0][1:] == (2, 2)


def test_a_trial_that_does_not_start_leaves_the_gpu_and_a_lost_gpu_is_told_apart(jobs, driver):
    meter, job = open_meter(None), job_of(jobs, "matvec 1 ")
    trial = trial_of(job, job.choice.schedule)
    driver.expect(trial.source)
    driver.failing = {"cuFuncSetAttribute": 1}
    with pytest.raises(DeviceError) as error:
        meter(job, trial)
    assert not isinstance(error.value, DeviceLostError)
    driver.failing = {}
    meter(job, trial)
    driver.failing = {"cuGraphLaunch": 700, "cuStreamSynchronize": 700}
    with pytest.raises(DeviceLostError, match=f"lost after a candidate of {job.key}"):
        meter(job, trial)


def test_another_card_is_refused(driver):
    with pytest.raises(RequestError, match=r"schedules of sm80 .* this is sm90 \(Fake GPU\): --arch native"):
        open_meter("sm80")


def test_copies_go_past_the_cache_and_fit_the_memory(monkeypatch):
    mib = 1 << 20
    monkeypatch.setattr("aotc.meter.LEAST_L2", 50 * mib)
    assert copies_of(12 * mib, 50 * mib, 1 << 40) == 13  # of 150 MiB
    assert copies_of(12 * mib, 100 * mib, 1 << 40) == 25
    assert copies_of(1, 50 * mib, 1 << 40) == MOST_CALLS
    assert copies_of(600 * mib, 50 * mib, 1 << 40) == copies_of(0, 50 * mib, 0) == 1
    assert copies_of(12 * mib, 50 * mib, 40 * mib) == 3
    with pytest.raises(DeviceError, match="more than half"):
        copies_of(12 * mib, 50 * mib, 11 * mib)
