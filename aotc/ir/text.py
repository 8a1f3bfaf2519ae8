"""The text form of a graph: prints and parses back to the same text.

    graph name {
      dim tokens = 1..8
      input %x: f32[tokens, 4]
      weight %w: f32[4, 4]{n16k1} = "model.w"
      %3: f32[tokens, 4] = dot_general(%x, %w) {lhs_contracting = [1], rhs_contracting = [1]} from "proj"
      output y = %3
    }

Attribute values: 3, 0.5, true, none, "text", @bf16, <tokens*2>, [1, 2] and nested graphs.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from aotc.ir import sizes
from aotc.ir.dtypes import DTYPES, DType
from aotc.ir.graph import Graph, Node, TensorType, Value, Weight
from aotc.ir.ops import OPS
from aotc.ir.sizes import Dim, Expr


def print_graph(graph: Graph, indent: str = "") -> str:
    """The graph as text, without a final newline."""
    inner = indent + "  "
    lines = [f"graph {graph.name} {{"]
    lines += [f"{inner}dim {d.name} = {d.lo}..{d.hi}" for d in graph.dims]
    lines += [f"{inner}input {v}" for v in graph.inputs]
    lines += [f"{inner}weight {w.value} = {json.dumps(w.key)}" for w in graph.weights]
    lines += [inner + _print_node(n, inner) for n in graph.nodes]
    aliases = dict(graph.aliases)
    for name, v in zip(graph.output_names, graph.outputs, strict=True):
        lines.append(
            f"{inner}output {json.dumps(name)} = %{v.name}"
            + (f" aliases {json.dumps(aliases[name])}" if name in aliases else "")
        )
    return "\n".join([*lines, indent + "}"])


def _print_node(node: Node, indent: str) -> str:
    outs = ", ".join(map(repr, node.outputs))
    ins = ", ".join("%" + v.name for v in node.inputs)
    attrs = [f"{f.name} = {_print_attr(getattr(node.attrs, f.name), indent)}" for f in fields(node.attrs)]
    text = f"{outs} = {node.op}({ins})" + (f" {{{', '.join(attrs)}}}" if attrs else "")
    return text + (" from " + ", ".join(map(json.dumps, node.sources)) if node.sources else "")


def _print_attr(value: Any, indent: str) -> str:
    if isinstance(value, Graph):
        return print_graph(value, indent)
    if isinstance(value, tuple):
        return f"[{', '.join(_print_attr(v, indent) for v in value)}]"
    if isinstance(value, DType):
        return f"@{value.name}"
    if isinstance(value, Expr):
        return f"<{value}>"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)


_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<value>%[^\s:,()={}]+)|(?P<size><[^>]*>)'
    r"|(?P<dots>\.\.)|(?P<number>[-+]?(?:inf\b|nan\b|\d+(?:\.(?!\.)\d*)?(?:[eE][-+]?\d+)?))"
    r"|(?P<name>@?[A-Za-z_][\w.]*)|(?P<mark>//|[-+*{}()\[\]:,=]))"
)


def parse_graph(text: str) -> Graph:
    """Reads what `print_graph` prints. Raises ValueError with the place of the fault."""
    parser = _Parser(text)
    graph = parser.graph()
    if parser.kind:
        raise parser.fault("text after the graph")
    return graph


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.pos = text, 0
        self.kind, self.token = "", ""
        self.advance()

    def fault(self, message: str) -> ValueError:
        return ValueError(f"line {self.text.count(chr(10), 0, self.pos) + 1}: {message}, at {self.token!r}")

    def advance(self) -> str:
        previous = self.token
        match = _TOKEN.match(self.text, self.pos)
        if match is None:
            if self.text[self.pos :].strip():
                raise self.fault("not a token")
            self.kind = self.token = ""
            return previous
        self.pos = match.end()
        self.kind = match.lastgroup or ""
        self.token = match.group(self.kind)
        return previous

    def expect(self, token: str) -> None:
        if self.token != token:
            raise self.fault(f"expected {token!r}")
        self.advance()

    def take(self, kind: str) -> str:
        if self.kind != kind:
            raise self.fault(f"expected a {kind}")
        return self.advance()

    def accept(self, token: str) -> bool:
        if self.token == token and self.kind != "string":
            self.advance()
            return True
        return False

    def graph(self) -> Graph:
        self.expect("graph")
        name = self.take("name")
        self.expect("{")
        dims: list[Dim] = []
        inputs: list[Value] = []
        weights: list[Weight] = []
        nodes: list[Node] = []
        outputs: dict[str, Value] = {}
        aliases: list[tuple[str, str]] = []
        env: dict[str, Value] = {}
        while not self.accept("}"):
            if self.kind == "value":
                nodes.append(self.node(env))
            elif self.accept("dim"):
                dims.append(self.dim())
            elif self.accept("input"):
                inputs.append(self.typed(env))
            elif self.accept("weight"):
                value = self.typed(env)
                self.expect("=")
                weights.append(Weight(value, json.loads(self.take("string"))))
            else:
                self.expect("output")
                key = json.loads(self.take("string"))
                self.expect("=")
                outputs[key] = self.use(env)
                if self.accept("aliases"):
                    aliases.append((key, json.loads(self.take("string"))))
        values, names = tuple(outputs.values()), tuple(outputs)
        return Graph(name, tuple(dims), tuple(inputs), values, names, tuple(nodes), tuple(weights), tuple(aliases))

    def dim(self) -> Dim:
        name = self.take("name")
        self.expect("=")
        lo = int(self.take("number"))
        self.expect("..")
        return Dim(name, lo, int(self.take("number")))

    def typed(self, env: dict[str, Value]) -> Value:
        name = self.take("value")[1:]
        self.expect(":")
        value = Value(name, self.type())
        if name in env:
            raise self.fault(f"%{name} is defined twice")
        env[name] = value
        return value

    def use(self, env: dict[str, Value]) -> Value:
        name = self.take("value")[1:]
        if name not in env:
            raise self.fault(f"%{name} is not defined")
        return env[name]

    def type(self) -> TensorType:
        dtype = self.take("name")
        if dtype not in DTYPES:
            raise self.fault(f"no element type {dtype}")
        self.expect("[")
        shape = []
        while not self.accept("]"):
            words = []
            depth = 0
            while depth or self.token not in (",", "]"):
                depth += (self.token == "(") - (self.token == ")")
                words.append(self.advance())
                if not self.kind:
                    raise self.fault("a shape does not end")
            shape.append(sizes.parse("".join(words)))
            self.accept(",")
        packing = None
        if self.token == "{":
            self.advance()
            packing = self.take("name")
            self.expect("}")
        return TensorType(DTYPES[dtype], tuple(shape), packing)

    def node(self, env: dict[str, Value]) -> Node:
        outs = [self.typed(env)]
        while self.accept(","):
            outs.append(self.typed(env))
        self.expect("=")
        op = self.take("name")
        if op not in OPS:
            raise self.fault(f"no op {op}")
        self.expect("(")
        ins = []
        while not self.accept(")"):
            ins.append(self.use(env))
            self.accept(",")
        attrs = {}
        if self.accept("{"):
            while not self.accept("}"):
                key = self.take("name")
                self.expect("=")
                attrs[key] = self.attr()
                self.accept(",")
        sources = []
        if self.accept("from"):
            sources.append(json.loads(self.take("string")))
            while self.accept(","):
                sources.append(json.loads(self.take("string")))
        return Node(op, tuple(ins), tuple(outs), OPS[op].attrs(**attrs), tuple(sources))

    def attr(self) -> Any:
        if self.token == "graph" and self.kind == "name":
            return self.graph()
        if self.accept("["):
            items = []
            while not self.accept("]"):
                items.append(self.attr())
                self.accept(",")
            return tuple(items)
        kind, token = self.kind, self.advance()
        if kind == "string":
            return json.loads(token)
        if kind == "size":
            return sizes.parse(token[1:-1])
        if kind == "number":
            return float(token) if re.search(r"[.eEn]", token) else int(token)
        if token.startswith("@"):
            return DTYPES[token[1:]]
        constants = {"true": True, "false": False, "none": None}
        if token not in constants:
            raise self.fault("not an attribute value")
        return constants[token]
