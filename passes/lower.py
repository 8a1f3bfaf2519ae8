"""Lowers a fused graph to a program: each fusion becomes a call, each value a buffer, each reshape the same buffer."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from aotc.ir.graph import Graph, Node, TensorType, Value
from aotc.ir.ops.control import FusionAttrs
from aotc.ir.ops.shape import ShapeAttrs
from aotc.ir.program import Branch, Buffer, Call, Instruction, Kernel, Program, area_of
from aotc.ir.text import print_graph
from aotc.ir.verify import linear_pairs


def lower(graph: Graph) -> Program:
    """The program of a fused graph; buffers of the arena have no place yet."""
    lowering = _Lowering(graph)
    for value in graph.inputs:
        linear = value.name in {source for _, source in graph.aliases}
        space = "input" if not linear else "state" if area_of(value.type) == "state" else "kv"
        lowering.bind(value, Buffer(value.name, value.type, space, value.name))
    for weight in graph.weights:
        lowering.bind(weight.value, Buffer(weight.value.name, weight.value.type, "weight", weight.key))
    aliased = {name for name, _ in graph.aliases}
    targets = {
        n: Buffer(f"out.{n}", v.type, "output", n)
        for n, v in zip(graph.output_names, graph.outputs, strict=True) if n not in aliased
    }  # fmt: skip
    body = lowering.lower_into(graph, targets)
    outputs = tuple(
        (n, targets[n].name if n in targets else lowering.env[v].name)
        for n, v in zip(graph.output_names, graph.outputs, strict=True)
    )
    inputs = tuple(lowering.env[v].name for v in graph.inputs)
    return Program(graph.name, graph.dims, inputs, outputs, lowering.buffers, lowering.kernels, body, graph=graph)


class _Lowering:
    def __init__(self, graph: Graph) -> None:
        self.env: dict[Value, Buffer] = {}
        self.buffers: dict[str, Buffer] = {}
        self.kernels: dict[str, Kernel] = {}

    def bind(self, value: Value, buffer: Buffer) -> Buffer:
        name, n = buffer.name, 0
        while name in self.buffers and self.buffers[name] is not buffer:
            n += 1
            name = f"{buffer.name}.{n}"
        if name != buffer.name:
            buffer = replace(buffer, name=name)
        self.buffers[name] = self.env[value] = buffer
        return buffer

    def lower_into(self, graph: Graph, targets: dict[str, Buffer]) -> tuple[Instruction, ...]:
        """Lowers nodes so that each named output ends in its target; what cannot be made there is copied."""
        producers = graph.producers()
        copies: list[tuple[Value, Buffer]] = []
        for name, value in zip(graph.output_names, graph.outputs, strict=True):
            if name not in targets:
                continue
            target = targets[name]
            self.buffers[target.name] = target
            origin = value
            while origin in producers and producers[origin].op == "reshape":
                origin = producers[origin].inputs[0]
            if origin in producers and origin not in self.env and not self._updates_state(producers[origin], origin):
                self.env[origin] = target
            else:
                copies.append((value, target))
        body = [step for node in graph.nodes for step in self._node(node)]
        body += [self._copy(value, target) for value, target in copies]
        return tuple(body)

    def _updates_state(self, node: Node, value: Value) -> bool:
        return any(node.outputs[o] is value for o, _ in linear_pairs(node))

    def _node(self, node: Node) -> list[Instruction]:
        if node.op == "reshape":
            self.env[node.out] = self.env[node.inputs[0]]
            return []
        if node.op == "if":
            return [self._branch(node)]
        assert node.op == "fusion", f"lowering takes fusions, not {node.op}"
        updates = {node.outputs[o]: node.inputs[i] for o, i in linear_pairs(node)}
        for value in node.outputs:
            if value in updates:
                self.env[value] = self.env[updates[value]]
            elif value not in self.env:
                self.bind(value, Buffer(value.name, value.type, "arena"))
        return [self._call(node.attrs, node.inputs, tuple(self.env[v].name for v in node.outputs), node.sources)]

    def _call(
        self, at: FusionAttrs, inputs: tuple[Value, ...], outputs: tuple[str, ...], sources: tuple[str, ...]
    ) -> Call:
        digest = hashlib.sha256(print_graph(at.body).encode()).hexdigest()[:12]
        name = f"{at.kind}_{digest}"
        self.kernels.setdefault(name, Kernel(name, at.kind, at.body))
        return Call(name, tuple(self.env[v].name for v in inputs), outputs, sources)

    def _copy(self, value: Value, target: Buffer) -> Call:
        inner, out = Value("i0", value.type), Value("v0", TensorType(value.type.dtype, value.type.shape))
        node = Node("reshape", (inner,), (out,), ShapeAttrs(value.type.shape))
        return self._call(
            FusionAttrs("loops", Graph("loops", (), (inner,), (out,), ("o0",), (node,))), (value,), (target.name,), ()
        )

    def _branch(self, node: Node) -> Branch:
        outs = []
        for value in node.outputs:
            outs.append(
                self.env[value] if value in self.env else self.bind(value, Buffer(value.name, value.type, "arena"))
            )
        bodies = []
        for branch in (node.attrs.then, node.attrs.orelse):
            for inner, outer in zip(branch.inputs, node.inputs[1:], strict=True):
                self.env[inner] = self.env[outer]
            bodies.append(self.lower_into(branch, dict(zip(branch.output_names, outs, strict=True))))
        return Branch(self.env[node.inputs[0]].name, *bodies)
