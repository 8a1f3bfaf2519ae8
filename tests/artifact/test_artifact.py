"""The artifact on disk: what is written comes back, and what was damaged, edited or half written is refused."""

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aotc.artifact import reader, writer
from aotc.artifact.manifest import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    File,
    KVCache,
    Manifest,
    Model,
    ProgramEntry,
    State,
    StateField,
    TargetEntry,
    decode_manifest,
    encode_manifest,
)
from aotc.artifact.plan import (
    Address,
    Call,
    Constant,
    Dim,
    DimValue,
    If,
    Kernel,
    Plan,
    Space,
    Tensor,
    decode_plan,
    encode_plan,
)
from aotc.artifact.reader import open_artifact
from aotc.artifact.writer import ArtifactWriter
from aotc.errors import ArtifactError
from aotc.target import best_cpu_target

PLAN = Plan(
    program="main",
    dims=(Dim("batch", 1, 8),),
    spaces=(Space("arena", "arena"), Space("weights", "weights"), Space("x", "input"), Space("y", "output")),
    inputs=(Tensor("x", "f32", (((4, ("batch",)),),), 2),),
    outputs=(Tensor("y", "f32", (((4, ("batch",)),),), 3),),
    kernels=(Kernel("k0", "pointwise"),),
    body=(
        Call(0, (Address(2, 0), Address(0, 64), DimValue(0), Constant(7)), flops=((2, ("batch",)),)),
        If(Address(0, 0), (Call(0, (Address(1, 0),)),), ()),
    ),
    arena_bytes=128,
    arena_lower_bound=64,
)


def manifest(target="x86-64-v3"):
    entry = TargetEntry(target, "cpu", "kernels/k.so", 128, 0, (ProgramEntry("main", "call", 0, "plans/main.json"),))
    return Manifest(
        format_version=FORMAT_VERSION, model=Model("m", "tensor", "f32"), targets=(entry,), weights=(), weights_bytes=0,
        weights_crc32=(), files={}, provenance={"source": "test"},
    )  # fmt: skip


