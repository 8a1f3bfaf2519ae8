"""Renders a kernel of a program as Triton: chooses the family's template and fills its hooks."""

from __future__ import annotations

from collections.abc import Callable

from aotc.codegen.cuda import schedule
from aotc.codegen.cuda.attention import attention, attention_decode, kv_append
from aotc.codegen.cuda.chain import chain
from aotc.codegen.cuda.frame import SYNTAX, Frame, Setting, Source, index_of, only, slot_stride
from aotc.codegen.cuda.matmul import is_linear_for_tensor_cores, matmul
from aotc.codegen.cuda.nest import BLOCK_LIMIT, BlockNest, power_of_two
from aotc.codegen.loops import to_primitives
from aotc.errors import UnsupportedError
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.ops.sample_reference import GREEDY_BELOW, MAX_LOGPROBS, ROW
from aotc.ir.program import Kernel
from aotc.ir.sizes import ceildiv, product
from aotc.ir.templates import Templates

TEMPLATES = Templates(
    is_linear_for_tensor_cores, norm_rows=1, scaled_rows=schedule.SKINNY_ROWS, attention_decode=True, attention_query=True,
    side_by_side=True,
)


def render(kernel: Kernel, setting: Setting) -> Source:
    """The source of a kernel. Raises UnsupportedError where no template of CUDA computes it."""
    if kernel.family not in _FAMILIES:
        raise UnsupportedError(f"no CUDA template for {kernel.family}: see docs/ARCHITECTURE.md, how to add a template")
    return _FAMILIES[kernel.family](Frame(kernel, setting))


def _loops(frame: Frame) -> Source:
    body = to_primitives(frame.body)
    folds = [n for n in body.nodes if n.op in ("reduce", "arg_reduce", "dot_general", "convolution", "reduce_window")]
    if folds and all(_is_trailing(n) for n in folds):
        return _rows(frame, body)
    (out,) = body.outputs
    wide = frame.wide(*body.values())
    blocks = ceildiv(out.type.size, schedule.POINTWISE_BLOCK)
    lines, places = _pointwise(frame, body, out, wide)
    return frame.source(
        "pointwise", (blocks, 1, 1), 4, wide=wide, block=schedule.POINTWISE_BLOCK, size=SYNTAX.size(out.type.size),
        places=places, lines=lines,
    )  # fmt: skip


def _pointwise(frame: Frame, body: Graph, out: Value, wide: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """Statements that compute the elements `x` of an output, and those that take `x` apart before them."""
    shape = out.type.shape
    nest, names = frame.nest(body, wide), tuple(f"i{n}" for n in range(len(shape)))
    nest.vector("x", schedule.POINTWISE_BLOCK, "live")
    for name in names:
        nest.vectors[name] = nest.axes("x")
    nest.scopes[0].variables |= {"x", *names}
    nest.flat = (names, nest.shape(out), "x")
    nest.store(out, names)
    return nest.scopes[0].lines, index_of("x", names, shape)


def _side_by_side(frame: Frame) -> Source:
    body = to_primitives(frame.body)
    wide, parts, end = frame.wide(*body.values()), [], 0
    for out in body.outputs:
        lines, places = _pointwise(frame, body, out, wide)
        begin, end = end, end + -(-frame.upper(out.type.size) // schedule.POINTWISE_BLOCK)
        parts.append(
            {"begin": begin, "end": end, "size": SYNTAX.size(out.type.size), "places": places, "lines": lines}
        )
    return frame.source(
        "side_by_side", (end, 1, 1), 4, wide=wide, block=schedule.POINTWISE_BLOCK, parts=parts,
        lines=[line for part in parts for line in part["lines"]],
    )  # fmt: skip


def _is_trailing(node: Node) -> bool:
    """Whether a reduction runs over the last axes."""
    rank = node.inputs[0].type.rank
    if node.op == "reduce":
        return sorted(node.attrs.axes) == list(range(rank - len(node.attrs.axes), rank))
    return node.op == "arg_reduce" and node.attrs.axis == rank - 1


def _rows(frame: Frame, body: Graph) -> Source:
    """A program for each place that the reductions have: a row of the output, or one element of it."""
    (out,) = body.outputs
    wide, shape = frame.wide(*body.values()), out.type.shape
    split = max(len(shape) - 1, 0)
    nest = _row_nest(frame, body, split, wide)
    if nest.sequential and split < len(shape):
        split = len(shape)
        nest = _row_nest(frame, body, split, wide)
    names = tuple(f"i{n}" for n in range(split))
    rows = product(shape[:split])
    width = max(nest.lanes.values(), default=1)
    return frame.source(
        "rows", (rows, 1, 1), schedule.row_warps(width), wide=wide, size=SYNTAX.size(rows),
        places=index_of("row", names, shape[:split]), lines=nest.scopes[0].lines,
    )  # fmt: skip


def _row_nest(frame: Frame, body: Graph, split: int, wide: bool) -> BlockNest:
    (out,) = body.outputs
    nest, names = frame.nest(body, wide), tuple(f"i{n}" for n in range(split))
    nest.scopes[0].variables |= set(names)
    if split == len(out.type.shape):
        nest.store(out, names)
        return nest
    width = nest.shape(out)[-1]
    if nest.bound(width) <= BLOCK_LIMIT:
        nest.store(out, (*names, nest.block(width)))
    else:
        nest.walk(width, lambda c: nest.store(out, (*names, c)))
    return nest


def _sample(frame: Frame) -> Source:
    node = only(frame.body, "sample")
    logits, settings, history, index = (frame.pointers[v] for v in node.inputs)
    token, logprobs, ids, _ = (frame.pointers[v] for v in node.outputs)
    rows, vocab = node.inputs[0].type.shape[0], frame.upper(node.inputs[0].type.shape[1])
    at = {name: entry[1] // entry[0].base.itemsize for name, entry in (ROW.fields or {}).items()}
    at["counter_low"] = 2 * at["counter_base"]  # in words of 32 bits
    chunk = min(schedule.SAMPLE_CHUNK, power_of_two(vocab))
    part_size = -(-vocab // (schedule.sample_parts(frame.upper(rows)) * chunk)) * chunk
    parts = -(-vocab // part_size)
    return frame.source(
        "sample", (rows, parts, 1), schedule.SAMPLE_WARPS, scratch_bytes=rows * (8 * vocab + 16 * parts),
        counter_bytes=rows * 4 if parts > 1 else 0, rows=SYNTAX.size(rows), max_rows=frame.upper(rows), vocab=vocab,
        chunk=chunk, parts=parts, part_size=part_size, lanes=power_of_two(parts), at=at, logits=logits, settings=settings,
        history=history, index=index, context=node.inputs[2].type.shape[1], out_token=token, out_logprobs=logprobs,
        out_ids=ids, logprobs=MAX_LOGPROBS + 1, slot_stride=slot_stride(frame, node.inputs[2]),
        greedy_below=float(GREEDY_BELOW),
    )  # fmt: skip


_FAMILIES: dict[str, Callable[[Frame], Source]] = {
    "loops": _loops, "matmul": matmul, "kv_append": kv_append, "attention": attention,
    "attention_decode": attention_decode, "sample": _sample, "side_by_side": _side_by_side, "chain": chain,
}  # fmt: skip
