"""Weights on their way to a GPU: only what its target's plans name, checked, at the places that kernels are given."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from interpreted_cuda import InterpretedDriver

from aotc.artifact import manifest as M
from aotc.artifact import reader
from aotc.artifact.checksum import crc32
from aotc.artifact.plan import Address
from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.errors import ArtifactError
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.devices import cuda_weights
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.engine import Engine
from aotc.runtime.executor import CacheOptions, CpuExecutor
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, tiny_config):
    """For a CPU and a GPU: linear layers lie twice in it, embeddings once."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "config.json").write_text(json.dumps({**tiny_config, "tie_word_embeddings": False, "num_hidden_layers": 1}))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "x86-64-v3,sm90", "--max-num-seqs", "2"]
    arguments += ["--dtype", "f32", "--max-num-batched-tokens", "16", "-o", str(folder / "artifact"), "--quiet"]
    assert main(arguments) == 0
    return open_artifact(folder / "artifact")


def targets(artifact):
    """The targets for a CPU and for a GPU."""
    return artifact.manifest.targets


def places_of(artifact, target):
    """Offsets into weights.bin that the plans of a target name."""
    places = set()
    for entry in target.programs:
        plan = artifact.plan(entry.plan)
        named = {a for call in plan.calls() for a in call.args if isinstance(a, Address)}
        places |= {a.offset for a in named if plan.spaces[a.space].kind == "weights"}
    return places