def write(path, seed=0, target="x86-64-v3"):
    """A small artifact with a big weight (two chunks), a shared one and an empty one."""
    rng = np.random.default_rng(seed)
    big = rng.standard_normal(CHUNK_BYTES // 4 + 1000, np.float32)
    with ArtifactWriter(path) as out:
        out.add_weight("small", "f32", (3,), None, np.arange(3, dtype=np.float32) + seed)
        out.add_weight("big", "f32", big.shape, "rows", big)
        out.add_weight("again", "f32", (3,), None, np.arange(3, dtype=np.float32) + seed)
        out.add_weight("empty", "f32", (0,), None, np.zeros(0, np.float32))
        out.add_file("plans/main.json", encode_plan(PLAN))
        out.add_file("kernels/k.so", b"\x7fELF" + rng.bytes(300))
        out.commit(manifest(target))
    return big


def read_all(path):
    """Opens an artifact and checks every byte of it."""
    artifact = open_artifact(path)
    for name in artifact.manifest.files:
        artifact.read(name)
    artifact.check_weights(artifact.map_weights(), 2)
    return artifact


def reseal(path, **changes):
    """Edits the manifest the way an attacker would: with a hash that fits."""
    old = decode_manifest((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(old, **changes)))


def leftovers(parent):
    return sorted(p.name for p in parent.iterdir() if p.name.startswith("."))


@pytest.fixture
def artifact(tmp_path):
    write(tmp_path / "a")
    return tmp_path / "a"


def test_round_trip(tmp_path):
    big = write(tmp_path / "a")
    opened = read_all(tmp_path / "a")
    m = opened.manifest
    assert opened.plan("plans/main.json") == PLAN
    assert m.provenance == {"source": "test"} and set(m.files) == {"plans/main.json", "kernels/k.so"}
    weights = {w.name: w for w in m.weights}
    data = opened.map_weights()
    place = weights["big"]
    assert place.offset % writer.PAGE == 0 and place.packing == "rows"
    assert np.array_equal(data[place.offset :][: place.nbytes].view(np.float32), big)
    assert weights["small"].offset == weights["again"].offset and weights["empty"].nbytes == 0
    assert not data.flags.writeable
    assert leftovers(tmp_path) == []


def test_the_same_input_gives_the_same_bytes(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    names = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*"))
    assert names == sorted(p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*"))
    for name in names:
        if (tmp_path / "a" / name).is_file():
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("name", ["manifest.json", "plans/main.json", "kernels/k.so", "weights.bin"])
def test_one_flipped_bit_is_refused(artifact, name):
    path = artifact / name
    clean = path.read_bytes()
    rng = np.random.default_rng(3)
    few = 4 if name == "weights.bin" else 24
    for at in {0, len(clean) - 1, *rng.integers(0, len(clean), few).tolist()}:
        data = bytearray(clean)
        data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        with pytest.raises(ArtifactError):
            read_all(artifact)
    path.write_bytes(clean)
    read_all(artifact)


def test_damaged_weights_are_refused_by_name_when_they_are_mapped(artifact):
    weight = next(w for w in open_artifact(artifact).manifest.weights if w.name == "big")
    with open(artifact / "weights.bin", "r+b") as file:
        file.seek(weight.offset + weight.nbytes - 1)
        file.write(b"\x5a")
    with pytest.raises(ArtifactError, match="weights.bin is damaged at big: copy it again"):
        open_artifact(artifact).map_weights()


def test_weights_cut_at_section_borders_are_refused(artifact):
    m = open_artifact(artifact).manifest
    borders = {0, CHUNK_BYTES, m.weights_bytes - 1, *(w.offset for w in m.weights)}
    for size in sorted(borders, reverse=True):
        if size < m.weights_bytes:
            os.truncate(artifact / "weights.bin", size)
            with pytest.raises(ArtifactError, match=f"has {size} bytes, the manifest says {m.weights_bytes}"):
                read_all(artifact)


def test_longer_and_missing_files_are_refused(artifact):
    for name in ("weights.bin", "plans/main.json", "manifest.json"):
        clean = (artifact / name).read_bytes()
        (artifact / name).write_bytes(clean + b"x")
        with pytest.raises(ArtifactError):
            read_all(artifact)
        (artifact / name).unlink()
        with pytest.raises(ArtifactError, match=r"missing|has no manifest"):
            read_all(artifact)
        (artifact / name).write_bytes(clean)
    read_all(artifact)


def test_an_edited_manifest_is_refused(artifact):
    path = artifact / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"arena_bytes": 128', '"arena_bytes": 129'))
    assert path.read_text() != text
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        open_artifact(artifact)


def test_another_format_version_says_what_to_do(artifact):
    path = artifact / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({"format_version": FORMAT_VERSION + 1, "of_the_future": [fields]}))
    with pytest.raises(ArtifactError, match=f"version {FORMAT_VERSION + 1}, this aotc reads {FORMAT_VERSION}: compile the model"):
        open_artifact(artifact)


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION))
def test_earlier_formats_are_read_but_for_language_models(artifact, version):
    """Those of tensor models did not change; in the others a KV cache had another place, and steps knew their tokens."""
    reseal(artifact, format_version=version)
    read_all(artifact)
    path = artifact / "manifest.json"
    state = {"state": {"layout": "static", "slot_bytes": 64, "fields": []}}
    path.write_text(json.dumps(json.loads(path.read_text()) | state))
    with pytest.raises(ArtifactError, match=f"version {version}, this aotc reads {FORMAT_VERSION}: compile the model again"):
        open_artifact(artifact)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"format_version": "1"}', b'{"format_version": 1}', b"[" * 100_000, b"\xff\xfe"]
)
def test_what_is_no_manifest_is_refused(artifact, data):
    (artifact / "manifest.json").write_bytes(data)
    with pytest.raises(ArtifactError, match="manifest.json is malformed"):
        open_artifact(artifact)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "plans/../../x", "", ".", "a//b", "plans", "a\0b", "./plans"])
