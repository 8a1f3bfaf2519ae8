"""Plans as files: what is written comes back, and what a runtime could not walk is refused."""

import msgspec
import pytest
from small_artifact import PLAN

from aotc.artifact.plan import Address, Call, Constant, Dim, DimValue, If, Space, Tensor, decode_plan, encode_plan
from aotc.errors import ArtifactError


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
