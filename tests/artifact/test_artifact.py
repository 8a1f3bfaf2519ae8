"""The artifact on disk: what is written comes back, and what was damaged or edited is refused."""

import hashlib
import json
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from small_artifact import PLAN, leftovers, read_all, reseal, write

from aotc.artifact import reader, writer
from aotc.artifact.manifest import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    File,
    KVCache,
    State,
    StateField,
)
from aotc.artifact.reader import open_artifact
from aotc.errors import ArtifactError
from aotc.target import best_cpu_target


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