def test_names_that_leave_the_folder_are_refused(artifact, name):
    (artifact.parent / "x").write_bytes(b"secret")
    reseal(artifact, files={name: File(6, hashlib.sha256(b"secret").hexdigest())}, targets=())
    with pytest.raises(ArtifactError):
        open_artifact(artifact)


@pytest.mark.parametrize("name", ["plans/main.json", "kernels/k.so", "weights.bin", "manifest.json", "plans"])
def test_links_out_of_the_folder_are_refused_and_links_inside_are_not(artifact, name):
    path = artifact / name
    outside = artifact.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(ArtifactError, match="leaves the artifact"):
        read_all(artifact)
    path.unlink()
    inside = path.with_name("data-" + path.name)
    outside.rename(inside)
    path.symlink_to(inside.name)
    read_all(artifact)
    read_all(Path(os.path.relpath(artifact)))


def test_a_linked_folder_opens(artifact):
    link = artifact.parent / "link"
    link.symlink_to(artifact)
    read_all(link)


def test_a_pipe_is_no_file(artifact):
    (artifact / "weights.bin").unlink()
    os.mkfifo(artifact / "weights.bin")
    with pytest.raises(ArtifactError, match="is no file"):
        read_all(artifact)


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_bytes": -1},
        {"weights_bytes": 1 << 62},
        {"weights_crc32": ()},
        {"state": State(0, ())},
        {"state": State(64, (StateField("kv", "f32", (1 << 40, 1 << 40), 0),))},
        {"state": State(64, (StateField("kv", "f32", (17,), 0),))},
        {"state": State(64, (StateField("kv", "f32", (1,), -4),))},
        {"state": State(64, (StateField("kv", "complex", (1,), 0),))},
        {"kv_caches": (KVCache("static", 0, 8, ()),)},
        {"kv_caches": (KVCache("heap", 64, 8, ()),)},
        {"kv_caches": (KVCache("paged", 64, 0, ()),)},
        {"kv_caches": (KVCache("paged", 64, 16, (StateField("kv", "f32", (17,), 0),)),)},
        {"files": {}},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(artifact, changes):
    reseal(artifact, **changes)
    with pytest.raises(ArtifactError, match="malformed"):
        open_artifact(artifact)


@pytest.mark.parametrize("field", [{"offset": -1}, {"nbytes": 1 << 40}, {"offset": 1 << 62}, {"nbytes": -1}])
def test_a_weight_outside_the_file_is_refused(artifact, field):
    weights = list(open_artifact(artifact).manifest.weights)
    weights[1] = msgspec.structs.replace(weights[1], **field)
    reseal(artifact, weights=tuple(weights))
    with pytest.raises(ArtifactError, match="weight big lies outside"):
        open_artifact(artifact)


def test_a_cpu_level_that_does_not_run_here_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("aotc.target.cpu_features", lambda: frozenset(["avx"]))
    write(tmp_path / "a", target="x86-64-v4-amx")
    with pytest.raises(ArtifactError, match="compiled for x86-64-v4-amx; this CPU is older than x86-64-v3"):
        open_artifact(tmp_path / "a").cpu_target()
    monkeypatch.undo()
    write(tmp_path / "b", target="sm90")
    here = best_cpu_target()
    assert here is not None
    with pytest.raises(ArtifactError, match=f"compile it with --arch {here.name}"):
        msg = open_artifact(tmp_path / "b")
        reseal(tmp_path / "b", targets=(msgspec.structs.replace(msg.manifest.targets[0], device="cuda"),))
        open_artifact(tmp_path / "b").cpu_target()


def test_what_is_no_artifact_is_refused_with_a_hint(tmp_path):
    with pytest.raises(ArtifactError, match="is no folder: compile a model into it"):
        open_artifact(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="has no manifest.json"):
        open_artifact(tmp_path / "empty")


# Plans


