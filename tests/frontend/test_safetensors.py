"""safetensors: dtypes, shards and their index, the links of hub caches, and files that are damaged or hostile."""

import json
import os
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotc.errors import AotcError, SourceError, UnsupportedError
from aotc.frontend.safetensors import INDEX, open_safetensors, parse_json

SINGLE = "model.safetensors"
DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
          "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u64": torch.uint64, "u32": torch.uint32,
          "u16": torch.uint16, "u8": torch.uint8, "bool": torch.bool}  # fmt: skip


def same(got, want):
    """Bit by bit."""
    assert got.shape == tuple(want.shape)
    assert got.tobytes() == want.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def save(path, **tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, path)


def write_index(folder, places, name=INDEX):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def shards(folder):
    """Two tensors in two files."""
    a, b = torch.arange(4.0), torch.arange(6).reshape(2, 3)
    save(folder / "model-1.safetensors", a=a)
    save(folder / "model-2.safetensors", b=b)
    write_index(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return {"a": a, "b": b}


def check(folder, tensors):
    weights = open_safetensors(folder)
    assert sorted(weights.names()) == sorted(tensors)
    for name, want in tensors.items():
        assert weights.info(name).shape == tuple(want.shape)
        same(weights.read(name), want)


# What is read


def test_every_dtype_and_shape_reads_as_it_was_saved(tmp_path):
    tensors = {name: (torch.arange(24) % 7 - 1).reshape(2, 3, 4).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "a name.with/é": torch.ones(1)}
    save(tmp_path / SINGLE, **tensors)
    check(tmp_path, tensors)
    weights = open_safetensors(tmp_path)
    assert {n: weights.info(n).dtype for n in DTYPES} == {n: n for n in DTYPES}


def test_tensors_are_maps_of_the_file_and_not_copies(tmp_path):
    save(tmp_path / SINGLE, a=torch.ones(1000))
    array = open_safetensors(tmp_path).read("a")
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_metadata_is_no_tensor(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / SINGLE, metadata={"format": "pt"})
    check(tmp_path, {"a": torch.ones(2)})


def test_a_folder_without_weights_has_none(tmp_path):
    assert open_safetensors(tmp_path) is None


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    save(tmp_path / SINGLE, a=torch.ones(2))
    with pytest.raises(SourceError, match="model.safetensors has no tensor 'b'"):
        open_safetensors(tmp_path).info("b")


def test_shards_are_read_through_their_index(tmp_path):
    check(tmp_path, shards(tmp_path))


def test_one_file_goes_before_an_index(tmp_path):
    """As in transformers."""
    shards(tmp_path)
    save(tmp_path / SINGLE, c=torch.ones(3))
    check(tmp_path, {"c": torch.ones(3)})


def test_the_layout_of_a_hub_cache(tmp_path):
    """Each file of a snapshot is a link to a blob, named by its hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "c0ffee"
    tensors = shards(blobs)
    snapshot.mkdir(parents=True)
    for name in (INDEX, "model-1.safetensors", "model-2.safetensors"):
        (blobs / name).rename(blobs / f"hash-of-{name[:7]}")
        (snapshot / name).symlink_to(f"../../blobs/hash-of-{name[:7]}")
    check(snapshot, tensors)


def test_a_folder_that_is_a_link_and_a_mount_made_of_links(tmp_path):
    """Kubernetes: ..data is a link to a folder of a date, and each file is a link through it."""
    real = tmp_path / "mount" / "..2026"
    tensors = shards(real)
    (tmp_path / "mount" / "..data").symlink_to("..2026")
    for file in real.iterdir():
        (tmp_path / "mount" / file.name).symlink_to(f"..data/{file.name}")
    check(tmp_path / "mount", tensors)
    (tmp_path / "link").symlink_to("mount")
    check(tmp_path / "link", tensors)


def test_shards_in_a_folder_below(tmp_path):
    save(tmp_path / "parts" / "1.safetensors", a=torch.ones(2))
    write_index(tmp_path, {"a": "parts/1.safetensors"})
    check(tmp_path, {"a": torch.ones(2)})


# What is refused


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("../outside/x.safetensors", "is no safetensors file of this folder"),
        ("parts/../x.safetensors", "is no safetensors file of this folder"),
        ("/etc/x.safetensors", "is no safetensors file of this folder"),
        ("./x.safetensors", "is no safetensors file of this folder"),
        ("a//x.safetensors", "is no safetensors file of this folder"),
        ("..\\x.safetensors", "is no safetensors file of this folder"),
        ("weights.bin", "is no safetensors file of this folder"),
        ("nul\0.safetensors", "has no .*, which its index names: download it again"),
        ("x" * 300 + ".safetensors", "has no .*, which its index names: download it again"),
        ("missing.safetensors", "has no 'missing.safetensors', which its index names: download it again"),
        ("dangling.safetensors", "has no 'dangling.safetensors', which its index names"),
        ("loop.safetensors", "has no 'loop.safetensors', which its index names"),
        ("link.safetensors", "'link.safetensors', which leads out of this folder"),
        ("folder/x.safetensors", "'folder/x.safetensors', which leads out of this folder"),
        ("pipe.safetensors", "is no regular file"),
        ("directory.safetensors", "is no regular file"),
    ],
)
def test_files_out_of_the_folder_are_refused(tmp_path, place, message):
    folder, outside = tmp_path / "model", tmp_path / "outside"
    save(outside / "x.safetensors", a=torch.ones(2))
    (folder / "directory.safetensors").mkdir(parents=True)
    (folder / "link.safetensors").symlink_to(outside / "x.safetensors")
    (folder / "folder").symlink_to(outside)
    (folder / "dangling.safetensors").symlink_to("nothing")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    write_index(folder, {"a": place})
    with pytest.raises(SourceError, match=message) as caught:
        open_safetensors(folder)
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("", "is damaged"),
        ("[]", "holds no JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map of tensors to files"),
        ('{"weight_map": {}, "weight_map": {}}', "key 'weight_map' stands twice"),
        ('{"weight_map": {"a": "model-1.safetensors", "c": "model-1.safetensors"}}', "places tensor 'c' in"),
        ('{"weight_map": {"a": "model-2.safetensors"}}', "places tensor 'a' in 'model-2.safetensors', where it is not"),
        ('{"weight_map": {"a": "model-1.safetensors", "b": "model-3.safetensors"}}', "has tensor 'c', which"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, index, message):
    shards(tmp_path)
    save(tmp_path / "model-3.safetensors", b=torch.ones(2), c=torch.ones(2))
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(SourceError, match=message) as caught:
        open_safetensors(tmp_path)
    assert "\n" not in str(caught.value)


def file_of(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", SourceError, "cannot read"),
        (b"1234", SourceError, "its header has .* bytes, and it 4"),
        (file_of({}, size=2**63), SourceError, "its header has 9223372036854775808 bytes, and it 10"),
        (file_of({}, size=3), SourceError, "its header has 3 bytes"),
        (file_of(b"not json"), SourceError, "is damaged"),
        (file_of(b"\xff\xff"), SourceError, "is damaged"),
        (file_of(b"[1]"), SourceError, "holds no JSON object"),
        (file_of(b'{"a": NaN}'), SourceError, "NaN is no JSON"),
        (file_of(b"[" * 100_000), SourceError, "nested too deeply"),
        (file_of({"a": 1}), SourceError, "'a' has other fields"),
        (file_of({"a": tensor(more=1)}, bytes(8)), SourceError, "'a' has other fields"),
        (file_of({"a": tensor("F8_E4M3", (8,))}, bytes(8)), UnsupportedError, "'a' is 'F8_E4M3': aotc reads F64, F32"),
        (file_of({"a": tensor(7)}, bytes(8)), UnsupportedError, "'a' is 7"),
        (file_of({"a": tensor(shape=(-2,))}, bytes(8)), SourceError, "has shape"),
        (file_of({"a": tensor(shape=(2.0,))}, bytes(8)), SourceError, "has shape"),
        (file_of({"a": tensor(shape=(True, 2))}, bytes(8)), SourceError, "has shape"),
        (file_of({"a": tensor(shape=(1,) * 9, offsets=(0, 4))}, bytes(4)), SourceError, "has shape"),
        (file_of({"a": tensor(shape=(2**32, 2**32))}, bytes(8)), SourceError, "has shape"),
        (file_of({"a": tensor(offsets=(0,))}, bytes(8)), SourceError, "and offsets"),
        (file_of({"a": tensor(offsets=(8, 0))}, bytes(8)), SourceError, "and offsets"),
        (file_of({"a": tensor(offsets=(0, 7))}, bytes(8)), SourceError, "and offsets"),
        (file_of({"a": tensor(offsets=(-8, 0))}, bytes(8)), SourceError, "and offsets"),
        (file_of({"a": tensor()}, bytes(7)), SourceError, "'a' ends outside the file"),
        (file_of({"a": tensor(offsets=(2**62, 2**62 + 8))}, bytes(8)), SourceError, "'a' ends outside the file"),
        (file_of({"a": tensor()}, bytes(9)), SourceError, "its last 1 bytes belong to no tensor"),
        (file_of({"a": tensor(offsets=(4, 12))}, bytes(12)), SourceError, "'a' follows bytes that belong to none"),
        (file_of({"a": tensor(), "b": tensor(offsets=(4, 12))}, bytes(12)), SourceError, "'b' overlaps another"),
        (file_of({"a": tensor(), "b": tensor()}, bytes(8)), SourceError, "'b' overlaps another"),
        (file_of(b'{"a": 1, "a": 2}'), SourceError, "key 'a' stands twice"),
        (file_of({"a\n\x1b[2J": 1}), SourceError, r"tensor 'a\\n\\x1b\[2J' has other fields"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, data, kind, message):
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(kind, match=message) as caught:
        open_safetensors(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_header_beyond_the_bound_is_refused_before_it_is_read(tmp_path):
    """The file is sparse: it takes no room on the disk, and must take none in memory."""
    with open(tmp_path / SINGLE, "wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="its header has 200000000 bytes"):
            open_safetensors(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_numbers_that_are_no_json_are_refused():
    for text in (b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999999999999999999999}x'):
        with pytest.raises(SourceError):
            parse_json(text, "the file")
    assert parse_json(b'{"a": [1, {"b": null}]}', "the file") == {"a": [1, {"b": None}]}


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_and_cuts_are_refused_or_read_in_bounds(tmp_path, data):
    rng = np.random.default_rng(0)
    entries = {"a": tensor(shape=(3, 4), offsets=(0, 48)), "b": tensor("BF16", (5,), (48, 58)), "__metadata__": {"x": "y"}}
    whole = bytearray(file_of(entries, rng.bytes(58)))
    for place, bit in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 7)), max_size=4)):
        whole[place] ^= 1 << bit
    cut = data.draw(st.just(len(whole)) | st.integers(0, len(whole)))
    (tmp_path / SINGLE).write_bytes(whole[:cut])
    tracemalloc.start()
    try:
        weights = open_safetensors(tmp_path)
        for name in weights.names():
            weights.read(name)
    except AotcError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20
