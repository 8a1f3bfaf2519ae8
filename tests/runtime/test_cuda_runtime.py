"""The CUDA runtime over a driver that records: what is allocated, uploaded, built and launched, and what is refused."""

import gc
import json
import threading

import numpy as np
import pytest
from cuda_cases import sequence

import aotc
from aotc.cli import main
from aotc.cli.inspect_command import describe
from aotc.errors import DeviceError, RequestError
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.executor import CacheOptions
from aotc.runtime.kv_cache import BlockTable
from aotc.runtime.sequence import Row


def test_weights_arrive_whole_and_a_step_is_one_graph(cuda_artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    weights = np.ctypeslib.as_array(driver.blocks[executor._weights.address(0)])
    np.testing.assert_array_equal(weights, cuda_artifact.map_weights())
    prompt = sequence(5, 6, 7)
    executor.start(prompt)
    history = np.ctypeslib.as_array(driver.blocks[executor._state])[executor._history :].view(np.int32)
    assert history[:3].tolist() == [5, 6, 7]
    executor.step([Row(prompt, 0, 3, True)])
    assert len(driver.launched) == 1
    plan = cuda_artifact.plan(next(p.plan for p in executor.target.programs if p.kind == "extend"))
    assert len(driver.graphs[driver.launched[0]]) == len(list(plan.calls()))
    assert set(driver.edges) == {(1, 1)}, "kernels of sm90 wait themselves"
    step = np.ctypeslib.as_array(driver.blocks[executor._step])
    assert step[executor.fields["tokens"][0] :].view(np.int32)[:3].tolist() == [5, 6, 7]
    dims = step[executor.fields["dims"][0] :].view(np.int32)
    assert dict(zip(executor.target.dims, dims.tolist(), strict=False)) == {"pages": 0, "rows": 1, "slots": 1, "tokens": 3}


def test_a_profile_launches_each_kernel_with_all_of_its_calls(cuda_artifact, gpu):
    device, driver = gpu()
    program = CudaExecutor(cuda_artifact, 1, device).program("decode", 1)
    names = [program.plan.kernels[c.kernel].symbol for c in program.plan.calls()]
    before = len(driver.launched)
    times = program.kernel_times(repeat=7)
    assert [name for name, _ in times] == names
    assert len(driver.launched) - before == 2 * len(set(names))
    for name, ms in times:  # the driver says 1 ms for any graph
        calls = names.count(name)
        assert ms == 1 / (calls * -(-7 // calls))


def test_kernels_of_older_cards_wait_for_nothing_themselves(cuda_artifact, gpu):
    device, driver = gpu(capability=(8, 6))
    executor = CudaExecutor(cuda_artifact, 1, device)
    assert executor.target.name == "sm80"
    executor.finish_warming()
    assert set(driver.edges) == {(0, 0)}


def test_biases_lie_in_memory_that_the_gpu_reads(cuda_artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    biased = sequence(5, logit_bias={3: 1.5, 9: -2.0})
    executor.start(biased)
    assert biased.bias[0].tolist() == [3, 9] and biased.bias[1].tolist() == [1.5, -2.0]
    place = biased.bias[0].ctypes.data
    assert any(at <= place < at + len(block) for at, block in driver.host.items())


@pytest.mark.parametrize("slots", [1, 2])
def test_memory_is_exact_to_the_byte_and_what_inspect_says(cuda_artifact, gpu, slots):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, slots, device)
    assert executor.memory.total == sum(map(len, driver.blocks.values()))
    facts = describe(cuda_artifact)
    (said,) = (t["memory"] for t in facts["targets"] if t["name"] == "sm90")
    each = facts["state_bytes_per_sequence"] + facts["kv_caches"][0]["block_bytes"]
    assert said["total"] + slots * each == executor.memory.total
    assert said["total"] == sum(said.values()) - said["total"]
    assert executor.memory.pinned == sum(map(len, driver.host.values()))
    assert executor.memory.weights == cuda_artifact.manifest.weights_bytes, "all targets need the same weights"


def test_pages_take_what_is_free_and_a_step_sends_the_rows_of_the_table_in_use(cuda_artifact, gpu):
    """4 pages of 64 tokens a sequence where there is room, else what 80% of the free memory leaves."""
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 2, device, CacheOptions("paged"))
    assert (executor.num_pages, executor.page_size, executor.memory.kv_blocks) == (8, 64, 8)
    assert executor.memory.total == sum(map(len, driver.blocks.values()))
    page, least = executor.cache.kind.block_bytes, executor.memory.total - executor.memory.kv_cache
    prompt = sequence(5, 6, 7)
    prompt.pages = BlockTable(4)
    prompt.pages.ids[:2], prompt.pages.count = [6, 3], 2
    executor.start(prompt)
    driver.trace.clear()
    executor.step([Row(prompt, 0, 3, True)])
    step, (offset, _, shape) = np.ctypeslib.as_array(driver.blocks[executor._step]), executor.fields["block_table"]
    assert shape == (2, 4) and step[offset:].view(np.int32)[:4].tolist() == [6, 3, 0, 0]
    assert driver.trace[0] == ("up", executor._step, offset + 4 * 4), "one row of two"
    device, driver = gpu(free=-(-(least + 3 * page) * 10 // 8))
    assert CudaExecutor(cuda_artifact, 2, device, CacheOptions("paged")).num_pages == 3
    device, driver = gpu()
    assert CudaExecutor(cuda_artifact, 2, device, CacheOptions("paged", 11 * page)).num_pages == 11


def test_too_little_memory_is_refused_before_anything_is_taken(cuda_artifact, gpu):
    device, driver = gpu()
    needed = CudaExecutor(cuda_artifact, 1, device).memory.total
    device, driver = gpu(free=needed - 1)
    with pytest.raises(DeviceError, match=r"needs 0.00\d GB on the GPU and 0.00\d GB are free: serve fewer"):
        CudaExecutor(cuda_artifact, 1, device)
    assert driver.allocations == 1 and driver.everything == {}, "one stream, given back"
    device, driver = gpu(free=needed)
    CudaExecutor(cuda_artifact, 1, device)


def test_a_thousand_steps_allocate_nothing(cuda_artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    executor.finish_warming()
    before, things = driver.allocations, driver.everything
    row = sequence(5, 6, 7)
    executor.start(row)
    for n in range(500):
        executor.step([Row(row, 0, 3, True)])
        executor.step([Row(row, n % 3, 1, True)])
    assert len(driver.launched) == 1000 and driver.uploaded >= set(driver.launched)
    assert (driver.allocations, driver.everything) == (before, things)


def test_a_first_request_needs_two_programs_and_the_others_follow(cuda_artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    assert sorted(executor._loaded) == ["decode_1", "extend_128"]
    executor.finish_warming()
    assert sorted(executor._loaded) == ["decode_1", "extend_128", "extend_160"], "steps have one row at most"


def test_threads_that_ask_for_one_program_get_the_same(cuda_artifact, gpu):
    executor = CudaExecutor(cuda_artifact, 1, gpu()[0])
    found = []
    threads = [threading.Thread(target=lambda: found.append(executor.program("extend", 150))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_a_step_in_another_thread_finds_the_context(cuda_artifact, gpu):
    executor = CudaExecutor(cuda_artifact, 1, gpu()[0])
    row, tokens = sequence(5), []

    def work():
        executor.start(row)
        tokens.append(int(executor.step([Row(row, 0, 1, True)]).token[0]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert tokens == [0]


@pytest.mark.parametrize("warm", [False, True])
def test_closing_gives_everything_back(cuda_artifact, gpu, warm):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    if warm:
        executor.warm()  # and does not wait for it
    assert driver.everything["device"] == 8 and driver.everything["contexts"] == 1
    executor.close()
    assert driver.everything == {}
    executor.close()
    for use in (lambda: executor.step([Row(sequence(5), 0, 1, True)]), lambda: executor.start(sequence(5))):
        with pytest.raises(RequestError, match="^the model was closed: load it again$"):
            use()
    with pytest.raises(DeviceError, match="^the model was closed: load it again$"):
        executor.logits(1)


def test_collecting_gives_everything_back(cuda_artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    executor.finish_warming()
    tokens = executor.step([Row(sequence(5), 0, 1, True)]).token
    del executor, device
    gc.collect()
    assert driver.everything["host"] == 1, "somebody looks at a result"
    del tokens
    gc.collect()
    assert driver.everything == {}


def test_a_failed_load_gives_everything_back(cuda_artifact, gpu):
    device, driver = gpu()
    driver.failing["cuGraphInstantiate"] = 2
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY in cuGraphInstantiate: other processes hold its memory"):
        CudaExecutor(cuda_artifact, 1, device)
    assert driver.everything == {}


def test_a_model_on_a_gpu_is_closed_with_its_block(cuda_artifact, fake_driver):
    driver = fake_driver()
    with aotc.load(cuda_artifact.path, max_num_seqs=1, device="cuda") as llm:
        assert llm.memory.total == sum(map(len, driver.blocks.values()))
    assert driver.everything == {}
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        llm.generate([5], max_tokens=1)


def test_bench_startup_lists_the_parts_that_overlap(cuda_artifact, install_driver, capsys):
    install_driver("fake_cuda.FakeDriver()")
    assert main(["bench", "startup", str(cuda_artifact.path), "--repeat", "1", "--device", "cuda"]) == 0
    result = json.loads(capsys.readouterr().out)
    parts = ["process_ms", "imports_ms", "open_ms", "load_ms", "tokenizer_ms", "first_token_ms"]
    assert list(result) == ["bench", "artifact", "runs", "start_ms", *parts, "beside"]
    assert abs(sum(result[p] for p in parts) - result["start_ms"]) < 0.1
    beside = ["wait", "tokenizer", "driver", "context", "modules", "graphs", "weights"]
    assert list(result["beside"]) == [f"{name}_ms" for name in beside]
    assert all(0 <= value < result["start_ms"] for value in result["beside"].values())
