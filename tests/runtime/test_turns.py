"""Kernels whose blocks wait for one another: no more blocks than run at once, and one program at a time on a GPU, over a
driver that records."""

import gc
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from fake_cuda import FakeDriver

from aotc.artifact.plan import Address, Call, Kernel, Plan, Space
from aotc.errors import DeviceError
from aotc.runtime.devices import turns
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.cuda_program import CudaKernels, CudaProgram


class TracingDriver(FakeDriver):
    """`said` has what concerns turns, in order; an event by the stream of its latest record. `slow` has the seconds before
    each call, in which other threads go on; `meanwhile` runs while a launch or a wait is on its way to the driver."""

    def __init__(self, **options):
        super().__init__(**options)
        self.said, self.recorded, self.slow, self.meanwhile = [], {}, 0, lambda: None

    def __getattr__(self, name):
        call = super().__getattr__(name)

        def late(*arguments):
            if self.slow:
                time.sleep(self.slow)
            if name in ("cuGraphLaunch", "cuStreamWaitEvent", "cuEventRecord"):
                self.meanwhile()
            return call(*arguments)

        return late

    def do_cuCtxSynchronize(self):
        self.said.append("synchronize")

    def do_cuStreamWaitEvent(self, stream, event, flags):
        super().do_cuStreamWaitEvent(stream, event, flags)
        self.said.append(("wait", stream, self.recorded[event]))

    def do_cuEventRecord(self, event, stream):
        super().do_cuEventRecord(event, stream)
        self.recorded[event] = stream
        self.said.append(("record", stream))

    def do_cuGraphLaunch(self, executable, stream):
        super().do_cuGraphLaunch(executable, stream)
        self.said.append(("launch", stream))


@pytest.fixture
def driver(use_driver, monkeypatch):
    monkeypatch.setattr(turns, "_all", {})
    return use_driver(TracingDriver())


def program(device, *kernels):
    """A program of kernels, each the blocks of its grid and whether they wait for one another."""
    cubin = SimpleNamespace(read=lambda name: b"\x7fELF k0 k1 k2")
    meta = {"cubin": "", "num_warps": 12, "shared": 0, "waits": True}
    made = [
        Kernel(f"k{n}", "", {**meta, "grid": [x, 2, 1], **({"together": True} if together else {})})
        for n, (x, together) in enumerate(kernels or ((132, True),))
    ]
    calls = tuple(Call(n, (Address(0, 0),)) for n in range(len(made)))
    plan = Plan("p", (), (Space("arena", "arena"),), (), (), tuple(made), calls, 0, 0)
    return CudaProgram(plan, device, CudaKernels(device, cubin), {"arena": 0}, lambda offset: offset)


def launched(driver, *programs):
    """What the driver is told while programs are launched one after the other."""
    driver.said.clear()
    for each in programs:
        each.launch()
    return driver.said


def test_blocks_that_wait_for_one_another_are_no_more_than_multiprocessors(driver):
    driver.multiprocessors = 8
    program(CudaDevice(), (132, True), (132, False), (5, True))
    assert [(node.gridDimX, node.gridDimY) for node in driver.nodes] == [(8, 2), (132, 2), (5, 2)]


def test_a_model_alone_records_and_waits_for_nothing(driver):
    device = CudaDevice()
    one, other, plain = program(device), program(device), program(device, (132, False))
    stream = device.stream
    assert launched(driver, one, other, plain, one) == [("launch", stream)] * 4


def test_programs_without_such_kernels_take_no_turns(driver):
    devices = [CudaDevice(), CudaDevice()]
    programs = [program(device, (132, False)) for device in devices]
    assert driver.said == [] and driver.live["event"] == 0
    assert launched(driver, *programs) == [("launch", device.stream) for device in devices]
    waits = program(devices[0])
    assert launched(driver, programs[1], waits, programs[1]) == [
        ("launch", device.stream) for device in (devices[1], devices[0], devices[1])
    ]


def test_streams_wait_for_each_other_each_way(driver):
    devices = [CudaDevice(), CudaDevice()]
    first, second = map(program, devices)
    a, b = (device.stream for device in devices)
    assert launched(driver, first, second, second, first, second) == [
        ("launch", a), ("record", a),
        ("wait", b, a), ("launch", b), ("record", b),
        ("launch", b), ("record", b),
        ("wait", a, b), ("launch", a), ("record", a),
        ("wait", b, a), ("launch", b), ("record", b),
    ]  # fmt: skip


def test_who_joins_waits_for_what_was_launched_before_once(driver):
    first, late = CudaDevice(), CudaDevice()
    alone = program(first)
    launched(driver, alone, alone)
    second = program(late)
    assert driver.said == [("launch", first.stream)] * 2 + ["synchronize"]
    assert launched(driver, second) == [("launch", late.stream), ("record", late.stream)]
    program(late), program(first)
    assert "synchronize" not in driver.said, "both streams are known"


def test_a_profile_takes_turns(driver):
    first, second = CudaDevice(), CudaDevice()
    ahead, profiled = program(first), program(second)
    launched(driver, ahead)
    profiled.kernel_times(1)
    assert driver.said.index(("wait", second.stream, first.stream)) < driver.said.index(("launch", second.stream))
    assert driver.said[-3:-1] == [("launch", second.stream), ("record", second.stream)]
    assert launched(driver, ahead)[0] == ("wait", first.stream, second.stream)