def test_ranges_are_the_pages_that_plans_name(artifact):
    sizes = {w.offset: w.nbytes for w in artifact.manifest.weights}
    total = 0
    for target in targets(artifact):
        ranges = artifact.manifest.weight_ranges(target)
        pages = {page for begin, n in ranges for page in range(begin // 4096, -(-(begin + n) // 4096))}
        wanted = {p for at in places_of(artifact, target) for p in range(at // 4096, -(-(at + sizes[at]) // 4096))}
        assert pages == wanted
        assert all(b >= a + n for (a, n), (b, _) in zip(ranges, ranges[1:], strict=False))
        assert sum(n for _, n in ranges) < 0.8 * artifact.manifest.weights_bytes
        total += sum(n for _, n in ranges)
    assert total < 1.5 * artifact.manifest.weights_bytes, "what both use is small"


@pytest.mark.parametrize("chunk", [None, 1 << 14])
def test_what_kernels_are_given_is_what_lies_in_the_file(artifact, gpu, monkeypatch, chunk):
    """Also where a chunk holds several ranges, and a range several chunks."""
    if chunk:
        data = np.asarray(artifact.map_weights())
        crc = tuple(crc32(data[at : at + chunk].data) for at in range(0, len(data), chunk))
        whole = M.msgspec.structs.replace(artifact.manifest, weights_crc32=crc)
        for module in (cuda_weights, reader):
            monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
        artifact = type(artifact)(artifact.path, whole)
    device, driver = gpu()
    executor = CudaExecutor(artifact, 2, device)
    (block,) = (b for a, b in driver.blocks.items() if a == executor._weights._base)
    assert executor.memory.weights == len(block) < artifact.manifest.weights_bytes
    data, sizes = artifact.map_weights(check=False), {w.offset: w.nbytes for w in artifact.manifest.weights}
    on_gpu = np.ctypeslib.as_array(block)
    for at in places_of(artifact, targets(artifact)[1]):
        there = executor._weights.address(at) - executor._weights._base
        np.testing.assert_array_equal(on_gpu[there : there + sizes[at]], data[at : at + sizes[at]])
        assert there % 64 == at % 64
    others, used = (places_of(artifact, t) for t in targets(artifact))
    taken = {page for at in used for page in range(at // 4096, -(-(at + sizes[at]) // 4096))}
    unused = min(at for at in others if at // 4096 not in taken)
    for offset in (unused, artifact.manifest.weights_bytes):
        with pytest.raises(ArtifactError, match="names weights that its manifest does not"):
            executor._weights.address(offset)


def test_damage_is_named(artifact, gpu, tmp_path):
    shutil.copytree(artifact.path, tmp_path / "copy")
    data = np.fromfile(tmp_path / "copy" / "weights.bin", np.uint8)
    data[min(places_of(artifact, targets(artifact)[1]))] ^= 1
    data.tofile(tmp_path / "copy" / "weights.bin")
    device, driver = gpu()
    with pytest.raises(ArtifactError, match="weights.bin is damaged at"):
        CudaExecutor(open_artifact(tmp_path / "copy"), 1, device)
    assert driver.everything == {}


def uploaded(artifact, gpu):
    """The weights as they lie on a fake GPU."""
    device, driver = gpu()
    executor = CudaExecutor(artifact, 1, device)
    return bytes(driver.blocks[executor._weights._base])


def test_a_read_may_bring_less_than_was_asked(artifact, gpu, monkeypatch):
    whole, real = uploaded(artifact, gpu), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][: 1 << 14]], at))
    assert uploaded(artifact, gpu) == whole


@pytest.mark.parametrize("code", [errno.EFAULT, errno.EINVAL])
def test_where_the_kernel_cannot_write_into_pinned_memory(artifact, gpu, monkeypatch, code):
    whole, real, refused = uploaded(artifact, gpu), os.preadv, []
    device, driver = gpu()

    def preadv(file, buffers, at):
        address = np.frombuffer(buffers[0], np.uint8).ctypes.data
        if any(begin <= address < begin + len(block) for begin, block in [*driver.host.items()]):
            refused.append(at)
            raise OSError(code, os.strerror(code))
        return real(file, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    executor = CudaExecutor(artifact, 1, device)
    assert bytes(driver.blocks[executor._weights._base]) == whole
    assert 0 < len(refused) <= cuda_weights.THREADS, "once a thread"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "weights.bin changed while it was read: copy the artifact again"),  # the file ends, and is whole again later
        (OSError(errno.EIO, os.strerror(errno.EIO)), "weights.bin cannot be read: Input/output error"),
    ],
)
def test_a_file_that_cannot_be_read_to_its_end(artifact, gpu, monkeypatch, given, message):
    def preadv(*_):
        if given:
            raise given
        return 0

    monkeypatch.setattr(os, "preadv", preadv)
    device, driver = gpu()
    with pytest.raises(ArtifactError, match=message):
        CudaExecutor(artifact, 1, device)
    assert driver.everything == {}


def test_nothing_more_is_sent_after_a_damaged_chunk(artifact, gpu, monkeypatch):
    chunk = 1 << 14
    for module in (cuda_weights, reader):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(cuda_weights, "THREADS", 1)
    data = np.asarray(artifact.map_weights(check=False))
    crc = [crc32(data[at : at + chunk].data) for at in range(0, len(data), chunk)]
    first, *_, last = artifact.chunks_of(targets(artifact)[1])
    assert last - first > 2
    crc[first + 1] ^= 1
    changed = type(artifact)(artifact.path, M.msgspec.structs.replace(artifact.manifest, weights_crc32=tuple(crc)))
    device, driver = gpu()
    with pytest.raises(ArtifactError, match="weights.bin is damaged at"):
        CudaExecutor(changed, 1, device)
    assert sum(size for what, _, size in (t for t in driver.trace if t[0] == "up")) <= chunk


def test_chunks_that_a_target_does_not_use_are_not_read(artifact, gpu, monkeypatch):
    """A tail of the file that belongs to another target, with a wrong checksum."""
    cpu, cuda = targets(artifact)
    end = max(at + n for at, n in cpu.weights)
    assert end < cuda.weights[-1][0] + cuda.weights[-1][1], "the GPU's own weights come last"
    for module in (cuda_weights, reader):
        monkeypatch.setattr(module, "CHUNK_BYTES", end)
    data = artifact.map_weights(check=False)
    crc = (crc32(data[:end].data), 0)
    changed = type(artifact)(artifact.path, M.msgspec.structs.replace(artifact.manifest, weights_crc32=crc))
    assert CpuExecutor(changed, 1).memory.weights == sum(n for _, n in cpu.weights)
    with pytest.raises(ArtifactError, match="weights.bin is damaged at"):
        CudaExecutor(changed, 1, gpu()[0])


def tokens_of(executor):
    """Greedy answers to two prompts: a step of both prompts, a decode of two rows, one of one."""
    engine = Engine(executor, ())
    for n, prompt in enumerate(((5, 6, 7), (9,))):
        engine.submit(Request(f"r{n}", prompt, SamplingParams(temperature=0, max_tokens=2 + n), seed=0))
    answers = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).append(output.token_id)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["static", "paged"])
def test_a_model_on_an_interpreted_gpu_answers_as_on_a_cpu(artifact, use_driver, layout):
    driver = use_driver(InterpretedDriver(artifact))
    executor = CudaExecutor(artifact, 2, CudaDevice(), CacheOptions(layout))
    answers = tokens_of(executor)
    assert [len(a) for a in answers.values()] == [2, 3] and len({t for a in answers.values() for t in a}) > 2
    assert answers == tokens_of(CpuExecutor(artifact, 2))
    executor.close()
    assert driver.everything == {}


@pytest.mark.parametrize(
    "ranges",
    [[[64, 4096]], [[0, 4097]], [[0, 0]], [[8192, 4096], [0, 4096]], [[0, 8192], [4096, 4096]], [[0, 1 << 40]],
     [[-4096, 4096]]],
)  # fmt: skip
def test_ranges_that_make_no_sense_are_refused(artifact, ranges):
    first, *rest = artifact.manifest.targets
    wrong = M.msgspec.structs.replace(first, weights=tuple(map(tuple, ranges)))
    data = M.encode_manifest(M.msgspec.structs.replace(artifact.manifest, targets=(wrong, *rest)))
    with pytest.raises(ArtifactError, match="the weights of x86-64-v3"):
        M.decode_manifest(data)