def test_a_plan_round_trips_and_repeats():
    assert decode_plan(encode_plan(PLAN)) == PLAN
    assert encode_plan(decode_plan(encode_plan(PLAN))) == encode_plan(PLAN)
    assert [c.kernel for c in PLAN.calls()] == [0, 0]


def call(*args, **fields):
    return {"body": (Call(0, args, **fields),)}


@pytest.mark.parametrize(
    "changes",
    [
        {"body": (Call(1, ()),)},
        {"body": (Call(-1, ()),)},
        call(Address(4, 0)),
        call(Address(-1, 0)),
        call(Address(1, -64)),
        call(Address(0, 128)),
        call(Address(1, 1 << 63)),
        call(DimValue(1)),
        call(DimValue(-1)),
        call(Constant(1 << 63)),
        call(Constant(-(1 << 63) - 1)),
        call(flops=((1, ("nobody",)),)),
        call(bytes=((1, ("nobody",)),)),
        {"body": (If(Address(9, 0), (), ()),)},
        {"body": (If(Address(0, 0), (), (Call(1, ()),)),)},
        {"dims": (Dim("batch", 1, 8), Dim("batch", 1, 8))},
        {"dims": (Dim("batch", 9, 8),)},
        {"dims": (Dim("batch", -1, 8),)},
        {"dims": (Dim("batch", 1, 1 << 63),)},
        {"spaces": (Space("arena", "heap"),) * 4},
        {"inputs": (Tensor("x", "f32", (4,), 9),)},
        {"inputs": (Tensor("x", "f32", (4,), 2, -4),)},
        {"inputs": (Tensor("x", "complex", (4,), 2),)},
        {"outputs": (Tensor("y", "f32", (((1, ("other",)),),), 3),)},
        {"arena_bytes": -1},
        {"arena_lower_bound": 129},
        {"arena_bytes": 1 << 63},
    ],
    ids=str,
)
def test_a_plan_with_indices_out_of_range_is_refused(changes):
    data = encode_plan(msgspec.structs.replace(PLAN, **changes))
    with pytest.raises(ArtifactError, match="malformed"):
        decode_plan(data)


def test_a_deeply_nested_plan_is_refused():
    body = ()
    for _ in range(40):
        body = (If(Address(0, 0), body, ()),)
    with pytest.raises(ArtifactError, match="nesting"):
        decode_plan(encode_plan(msgspec.structs.replace(PLAN, body=body)))
    with pytest.raises(ArtifactError):
        decode_plan(b'{"body":' + b"[" * 200_000)


# Writers that fail, are killed or meet


class Killed(Exception):
    pass


def test_an_error_leaves_the_old_artifact_and_nothing_else(artifact):
    before = open_artifact(artifact).manifest.sha256
    with pytest.raises(Killed), ArtifactWriter(artifact) as out:
        out.add_weight("w", "f32", (1 << 20,), None, np.ones(1 << 20, np.float32))
        raise Killed
    assert read_all(artifact).manifest.sha256 == before
    assert leftovers(artifact.parent) == []


def test_an_error_removes_the_parents_it_made(tmp_path):
    with pytest.raises(Killed), ArtifactWriter(tmp_path / "a" / "b" / "c"):
        raise Killed
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a" / "b" / "c")
    read_all(tmp_path / "a" / "b" / "c")


