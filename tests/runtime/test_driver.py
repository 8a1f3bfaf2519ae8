"""The driver's functions through ctypes, on a libcuda.so.1 that is compiled here against NVIDIA's header: symbols, widths of
arguments, layouts of structures, and what is given out."""

import ctypes
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import triton
from cuda_cases import sequence

from aotc.errors import DeviceError
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.devices import driver as api
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.cuda_node import KernelNode, tiled
from aotc.runtime.devices.driver import Driver
from aotc.runtime.sequence import Row

HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
HIGH = 0x7FFF_FFFF_FFFF_FF00  # a handle
ADDRESS = 0xFEDC_BA98_7654_3200
HUGE = (5 << 32) + 7  # bytes: not copied
UNKNOWN_ERROR, OUT_OF_MEMORY = 4242, 2


def build(folder, *options):
    path = folder / f"libcuda{len(options)}.so"
    source = Path(__file__).parent / "fake_libcuda.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{HEADERS}", *options, source, "-o", path], check=True)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def library(path, monkeypatch):
    """The fake library, which Driver finds as the machine's."""
    monkeypatch.setattr(api, "LIBRARY", str(path))
    library = ctypes.CDLL(str(path))
    library.fake_clear()
    yield library
    ctypes.c_int.in_dll(library, "fake_code").value = 0


def log(library):
    """What it was called with, a line a call."""
    return (ctypes.c_char * (1 << 20)).in_dll(library, "fake_log").value.decode().splitlines()


def fails(library, code):
    ctypes.c_int.in_dll(library, "fake_code").value = code


CALLS = [
    (("cuInit", 0), "cuInit 0", 0),
    (("cuDriverGetVersion",), "cuDriverGetVersion", 12030),
    (("cuDeviceGetCount",), "cuDeviceGetCount", 3),
    (("cuDeviceGet", 2), "cuDeviceGet 2", 42),
    (("cuDeviceGetAttribute", 38, 42), "cuDeviceGetAttribute 38 42", 50 << 20),
    (("cuDevicePrimaryCtxRetain", 42), "cuDevicePrimaryCtxRetain 42", 0x7FFF_DEAD_BEEF_0010),
    (("cuDevicePrimaryCtxRelease", 42), "cuDevicePrimaryCtxRelease_v2 42", 0),
    (("cuCtxSynchronize",), "cuCtxSynchronize", 0),
    (("cuCtxSetCurrent", HIGH), f"cuCtxSetCurrent {HIGH:#x}", 0),
    (("cuCtxPushCurrent", HIGH), f"cuCtxPushCurrent_v2 {HIGH:#x}", 0),
    (("cuCtxPopCurrent",), "cuCtxPopCurrent_v2", 0x7FFF_DEAD_BEEF_0010),
    (("cuStreamDestroy", HIGH), f"cuStreamDestroy_v2 {HIGH:#x}", 0),
    (("cuStreamSynchronize", 0), "cuStreamSynchronize (nil)", 0),
    (("cuStreamWaitEvent", HIGH, HIGH + 1, 0), f"cuStreamWaitEvent {HIGH:#x} {HIGH + 1:#x} 0", 0),
    (("cuEventDestroy", HIGH), f"cuEventDestroy_v2 {HIGH:#x}", 0),
    (("cuEventRecord", HIGH, HIGH + 1), f"cuEventRecord {HIGH:#x} {HIGH + 1:#x}", 0),
    (("cuEventSynchronize", HIGH), f"cuEventSynchronize {HIGH:#x}", 0),
    (("cuEventElapsedTime", HIGH, HIGH + 1), f"cuEventElapsedTime {HIGH:#x} {HIGH + 1:#x}", 0.75),
    (("cuMemGetInfo",), "cuMemGetInfo_v2", (5 << 32, 6 << 32)),
    (("cuMemAlloc", HUGE), f"cuMemAlloc_v2 {HUGE} -> {ADDRESS:x}", ADDRESS),
    (("cuMemFree", ADDRESS), f"cuMemFree_v2 {ADDRESS:x}", 0),
    (("cuMemFreeHost", 0), "cuMemFreeHost", 0),
    (("cuMemsetD8Async", ADDRESS, 255, HUGE, HIGH), f"cuMemsetD8Async {ADDRESS:x} 255 {HUGE} {HIGH:#x}", 0),
    (("cuMemcpyHtoDAsync", ADDRESS, HIGH, HUGE, 1), f"cuMemcpyHtoDAsync_v2 {ADDRESS:x} {HIGH:#x} {HUGE} 0x1", 0),
    (("cuMemcpyDtoHAsync", HIGH, ADDRESS, HUGE, 1), f"cuMemcpyDtoHAsync_v2 {HIGH:#x} {ADDRESS:x} {HUGE} 0x1", 0),
    (("cuModuleUnload", HIGH), f"cuModuleUnload {HIGH:#x}", 0),
    (("cuFuncSetAttribute", HIGH, 8, 200_000), f"cuFuncSetAttribute {HIGH:#x} 8 200000", 0),
    (("cuGraphDestroy", HIGH), f"cuGraphDestroy {HIGH:#x}", 0),
    (("cuGraphUpload", HIGH, HIGH + 1), f"cuGraphUpload {HIGH:#x} {HIGH + 1:#x}", 0),
    (("cuGraphLaunch", HIGH, HIGH + 1), f"cuGraphLaunch {HIGH:#x} {HIGH + 1:#x}", 0),
    (("cuGraphExecDestroy", HIGH), f"cuGraphExecDestroy {HIGH:#x}", 0),
]  # fmt: skip
MAKING = [  # what gives a new handle out
    (("cuStreamCreate", 1), "cuStreamCreate 1"),
    (("cuEventCreate", 2), "cuEventCreate 2"),
    (("cuGraphCreate", 0), "cuGraphCreate 0"),
    (("cuModuleLoadData", b"\x7fELF\x00\x02"), "cuModuleLoadData 7f454c4600"),
    (("cuModuleGetFunction", HIGH, b"name"), f"cuModuleGetFunction {HIGH:#x} name -> HANDLE"),
    (("cuGraphInstantiate", HIGH, 0), f"cuGraphInstantiateWithFlags {HIGH:#x} 0"),
]
SHAPED = {  # tests of their own, below
    "cuDeviceGetName", "cuMemHostAlloc", "cuGraphAddKernelNode", "cuGraphAddDependencies", "cuTensorMapEncodeTiled",
}  # fmt: skip


