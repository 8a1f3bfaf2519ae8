"""Imports an ONNX graph: each node becomes IR nodes by its operator's row in `operators.OPERATORS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, ValueInfoProto

from aotc.errors import AotcError, SourceError, UnsupportedError
from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.dimensions import read_dims
from aotc.frontend.onnx.emitter import Emitter, WeightTable
from aotc.frontend.onnx.known import Known, Tensor
from aotc.frontend.onnx.operators import OPERATORS, REFUSED
from aotc.frontend.onnx.reader import ModelFile
from aotc.frontend.onnx.tensors import dtype_of, plain, type_of
from aotc.ir.graph import Graph, TensorType, Value
from aotc.ir.ops.control import IfAttrs

_DEEPEST = 24
"""Graphs in graphs, and calls in functions."""


def import_model(path: Path, bounds: Mapping[str, tuple[int, int]], batch: int = 0) -> tuple[Graph, WeightTable]:
    """The graph of an ONNX file and its weights. `bounds` gives the range of each dynamic dim, but
    for one whose upper bound is `batch`, if that is not 0.

    Raises SourceError for a damaged file and UnsupportedError for what aotc does not compile.
    """
    file = ModelFile(path)
    proto = file.proto.graph
    inputs = inputs_of(proto)
    shapes, dims = read_dims(inputs, bounds, path, batch)
    weights = WeightTable()
    emitter = Emitter("main", dims, weights)
    functions = {(f.domain, f.name): f for f in file.proto.functions}
    importer = Importer(emitter, file, file.opsets, functions)
    for value, shape in zip(inputs, shapes, strict=True):
        dtype = dtype_of(value.type.tensor_type.elem_type, f"input '{plain(value.name)}'")
        importer.define(value.name, emitter.builder.input(value.name, TensorType(dtype, shape)))
    importer.run(proto)
    try:
        outputs = {o.name: emitter.value(importer.find(o.name)) for o in proto.output}
    except (TypeError, ValueError, OverflowError) as error:
        raise SourceError(f"{path}: an output cannot be computed: {str(error).splitlines()[0]}") from error
    return emitter.builder.finish(outputs), weights


class Importer:
    """Imports the nodes of one graph, branch or function body into an emitter, with names of outer graphs in sight."""

    def __init__(
        self,
        emitter: Emitter,
        file: ModelFile,
        opsets: Mapping[str, int],
        functions: Mapping[tuple[str, str], FunctionProto],
        outer: Importer | None = None,
        depth: int = 0,
    ) -> None:
        self.emitter, self.file, self.opsets, self.functions, self.outer = emitter, file, opsets, functions, outer
        self.depth = depth
        self.names: dict[str, Tensor] = {}
        self.attributes: Mapping[str, AttributeProto] = {}
        """What a function was called with: its nodes' attributes refer to these."""
        if depth > _DEEPEST:
            raise UnsupportedError(f"{file.path} nests graphs deeper than {_DEEPEST}: flatten it")

    def define(self, name: str, tensor: Tensor) -> None:
        """Binds a name. Raises SourceError for a second definition."""
        if name in self.names:
            raise SourceError(f"{self.file.path} defines '{plain(name)}' twice")
        self.names[name] = tensor

    def find(self, name: str) -> Tensor:
        """The tensor of a name, here or in an outer graph."""
        if name in self.names:
            return self.names[name]
        if self.outer is None:
            raise SourceError(f"{self.file.path} uses '{plain(name)}' before it is defined")
        found = self.outer.find(name)
        if isinstance(found, Value) and self.emitter is not self.outer.emitter:
            return self.emitter.capture(found)
        return found

    def run(self, proto: GraphProto) -> None:
        """Imports initialisers and nodes."""
        if proto.sparse_initializer:
            raise UnsupportedError(f"{self.file.path} holds sparse initialisers: save it with dense ones")
        for tensor in proto.initializer:
            where = f"initialiser '{plain(tensor.name)}'"
            read = lambda tensor=tensor, where=where: self.file.array(tensor, where)  # noqa: E731
            self.define(tensor.name, Known(type_of(tensor, where), read, tensor.name))
        for node in proto.node:
            self.node(node)

    def node(self, proto: NodeProto) -> None:
        """Imports one node and binds its outputs."""
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        inputs = [self.find(name) if name else None for name in proto.input]
        while inputs and inputs[-1] is None:
            inputs.pop()
        call = Call(proto, self.opsets.get(domain, 0), inputs, self._attributes(proto))
        self.emitter.builder.source = (call.label,)
        try:
            results = self._results(call, domain)
        except AotcError:
            raise
        except NotImplementedError as error:
            raise call.refusal(str(error)) from error
        except (TypeError, ValueError, IndexError, KeyError, OverflowError, ZeroDivisionError, MemoryError) as error:
            raise _misfit(call, error) from error
        for i, name in enumerate(proto.output):
            if name:
                if i >= len(results):
                    raise call.refusal(f"its output {i} ('{plain(name)}') is not supported: remove what uses it")
                self.define(name, results[i])

    def _attributes(self, proto: NodeProto) -> dict[str, AttributeProto]:
        found = {}
        for attribute in proto.attribute:
            if not attribute.ref_attr_name:
                found[attribute.name] = attribute
            elif attribute.ref_attr_name in self.attributes:
                found[attribute.name] = self.attributes[attribute.ref_attr_name]
        return found

    def _results(self, call: Call, domain: str) -> Sequence[Tensor]:
        op = call.proto.op_type
        if (domain, op) in self.functions:
            return self._function(call, self.functions[domain, op])
        if domain == "" and op == "If":
            return self._if(call)
        if domain == "" and op in REFUSED:
            raise call.refusal(REFUSED[op])
        if domain != "" or op not in OPERATORS:
            raise call.refusal("aotc does not know this operator: replace it by others, or add a row for it")
        call.require_inputs()
        results = OPERATORS[op](self.emitter, call, *call.inputs)
        return (results,) if isinstance(results, Value | Known) else results

    def _function(self, call: Call, function: FunctionProto) -> Sequence[Tensor]:
        opsets = dict(self.opsets) | {
            ("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import
        }
        body = Importer(self.emitter, self.file, opsets, self.functions, None, self.depth + 1)
        body.attributes = {a.name: a for a in function.attribute_proto} | dict(call.attributes)
        for name, tensor in zip(function.input, call.inputs, strict=False):
            if tensor is not None:
                body.define(name, tensor)
        for node in function.node:
            body.node(node)
        return [body.find(name) for name in function.output]

    def _if(self, call: Call) -> Sequence[Tensor]:
        (condition,) = call.inputs
        assert condition is not None
        branches = [call.attr_graph("then_branch"), call.attr_graph("else_branch")]
        if isinstance(condition, Known) and not condition.symbolic:
            taken = branches[0 if bool(condition.array.reshape(())) else 1]
            return self._inline(taken)
        arms = [self._branch(name, graph) for name, graph in zip(("then", "orelse"), branches, strict=True)]
        return join(self.emitter, call, self.emitter.value(condition), arms)

    def _inline(self, graph: GraphProto) -> Sequence[Tensor]:
        body = Importer(self.emitter, self.file, self.opsets, self.functions, self, self.depth + 1)
        body.attributes = self.attributes
        body.run(graph)
        return [body.find(o.name) for o in graph.output]

    def _branch(self, name: str, graph: GraphProto) -> tuple[Emitter, Sequence[Tensor]]:
        emitter = Emitter(name, self.emitter.dims, self.emitter.weights, self.emitter)
        body = Importer(emitter, self.file, self.opsets, self.functions, self, self.depth + 1)
        body.attributes = self.attributes
        body.run(graph)
        return emitter, [body.find(o.name) for o in graph.output]


def _misfit(call: Call, error: Exception) -> AotcError:
    """What a row or a type rule could not make sense of: a fault of the file, or a limit of ours where sizes that
    are dims may well fit when the model runs."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, KeyError):
        reason = f"{reason} is no value that aotc knows here"
    if "'Expr'" in reason:  # a row counted with a dim as if it were a number
        reason = f"needs numbers for the sizes of {[str(x.type) for x in call.inputs if x is not None]}"
    return call.misfit(reason, *(s for x in call.inputs if x is not None for s in x.type.shape))


def join(
    emitter: Emitter, call: Call, condition: Value, arms: Sequence[tuple[Emitter, Sequence[Tensor]]]
) -> Sequence[Tensor]:
    """The `if` of two branches: both take every outer value that either reads."""
    (then, yes), (orelse, no) = arms
    if len(yes) != len(no):
        raise SourceError(f"{call}: its branches have {len(yes)} and {len(no)} outputs")
    for a, b in zip(yes, no, strict=True):
        if a.type != b.type:
            raise call.refusal(
                f"its branches give {a.type} and {b.type}: make the condition a constant, or the shapes equal"
            )
    equal = [_same(a, b) for a, b in zip(yes, no, strict=True)]
    if all(equal):
        return yes
    graphs = [
        arm.builder.finish({f"out{i}": arm.value(r) for i, r in enumerate(results) if not equal[i]})
        for arm, results in arms
    ]
    read: dict[Value, None] = {}
    for arm, graph in zip((then, orelse), graphs, strict=True):
        used = {v for n in graph.nodes for v in n.inputs} | set(graph.outputs)
        read |= dict.fromkeys(v for v, inner in arm.captured.items() if inner in used)
    bodies = [
        replace(graph, inputs=tuple(arm.capture(v) for v in read))
        for arm, graph in zip((then, orelse), graphs, strict=True)
    ]
    made = iter(emitter.emit_many("if", condition, *read, attrs=IfAttrs(*bodies)))
    return [a if same else next(made) for a, same in zip(yes, equal, strict=True)]


def _same(a: Tensor, b: Tensor) -> bool:
    """True where both branches give one known tensor: sizes, as a rule."""
    small = isinstance(a, Known) and isinstance(b, Known) and max(a.nbytes, b.nbytes) <= 1 << 12
    return small and np.array_equal(a.array, b.array)  # type: ignore[union-attr]


def inputs_of(graph: GraphProto) -> list[ValueInfoProto]:
    """The inputs that are no initialisers (up to IR version 3 these are listed too)."""
    initialised = {t.name for t in graph.initializer}
    return [v for v in graph.input if v.name not in initialised]
