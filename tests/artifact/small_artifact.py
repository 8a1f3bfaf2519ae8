"""A small artifact, its plan, and ways to read it whole and to edit it."""

import msgspec
import numpy as np

from aotc.artifact.manifest import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    Manifest,
    Model,
    ProgramEntry,
    TargetEntry,
    decode_manifest,
    encode_manifest,
)
from aotc.artifact.plan import Address, Call, Constant, Dim, DimValue, If, Kernel, Plan, Space, Tensor, encode_plan
from aotc.artifact.reader import open_artifact
from aotc.artifact.writer import ArtifactWriter

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