@pytest.mark.parametrize(("call", "line", "result"), CALLS, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_what_the_driver_is_told_and_what_it_gives(library, call, line, result):
    name, *arguments = call
    assert getattr(Driver(), name)(*arguments) == result
    assert log(library) == [line]


def test_handles_are_numbers(library):
    driver, handles = Driver(), []
    for (name, *arguments), _ in MAKING:
        handles.append(getattr(driver, name)(*arguments))
    assert all(type(h) is int and h for h in handles) and len(set(handles)) == len(handles)
    assert log(library) == [line.replace("HANDLE", hex(h)) for (_, line), h in zip(MAKING, handles, strict=True)]


def test_every_function_is_tried():
    assert {c[0][0] for c in (*CALLS, *MAKING)} | SHAPED == set(api.FUNCTIONS)
    assert set(api.FUNCTIONS) > api.QUICK


@pytest.mark.parametrize("name", ["CU_TENSOR_MAP_BYTES", "CU_TENSOR_MAP_ALIGNMENT"])
def test_the_size_of_a_tensor_map(name):
    assert getattr(api, name) == 128


def test_constants_are_those_of_the_header(tmp_path):
    named = {n: v for n, v in vars(api).items() if n.startswith("CU_") and not n.startswith("CU_TENSOR_MAP_BYTES")}
    del named["CU_TENSOR_MAP_ALIGNMENT"]
    checks = "".join(f'_Static_assert({name} == {value}, "{name}");\n' for name, value in named.items())
    layouts = {"CUDA_KERNEL_NODE_PARAMS_v2": api.KernelNodeParams, "CUgraphEdgeData": api.GraphEdgeData}
    for struct, ours in layouts.items():
        checks += f'_Static_assert(sizeof({struct}) == {ctypes.sizeof(ours)}, "{struct}");\n'
        for field, *_ in ours._fields_:
            offset = getattr(ours, field).offset
            checks += f'_Static_assert(__builtin_offsetof({struct}, {field}) == {offset}, "{struct} {field}");\n'
    checks += f'_Static_assert(sizeof(CUtensorMap) == {api.CU_TENSOR_MAP_BYTES}, "");\n'
    checks += f'_Static_assert({api.CU_TENSOR_MAP_ALIGNMENT} % _Alignof(CUtensorMap) == 0, "");\n'
    (tmp_path / "check.c").write_text("#include <cuda.h>\n" + checks)
    subprocess.run(["gcc", "-c", f"-I{HEADERS}", tmp_path / "check.c", "-o", tmp_path / "check.o"], check=True)
    assert len(named) > 15


def test_a_name_and_pinned_memory(library):
    driver, name = Driver(), ctypes.create_string_buffer(128)
    driver.cuDeviceGetName(name, len(name), 42)
    place = driver.cuMemHostAlloc(5000, 3)
    ctypes.memset(place, 1, 5000)
    driver.cuMemFreeHost(place)
    assert name.value == b"Fake GPU"
    assert log(library) == ["cuDeviceGetName 128 42", "cuMemHostAlloc 5000 3", "cuMemFreeHost"]


def test_a_node_with_tensor_maps_among_nodes_without(library):
    """The same memory describes one after the other: nothing of an earlier one is left."""
    driver, pointers, maps = (
        Driver(), (ctypes.c_int * 4096).in_dll(library, "fake_pointers"), (ctypes.c_int * 4096).in_dll(library, "fake_maps")
    )  # fmt: skip
    node = KernelNode(4, 2)
    added = []
    for function, values, count in ((101, [ADDRESS, 2, 3, 4], 0), (102, [ADDRESS + 512, 7], 2), (101, [5, 6, 7, 8], 0)):
        pointers[function], maps[function] = len(values), count
        node.kernel(function, (function, 2, 3), 128, 1000 + function)
        node.arguments(values)
        for n in range(count):
            meta = {"dtype": ("bf16", "f16")[n], "rows": 300, "columns": 256, "box_rows": 64, "box_blocks": n + 1}
            driver.cuTensorMapEncodeTiled(node.tensor_map(len(values), n), *tiled(meta, ADDRESS // 16 + 4096 * n))
        added.append(driver.cuGraphAddKernelNode(HIGH, None, 0, node.params))
    lines, encoded = log(library), [ADDRESS // 16 + 4096 * n for n in range(2)]
    assert [line for line in lines if line.startswith("cuTensor")] == [
        f"cuTensorMapEncodeTiled {kind} 3 {place:#x} 64/512/64/1 300/128/64/1 4/0/{blocks}/1 modes 0 3 3 0"
        for kind, place, blocks in ((9, encoded[0], 1), (6, encoded[1], 2))
    ]
    words = [" ,".join(f"{(place << 12) % 2**64 + n:x}" for n in range(16)) for place in encoded]
    tails = ["fedcba9876543200 2 3 4", f"fedcba9876543400 7 [{words[0]}] [{words[1]}]", "5 6 7 8"]
    assert [line for line in lines if line.startswith("cuGraph")] == [
        f"cuGraphAddKernelNode_v2 {HIGH:#x} (nil) 0: {f:#x} grid {f} 2 3 block 128 1 1 shared {1000 + f} "
        f"rest (nil) (nil) (nil) with {tail} -> {made:#x}"
        for f, tail, made in zip((101, 102, 101), tails, added, strict=True)
    ]


def test_edges(library):
    edges = (api.GraphEdgeData * 2)()
    edges[1].from_port, edges[1].type = 1, 1
    Driver().cuGraphAddDependencies(HIGH, (ctypes.c_void_p * 3)(1, HIGH, 3), (ctypes.c_void_p * 2)(HIGH, 3), edges, 2)
    assert log(library) == [f"cuGraphAddDependencies_v2 {HIGH:#x} 0x1-{HIGH:#x}:0,0,0,0 {HIGH:#x}-0x3:1,0,1,0"]


def test_errors_have_their_names(library):
    driver = Driver()
    fails(library, OUT_OF_MEMORY)
    message = "^the GPU reports CUDA_ERROR_OUT_OF_MEMORY in cuMemAlloc: other processes hold its memory: look at nvidia-smi$"
    with pytest.raises(DeviceError, match=message):
        driver.cuMemAlloc(HUGE)
    fails(library, UNKNOWN_ERROR)
    with pytest.raises(DeviceError, match="^the GPU reports error 4242 in cuDeviceGet$"):
        driver.cuDeviceGet(0)
    fails(library, 0)
    assert driver.cuDeviceGet(0) == 40


def test_what_ctypes_cannot_pass_on_is_refused(library):
    driver = Driver()
    for name, wrong in (("cuMemAlloc", 1.5), ("cuMemAlloc", "4096"), ("cuMemAlloc", None), ("cuStreamDestroy", np.int64(4096))):
        with pytest.raises((TypeError, ctypes.ArgumentError)):
            getattr(driver, name)(wrong)
    with pytest.raises(TypeError):
        driver.cuMemAlloc()
    with pytest.raises(AttributeError):
        _ = driver.cuMemAllocManaged
    assert log(library) == []


def test_no_driver_and_an_old_one(monkeypatch, tmp_path):
    monkeypatch.setattr(api, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    with pytest.raises(DeviceError, match=r"^there is no NVIDIA driver here \(libcuda.so.1 does not load\)$"):
        CudaDevice()
    monkeypatch.setattr(api, "LIBRARY", str(build(tmp_path, "-DWITHOUT_TENSOR_MAPS")))
    message = r"^the NVIDIA driver is too old \(it has no cuTensorMapEncodeTiled\): install a newer one$"
    device = CudaDevice()
    with pytest.raises(DeviceError, match=message):
        device.call("cuTensorMapEncodeTiled", 0)
    device.close()


def test_a_step_of_a_model_reaches_the_driver(library, cuda_artifact):
    """All that the executor does, from the context to the end, and what is left in the driver's hands: nothing."""
    executor = CudaExecutor(cuda_artifact, 1, CudaDevice(1))
    plan = executor.program("decode", 1).plan
    built = log(library)
    library.fake_clear()
    executor.start(sequence(5, 6, 7))
    executor.step([Row(sequence(5, 6, 7), 2, 1, True)])
    step = [line.split()[0] for line in log(library)]
    assert step == [
        "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuEventRecord",
        "cuEventSynchronize",
    ]  # fmt: skip
    nodes = [re.search(r": (\S+) grid (\d+) (\d+) (\d+) block (\d+) 1 1 shared (\d+)", line) for line in built]
    symbols = dict(re.search(r"(\S+) -> (\S+)", line).group(2, 1) for line in built if line.startswith("cuModuleGetFunction"))
    got = [(symbols[n[1]], [*map(int, n.groups()[1:])]) for n in nodes if n]
    metas = [plan.kernels[call.kernel] for call in plan.calls()]
    assert got[: len(metas)] == [(k.symbol, [*k.meta["grid"], 32 * k.meta["num_warps"], k.meta["shared"]]) for k in metas]
    edges = next(line for line in built if line.startswith("cuGraphAddDependencies"))
    assert [e.split(":")[1] for e in edges.split()[2:]] == ["1,0,1,0"] * (len(metas) - 1), "kernels of sm90 wait themselves"
    executor.close()
    counts = Counter(line.split()[0] for line in (*built, *log(library)))
    for made, released in (
        ("cuMemAlloc_v2", "cuMemFree_v2"), ("cuMemHostAlloc", "cuMemFreeHost"), ("cuStreamCreate", "cuStreamDestroy_v2"),
        ("cuEventCreate", "cuEventDestroy_v2"), ("cuModuleLoadData", "cuModuleUnload"), ("cuGraphCreate", "cuGraphDestroy"),
        ("cuGraphInstantiateWithFlags", "cuGraphExecDestroy"), ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
    ):  # fmt: skip
        assert counts[made] == counts[released] > 0, made


def test_slow_calls_run_without_pythons_lock(library):
    """Those of QUICK alone are bound to keep it."""
    driver = Driver()
    for name in api.FUNCTIONS:
        held = type(getattr(driver, name))._flags_ & 4  # FUNCFLAG_PYTHONAPI
        assert bool(held) == (name in api.QUICK)