def test_an_artifact_is_replaced_and_its_link_stays(tmp_path):
    write(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", 2)
    assert (tmp_path / "link").is_symlink() and leftovers(tmp_path) == []
    assert read_all(tmp_path / "link").map_weights()[:4].view(np.float32)[0] == 2


def test_what_is_no_artifact_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(ArtifactError, match="exists and is no artifact"):
            write(tmp_path / name)
    write(tmp_path / "empty")
    read_all(tmp_path / "empty")
    with pytest.raises(ArtifactError, match="cannot write"):
        write(tmp_path / "file" / "below")


def spawn(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def write_until_killed(path, reached):
    with ArtifactWriter(path) as out:
        out.add_weight("w", "f32", (1 << 20,), None, np.ones(1 << 20, np.float32))
        out.add_file("plans/main.json", b"{}")
        reached.set()
        time.sleep(60)


def test_a_killed_writer_leaves_the_old_artifact_and_the_next_write_cleans_up(artifact):
    reached = multiprocessing.get_context("fork").Event()
    process = spawn(write_until_killed, artifact, reached)
    assert reached.wait(10)
    write(artifact, 5)  # a writer that lives keeps its folder
    assert len(leftovers(artifact.parent)) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(leftovers(artifact.parent)) == 1
    read_all(artifact)
    write(artifact, 7)
    assert leftovers(artifact.parent) == []
    assert read_all(artifact).map_weights()[:4].view(np.float32)[0] == 7


def test_a_folder_of_the_same_process_id_is_cleaned_up(tmp_path):
    """Compiles in containers all have the same small process id."""
    (tmp_path / f".a.tmp-{os.getpid()}-0123abcd").mkdir()
    (tmp_path / ".b.tmp-1-0123abcd").mkdir()  # of another name
    (tmp_path / ".a.lock").touch()  # of one killed while it renamed
    write(tmp_path / "a")
    assert leftovers(tmp_path) == [".b.tmp-1-0123abcd"]


def test_without_an_exchange_in_one_step_the_old_one_survives_a_kill(artifact, monkeypatch):
    monkeypatch.setattr(writer, "_exchange", lambda a, b: False)
    write(artifact, 3)
    assert read_all(artifact).map_weights()[:4].view(np.float32)[0] == 3 and leftovers(artifact.parent) == []
    artifact.rename(artifact.parent / ".a.tmp-999999999-0123abcd.old")  # killed between the two renames
    with pytest.raises(Killed), ArtifactWriter(artifact):
        raise Killed
    assert read_all(artifact).map_weights()[:4].view(np.float32)[0] == 3 and leftovers(artifact.parent) == []


def write_many(path, seed, start):
    start.wait()
    for _ in range(3):
        write(path, seed)


def test_eight_writers_into_one_folder_leave_one_whole_artifact(tmp_path):
    start = multiprocessing.get_context("fork").Barrier(8)
    processes = [spawn(write_many, tmp_path / "a", seed, start) for seed in range(8)]
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0] * 8
    read_all(tmp_path / "a")
    assert leftovers(tmp_path) == []


def test_a_parent_that_cannot_be_written_gives_one_clear_error(tmp_path, monkeypatch):
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o555)
    if os.geteuid() == 0:  # permissions do not bind root

        def refuse(self, *arguments, **options):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ArtifactError, match=r"cannot write .*parent/a: Permission denied: free space or name another"):
        write(parent / "a")
    assert list(parent.iterdir()) == []


def write_on_a_full_disk(path, limit, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write(path)
        results.put("no error")
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("limit", [1, 1000, 1 << 20, CHUNK_BYTES + 100])
def test_a_full_disk_gives_one_clear_error_and_leaves_nothing(artifact, limit):
    before = open_artifact(artifact).manifest.sha256
    results = multiprocessing.get_context("fork").Queue()
    spawn(write_on_a_full_disk, artifact, limit, results).join(30)
    message = results.get(timeout=5)
    assert message.startswith("ArtifactError: cannot write") and "\n" not in message
    assert read_all(artifact).manifest.sha256 == before and leftovers(artifact.parent) == []


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_disk_that_fails_late_leaves_nothing(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(ArtifactError, match="Input/output error"):
        write(tmp_path / "a")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_files_are_read_within_their_size(artifact):
    """A file that grows after it was opened is not read without bound."""
    opened = open_artifact(artifact)
    with open(artifact / "kernels/k.so", "ab") as file:
        file.truncate(1 << 30)
    begin = time.perf_counter()
    with pytest.raises(ArtifactError, match="is damaged"):
        opened.read("kernels/k.so")
    assert time.perf_counter() - begin < 0.5
    with pytest.raises(ArtifactError, match="has no tokenizer.json"):
        opened.read("tokenizer.json")
    assert reader.MAX_MANIFEST < 1 << 30
