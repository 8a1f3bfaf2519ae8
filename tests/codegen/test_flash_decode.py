"""Attention of one token a row in CUDA C++ for Hopper: its source runs on the CPU, on emulated copies and products."""

from dataclasses import replace

import pytest
from attention_cases import attention_graph, page_up, ragged
from test_cuda_kernels import check, program_of, random_inputs

from aotc.codegen.cuda import fake_device, flash_decode
from aotc.codegen.cuda.build import compile_sources
from aotc.codegen.cuda.flash_decode import Tile, candidates, rule
from aotc.codegen.cuda.launch import dim_order, render_program, slot_layout
from aotc.codegen.cuda.schedule import Heads
from aotc.codegen.cuda.tables import Entry, Family, Schedules, Table
from aotc.errors import DeviceError, RequestError
from aotc.ir.dtypes import bf16, f16, f32

LENGTHS = [1, 79, 64, 7]  # a first token, all of the context, whole units, less than a unit


@pytest.fixture
def forced(monkeypatch):
    """forced(tile, warp_units): all steps get this tile, and another block has part of a row from so many units a warp on."""

    def force(tile, warp_units=1):
        monkeypatch.setattr(flash_decode, "WARP_UNITS", warp_units)
        family = Family("flash_decode", Tile, lambda arch, of: tile, lambda arch, of: [])
        monkeypatch.setattr(flash_decode, "FLASH_DECODE", family)

    return force


def source_of(graph, arch="sm90"):
    program = program_of(graph)
    (source,) = render_program(program, arch, dim_order([program]), slot_layout(program).strides).values()
    return source


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "window"), [(9, 3, 64, None), (8, 2, 128, None), (8, 1, 64, 33), (4, 4, 128, 5)]
)
def test_ragged_rows(dtype, page_size, heads, kv_heads, d, window):
    graph = attention_graph(dtype, heads, kv_heads, d, window, decode=True, rope=True)
    inputs = random_inputs(graph, **ragged(LENGTHS, [1] * 4))
    graph, inputs = page_up(graph, inputs, page_size)
    assert source_of(graph).language == "cuda"
    assert check(graph, inputs, arch="sm90") == ["attention_decode"]


@pytest.mark.parametrize(
    "tile",
    [
        Tile(1, 1, 1),  # one warp waits for each unit
        Tile(1, 2, 1),  # the ring is used again
        Tile(2, 7, 1),  # rings that never fill
        Tile(2, 1, 3),  # as many splits as a row's keys are worth
        Tile(1, 2, 7),
        Tile(8, 2, 2),
    ],
)
@pytest.mark.parametrize(("page_size", "warp_units"), [(None, 1), (32, 1), (None, 2)])
def test_tiles(forced, tile, page_size, warp_units):
    forced(tile, warp_units)
    graph = attention_graph(bf16, 4, 2, 64, None, decode=True, rope=True)
    inputs = random_inputs(graph, **ragged(LENGTHS, [1] * 4))
    assert check(*page_up(graph, inputs, page_size), arch="sm90") == ["attention_decode"]


@pytest.mark.parametrize(
    ("dtype", "heads", "d", "context", "arch"),
    [(f32, 4, 64, 80, "sm90"), (bf16, 9, 64, 80, "sm90"), (bf16, 4, 48, 80, "sm90"), (bf16, 4, 64, 72, "sm90"),
     (bf16, 4, 64, 80, "sm80"), (bf16, 4, 64, 80, "sm100")],
)  # fmt: skip
def test_what_it_does_not_take_is_left_to_the_other_template(dtype, heads, d, context, arch):
    assert source_of(attention_graph(dtype, heads, 1, d, None, decode=True, context=context), arch).language == "triton"


@pytest.mark.parametrize("tokens", [2, 8, 16, 32, 64])
@pytest.mark.parametrize("d", [64, 128])
def test_blocks_fill_the_card_once(tokens, d):
    of = Heads(tokens, 8, 4, d, bf16)
    tile = rule("sm90", of)
    blocks = (228 << 10) // (tile.shared_bytes(of) + 1024)
    assert blocks == (1 if tokens <= 16 else 2)
    assert tile.splits == 1 or tokens * 8 * tile.splits <= 132 * blocks
    assert tile.units >= 3
    assert tile in candidates("sm90", of)


@pytest.mark.parametrize("tile", [(0, 1, 1), (17, 1, 1), (4, 65, 1), (4, 1, 65)])
def test_tiles_out_of_range(tile):
    with pytest.raises(ValueError, match="is not supported"):
        Tile(*tile)


def test_a_measured_tile_that_does_not_fit_is_refused():
    of = Heads(8, 8, 4, 128, bf16)
    entry = Entry({"warps": 16, "units": 9, "splits": 1})
    schedules = Schedules("sm90", [Table(1, "sm90", {flash_decode.FLASH_DECODE.key(of): entry})])
    with pytest.raises(RequestError, match="bytes of shared memory"):
        schedules.choose(flash_decode.FLASH_DECODE, of)


def test_it_compiles_without_spilling():
    for d, page_size in ((64, None), (64, 64), (128, 16)):
        graph = attention_graph(bf16, 32, 8, d, 40, decode=True, rope=True)
        graph, _ = page_up(graph, random_inputs(graph, **ragged(LENGTHS, [1] * 4)), page_size)
        source = source_of(graph)
        assert compile_sources([source], "sm90")[source.symbol].spill_bytes == 0


def test_a_copy_that_nobody_waits_for_is_seen(monkeypatch):
    graph = attention_graph(bf16, 4, 2, 64, None, decode=True)
    inputs = random_inputs(graph, **ragged(LENGTHS, [1] * 4))
    run = fake_device.run_request

    def hasty(request):
        (source,) = request.sources.values()
        text = source.text.replace("    barrier_wait(full", "    if (i) barrier_wait(full")
        assert text != source.text
        return run(replace(request, sources={source.symbol: replace(source, text=text)}))

    monkeypatch.setattr(fake_device, "run_request", hasty)
    with pytest.raises((AssertionError, DeviceError)):
        check(graph, inputs, arch="sm90")
