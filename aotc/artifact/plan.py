"""The plan of a program: what the runtime walks. A plan is JSON, checked whole before anything runs.

Arguments name places as (space, offset); spaces are base addresses that the runtime fills in: the arena, the
weights, the states, the KV cache, and each input and output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from aotc.artifact.manifest import ITEM_BYTES
from aotc.errors import ArtifactError

MAX_DEPTH = 16
MAX_ITEMS = 1 << 20
MAX_INT = (1 << 63) - 1
SPACE_KINDS = ("arena", "weights", "state", "kv", "input", "output", "dims", "counters")
"""`dims`: the values of all dims of the artifact as i32, in device memory; `counters`: memory that is 0
before and after each program (both CUDA)."""


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Address(_Struct, tag="at", array_like=True, frozen=True):
    """`offset` bytes into space number `space`."""

    space: int
    offset: int


class DimValue(_Struct, tag="dim", array_like=True, frozen=True):
    """The value of dim number `dim`, as a 64-bit integer."""

    dim: int


class Constant(_Struct, tag="int", array_like=True, frozen=True):
    value: int


Arg = Address | DimValue | Constant

Monomial = tuple[int, tuple[str, ...]]
SizeExpr = int | tuple[Monomial, ...]
"""A number, or a sum of coefficient times dims."""


class Call(_Struct, tag="call", omit_defaults=True, frozen=True):
    """Kernel number `kernel` with arguments in order. `barrier`: all calls before it must have ended."""

    kernel: int
    args: tuple[Arg, ...]
    barrier: bool = True
    name: str = ""
    sources: tuple[str, ...] = ()
    flops: SizeExpr = 0
    bytes: SizeExpr = 0


class If(_Struct, tag="if", frozen=True):
    """Runs one body, as the bool at `condition` says."""

    condition: Address
    then: tuple[Call | If, ...]
    orelse: tuple[Call | If, ...]


Instruction = Call | If


class Kernel(_Struct, omit_defaults=True, frozen=True):
    """A function of the target's library, or of a cubin; `meta` holds what a launch needs besides arguments."""

    symbol: str
    family: str
    meta: dict[str, Any] = {}


class Dim(_Struct, frozen=True):
    name: str
    lo: int
    hi: int


class Space(_Struct, frozen=True):
    name: str
    kind: str


class Tensor(_Struct, omit_defaults=True, frozen=True):
    """An input, output or state of the program: where it lies, and what the caller must bring."""

    name: str
    dtype: str
    shape: tuple[SizeExpr, ...]
    space: int
    offset: int = 0
    alias_of: str | None = None


class Plan(_Struct, frozen=True):
    """One program for one target."""

    program: str
    dims: tuple[Dim, ...]
    spaces: tuple[Space, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]
    body: tuple[Instruction, ...]
    arena_bytes: int
    arena_lower_bound: int

    def calls(self) -> Iterator[Call]:
        """Every call, both bodies of branches included."""
        yield from (step for step in _walk(self.body) if isinstance(step, Call))

    def conditions(self) -> Iterator[Address]:
        """Where the conditions of all branches lie."""
        yield from (step.condition for step in _walk(self.body) if isinstance(step, If))


def _walk(body: tuple[Instruction, ...]) -> Iterator[Instruction]:
    for step in body:
        yield step
        if isinstance(step, If):
            yield from _walk(step.then)
            yield from _walk(step.orelse)


def evaluate(size: SizeExpr, dims: Mapping[str, int]) -> int:
    """A size at known dims."""
    if isinstance(size, int):
        return size
    total = 0
    for coefficient, names in size:
        for name in names:
            coefficient *= dims[name]
        total += coefficient
    return total


def encode_plan(plan: Plan) -> bytes:
    """JSON, the same bytes for the same plan."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1)


def decode_plan(data: bytes) -> Plan:
    """Reads and checks a plan. Raises ArtifactError."""
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ArtifactError(f"the plan is malformed: {error}") from None
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    names = {d.name for d in plan.dims}
    _require(plan, len(names) == len(plan.dims) and all(0 <= d.lo <= d.hi <= MAX_INT for d in plan.dims), "dims")
    _require(plan, all(s.kind in SPACE_KINDS for s in plan.spaces), "a space of unknown kind")
    _require(plan, 0 <= plan.arena_lower_bound <= plan.arena_bytes <= MAX_INT, "the arena's size")
    for tensor in (*plan.inputs, *plan.outputs):
        _require(plan, 0 <= tensor.space < len(plan.spaces) and tensor.offset >= 0, f"the place of {tensor.name}")
        _require(plan, tensor.dtype in ITEM_BYTES, f"the element type of {tensor.name}")
        for size in tensor.shape:
            _require(plan, _dims_of(size) <= names, f"the shape of {tensor.name}")
    _check_body(plan, plan.body, 0)
    for call in plan.calls():
        _require(plan, _dims_of(call.flops) | _dims_of(call.bytes) <= names, f"the cost of {call.name}")


def _dims_of(size: SizeExpr) -> set[str]:
    return set() if isinstance(size, int) else {n for _, ns in size for n in ns}


def _check_body(plan: Plan, body: tuple[Instruction, ...], depth: int) -> None:
    _require(plan, depth <= MAX_DEPTH and len(body) <= MAX_ITEMS, "nesting or length")
    for step in body:
        if isinstance(step, If):
            _check_arg(plan, step.condition)
            _check_body(plan, step.then, depth + 1)
            _check_body(plan, step.orelse, depth + 1)
            continue
        _require(plan, 0 <= step.kernel < len(plan.kernels), f"the kernel of {step.name}")
        for arg in step.args:
            _check_arg(plan, arg)


def _check_arg(plan: Plan, arg: Arg) -> None:
    if isinstance(arg, DimValue):
        _require(plan, 0 <= arg.dim < len(plan.dims), "a dim argument")
    elif isinstance(arg, Address):
        _require(plan, 0 <= arg.space < len(plan.spaces) and 0 <= arg.offset <= MAX_INT, "an address")
        inside = plan.spaces[arg.space].kind != "arena" or arg.offset < max(plan.arena_bytes, 1)
        _require(plan, inside, "an address outside the arena")
    else:
        _require(plan, -MAX_INT - 1 <= arg.value <= MAX_INT, "a constant")


def _require(plan: Plan, condition: bool, what: str) -> None:
    if not condition:
        raise ArtifactError(f"plan {plan.program} is malformed: {what}; compile the model again")
