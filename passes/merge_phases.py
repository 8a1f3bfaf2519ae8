"""Makes one kernel of linear layers that follow one another, where a target has a template that runs several as phases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import replace

from aotc.ir.graph import Graph, Node, TensorType, Value
from aotc.ir.ops.control import FusionAttrs
from aotc.ir.program import Branch, Call, Instruction, Kernel, Program
from aotc.ir.text import print_graph

MOST = 8  # phases of a kernel

Phase = Callable[[Kernel], Hashable]
"""What kernels that can be phases of one kernel have in common; None for one that can be no phase."""


def merge_phases(program: Program, phase: Phase, most: int = MOST) -> Program:
    """The planned program with each run of calls whose kernels can be phases as one call of a `chain`, `most` at once.

    Memory stays as it was planned: no phase begins before all blocks have ended the one before.
    """
    kernels: dict[str, Kernel] = {}
    kinds = {name: phase(kernel) for name, kernel in program.kernels.items()}

    def walk(body: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        done: list[Instruction] = []
        run = _Run(program, most)

        def end_run() -> None:
            done.extend([run.call(kernels)] if len(run.calls) > 1 else run.calls)
            run.clear()

        for step in body:
            if isinstance(step, Branch):
                end_run()
                done.append(replace(step, then=walk(step.then), orelse=walk(step.orelse)))
                continue
            kind = kinds[step.kernel]
            if kind != run.kind or not run.takes(step):
                end_run()
            if kind is None:
                done.append(step)
            else:
                run.add(step, kind)
        end_run()
        return tuple(done)

    body = walk(program.body)
    merged = replace(program, body=body, kernels=dict(program.kernels) | kernels)
    used = {c.kernel for c in merged.calls()}
    return replace(merged, kernels={n: k for n, k in merged.kernels.items() if n in used})


class _Run:
    """Calls that follow one another and become one."""

    def __init__(self, program: Program, most: int) -> None:
        self.program, self.most = program, most
        self.clear()

    def clear(self) -> None:
        self.calls: list[Call] = []
        self.kind: Hashable = None
        self.types: dict[str, TensorType] = {}  # by buffer

    def takes(self, call: Call) -> bool:
        """Whether there is room, and every buffer is seen as the same tensor by all."""
        return len(self.calls) < self.most and all(self.types.get(b, t) == t for b, t in self._seen(call))

    def add(self, call: Call, kind: Hashable) -> None:
        self.calls.append(call)
        self.kind = kind
        self.types |= dict(self._seen(call))

    def _seen(self, call: Call) -> list[tuple[str, TensorType]]:
        body = self.program.kernels[call.kernel].body
        return [(b, v.type) for b, v in zip((*call.inputs, *call.outputs), (*body.inputs, *body.outputs), strict=True)]

    def call(self, kernels: dict[str, Kernel]) -> Call:
        """One call for all; notes its kernel."""
        made = {b for c in self.calls for b in c.outputs}
        inputs = tuple(dict.fromkeys(b for c in self.calls for b in c.inputs if b not in made))
        outputs = tuple(dict.fromkeys(b for c in self.calls for b in c.outputs))
        values = {b: Value(f"i{n}", self.types[b]) for n, b in enumerate(inputs)}
        values |= {b: Value(f"v{n}", self.types[b]) for n, b in enumerate(outputs)}
        nodes = []
        for call in self.calls:
            kernel = self.program.kernels[call.kernel]
            takes, gives = (tuple(values[b] for b in names) for names in (call.inputs, call.outputs))
            nodes.append(Node("fusion", takes, gives, FusionAttrs(kernel.family, kernel.body)))
        names = tuple(f"o{n}" for n in range(len(outputs)))
        graph = Graph(
            "chain", (), tuple(values[b] for b in inputs), tuple(values[b] for b in outputs), names, tuple(nodes)
        )
        name = f"chain_{hashlib.sha256(print_graph(graph).encode()).hexdigest()[:12]}"
        kernels[name] = Kernel(name, "chain", graph)
        sources = tuple(dict.fromkeys(s for c in self.calls for s in c.sources))
        return Call(name, inputs, outputs, sources)
