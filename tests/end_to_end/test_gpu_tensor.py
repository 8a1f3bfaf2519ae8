"""Tensor models on the GPU at hand (`make gpu`): bound tensors and streams of torch's, states, and batches."""

import asyncio

import numpy as np
import pytest

import aotc
from aotc.errors import DeviceError, RequestError
from aotc.runtime.devices.cuda import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WIDTH = 256


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return torch


@pytest.fixture(scope="module")
def cell(torch):
    torch.manual_seed(0)
    return torch.nn.GRUCell(WIDTH, WIDTH).eval()


@pytest.fixture(scope="module")
def folder(torch, cell, tmp_path_factory):
    try:
        device = CudaDevice()
    except DeviceError as error:
        pytest.skip(str(error))
    arch = "sm{}{}".format(*device.capability)
    device.close()
    batch = torch.export.Dim("batch", min=1, max=32)
    example = (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    program = torch.export.export(cell, example, dynamic_shapes=({0: batch}, {0: batch}))
    path = tmp_path_factory.mktemp("gru") / "gru"
    aotc.compile(program, path, arch=f"x86-64-v3,{arch}", name="gru")
    return path


@pytest.fixture
def model(folder):
    with aotc.load(folder, device="cuda") as loaded:
        yield loaded


@pytest.fixture
def names(model):
    """Of both inputs and the output."""
    return (*(t.name for t in model.inputs), *(t.name for t in model.outputs))


def close(torch, got, expected):
    torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=1e-3, atol=1e-4)


def test_tensors_are_bound_where_they_lie(torch, cell, model, names):
    places = [torch.randn(3, WIDTH, device="cuda") for _ in range(3)]
    run = model.bind(**dict(zip(names, places, strict=True)))
    for _ in range(3):
        places[0].normal_()
        torch.cuda.synchronize()
        run()
        with torch.no_grad():
            close(torch, places[2], cell(places[0].cpu(), places[1].cpu()))
    got = model(**{names[0]: places[0].cpu().numpy(), names[1]: places[1].cpu().numpy()})[names[2]]
    np.testing.assert_array_equal(got, places[2].cpu().numpy())
    for wrong, message in (
        (torch.randn(3, WIDTH), "the CPU, the model runs on a CUDA device"),
        (torch.randn(3 * WIDTH + 1, device="cuda")[1:].view(3, WIDTH), "does not begin at a multiple of 16 bytes"),
        (torch.randn(WIDTH, 3, device="cuda").T, "is not contiguous"),
    ):
        with pytest.raises(RequestError, match=message):
            model.bind(**dict(zip(names, (wrong, *places[1:]), strict=True)))


def test_runs_follow_what_a_stream_holds(torch, cell, model, names):
    stream = torch.cuda.Stream()
    places = [torch.zeros(2, WIDTH, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    run = model.bind(**dict(zip(names, places, strict=True)), stream=stream.cuda_stream)
    x, seen = torch.randn(2, WIDTH, device="cuda"), []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for n in range(20):
            torch.cuda._sleep(1_000_000)  # the host is far ahead
            places[0].copy_(x).mul_(n / 10)
            run()
            seen.append(places[2].clone())
            places[1].copy_(places[2])
    stream.synchronize()
    h = torch.zeros(2, WIDTH)
    with torch.no_grad():
        for n in range(20):
            h = cell(x.cpu() * (n / 10), h)
            close(torch, seen[n], h)


def test_streams_and_calls_do_not_meet_in_the_arena(torch, cell, model, names):
    streams = [torch.cuda.Stream() for _ in range(2)]
    sets = [[torch.randn(32 - 31 * n, WIDTH, device="cuda") for _ in range(3)] for n in range(2)]
    host = torch.randn(2, 7, WIDTH)
    torch.cuda.synchronize()
    runs = [
        model.bind(**dict(zip(names, places, strict=True)), stream=s.cuda_stream)
        for s, places in zip(streams, sets, strict=True)
    ]
    with torch.no_grad():
        expected = [cell(p[0].cpu(), p[1].cpu()) for p in sets]
        of_host = cell(host[0], host[1])
    for _ in range(200):
        for run in runs:
            run()
        got = model(**{names[0]: host[0].numpy(), names[1]: host[1].numpy()})[names[2]]
        close(torch, torch.from_numpy(got), of_host)
    torch.cuda.synchronize()
    for places, e in zip(sets, expected, strict=True):
        close(torch, places[2], e)


def test_a_session_keeps_its_state_on_the_gpu(torch, cell, model, names):
    session, h = model.session({names[1]: names[2]}), torch.zeros(2, WIDTH)
    for _ in range(50):
        x = torch.randn(2, WIDTH)
        with torch.no_grad():
            h = cell(x, h)
        assert session(**{names[0]: x.numpy()}) == {}
    close(torch, torch.from_numpy(session.state[names[1]]), h)


def test_bindings_and_sessions_give_memory_back(torch, model, names):
    places = [torch.randn(3, WIDTH, device="cuda") for _ in range(3)]

    def use():
        with model.bind(**dict(zip(names, places, strict=True))) as run, model.session({names[1]: names[2]}) as session:
            run()
            session(**{names[0]: np.zeros((2, WIDTH), np.float32)})

    for _ in range(10):
        use()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(200):
        use()
    assert free - torch.cuda.mem_get_info()[0] <= 4 << 20


def test_many_requests_at_once(torch, cell, model, names):
    async def ask():
        given = torch.randn(100, 2, 2, WIDTH)
        calls = [model.submit(**{names[0]: g[0].numpy(), names[1]: g[1].numpy()}) for g in given]
        for g, answer in zip(given, await asyncio.gather(*calls), strict=True):
            with torch.no_grad():
                close(torch, torch.from_numpy(answer[names[2]]), cell(g[0], g[1]))

    asyncio.run(ask())