@pytest.mark.parametrize("how", ["closed", "collected", "released"])
def test_nobody_waits_for_who_has_left(driver, how):
    stays, device = CudaDevice(), CudaDevice()
    goes = device.scope(driver.cuStreamCreate(0)) if how == "released" else device
    first, second = program(stays), program(goes)
    stream, other = stays.stream, goes.stream
    assert launched(driver, first, second)[2:] == [("wait", other, stream), ("launch", other), ("record", other)]
    if how == "closed":
        device.close()
    elif how == "released":
        goes.release()
    else:
        goes._cycle = second  # only the collector finds it
        del device, goes, second
        gc.collect()
    assert driver.live["event"] == 1
    assert launched(driver, first, first) == [("launch", stream)] * 2
    late = CudaDevice()
    assert launched(driver, program(late), first)[-3:] == [("wait", stream, late.stream), ("launch", stream), ("record", stream)]
    stays.close(), late.close()
    assert driver.live["event"] == 0


def test_of_three_the_others_go_on_taking_turns(driver):
    devices = [CudaDevice() for _ in range(3)]
    first, second, third = map(program, devices)
    a, b, c = (device.stream for device in devices)
    launched(driver, first, second)
    devices[1].close()
    assert launched(driver, third, first) == [("launch", c), ("record", c), ("wait", a, c), ("launch", a), ("record", a)]


def test_a_stream_that_two_scopes_use_takes_turns_until_both_have_left(driver):
    """Bindings in a caller's stream, which is the same for both."""
    device = CudaDevice()
    stream = driver.cuStreamCreate(0)
    scopes = [device.scope(stream), device.scope(stream)]
    own, first, second = map(program, (device, *scopes))
    launched(driver, first)
    scopes[0].release()
    turn = [("wait", stream, device.stream), ("launch", stream), ("record", stream)]
    assert launched(driver, own, second)[-3:] == turn
    scopes[1].release()
    assert launched(driver, own) == [("launch", device.stream)]
    device.close()
    driver.cuStreamDestroy(stream)
    assert driver.everything == {}


def test_a_model_that_cannot_be_built_takes_no_turn(driver):
    alone, broken = program(CudaDevice()), CudaDevice()
    driver.failing["cuEventCreate"] = 2
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        program(broken)
    assert launched(driver, alone) == [("launch", alone._device.stream)]


def test_a_device_that_failed_gives_its_turn_back(driver):
    failed, alone = CudaDevice(), CudaDevice()
    programs = [program(failed), program(alone)]
    driver.failing["cuGraphLaunch"] = driver.failing["cuEventDestroy"] = 719
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        programs[0].launch()
    failed.close()
    driver.failing.clear()
    assert launched(driver, programs[1]) == [("launch", alone.stream)]


@pytest.mark.parametrize("when", [0, 1, 2], ids=["wait", "launch", "record"])
def test_a_device_that_is_collected_in_the_middle_of_a_launch(driver, when):
    """The collector runs in any thread at any time: what a device gives back then must not wait for that thread itself,
    and its event is not gone while it is used."""
    stays, goes, third = CudaDevice(), CudaDevice(), CudaDevice()
    first, second, _kept = program(stays), program(goes), program(third)
    launched(driver, first, second)
    goes._cycle = second
    a, b, times = stays.stream, goes.stream, iter(range(9))
    driver.said.clear()
    driver.meanwhile = lambda: gc.collect() if next(times) == when else None
    gc.disable()
    try:
        del goes, second
        thread = threading.Thread(target=lambda: (stays.enter(), first.launch()), daemon=True)
        thread.start()
        thread.join(10)
    finally:
        gc.enable()
    assert not thread.is_alive(), "it waits for itself"
    assert driver.said == [("wait", a, b), ("launch", a), ("record", a)]
    assert driver.live["event"] == 2


def test_threads_never_come_between_a_wait_and_its_record(driver):
    devices = [CudaDevice() for _ in range(4)]
    programs = [program(device) for device in devices]
    driver.said.clear()
    driver.slow = 1e-4

    def launch(device, each):
        device.enter()
        for _ in range(25):
            each.launch()

    threads = [threading.Thread(target=launch, args=pair) for pair in zip(devices, programs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before, said, count = None, iter(driver.said), 0
    for step in said:
        if step[0] == "wait":
            assert step[2] == before != step[1]
            stream = step[1]
            step = next(said)  # noqa: PLW2901
            assert step == ("launch", stream)
        else:
            assert step[0] == "launch" and before in (None, step[1])
        assert next(said) == ("record", step[1])
        before, count = step[1], count + 1
    assert count == 100


def test_a_launch_that_fails_half_way_is_waited_for(driver):
    """A part of it may run."""
    first, second = CudaDevice(), CudaDevice()
    both = turns.turns_of(first)
    turns.turns_of(second)
    driver.said.clear()

    def fail():
        raise DeviceError("out of memory")

    with pytest.raises(DeviceError, match="out of memory"):
        both.run(first, fail)
    both.run(second, lambda: None)
    a, b = int(first.stream), int(second.stream)
    assert driver.said == [("record", a), ("wait", b, a), ("record", b)]


def test_a_forked_process_has_locks_of_its_own(driver):
    device = CudaDevice()
    both = turns.turns_of(device)
    held, go = threading.Event(), threading.Event()

    def launch():
        held.set()
        go.wait(10)

    thread = threading.Thread(target=lambda: both.run(device, launch))
    thread.start()
    held.wait(10)
    child = os.fork()
    if not child:
        signal.alarm(5)
        both._leave((device.driver, int(device.stream)))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    go.set()
    thread.join()
    assert status == 0
