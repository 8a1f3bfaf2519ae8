"""Groups nodes into fusions: each becomes one kernel of a template family.

Families: `matmul` (a linear layer and its elementwise epilogue), `kv_append`, `attention`, `attention_decode` (both of
them for one token a row), `self_attention`, `sample`, `loops` for everything that a loop nest computes: elementwise
work, views, gathers, reductions and what follows them; and `side_by_side`, several loops that wait for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aotc.ir.graph import Graph, Node, Value
from aotc.ir.ops import OPS
from aotc.ir.ops.control import FusionAttrs
from aotc.ir.sizes import product, upper_bound
from aotc.ir.templates import Templates
from aotc.ir.verify import linear_pairs
from aotc.passes.pack_weights import is_linear

VIEWS = {"reshape", "transpose", "broadcast_in_dim", "slice", "reverse", "constant", "iota"}
"""Index arithmetic only: repeated in every kernel that reads them."""
MOVES = VIEWS | {"gather", "gather_elements", "last_rows", "feed_tokens", "pad", "concatenate"}
REDUCING = {"reduce", "arg_reduce", "reduce_window", "rms_norm", "layer_norm", "softmax", "dot_general", "convolution"}
CHEAP = {"convert", "add", "multiply", "subtract", "select", "negate", "maximum", "minimum"}
"""Worth computing again in each pass of a normalisation."""
WHOLE = {"kv_append", "attention", "self_attention", "sample", "scan", "sort", "top_k"}
"""Ops with a template of their own."""
_KEYS, _QUERY = {"kv_append": slice(1, 3)}, {"attention": slice(0, 1)}
"""What of their inputs the templates of these ops compute: rope of keys, for one."""


@dataclass
class Group:
    """Nodes that become one kernel; `root` makes its output."""

    kind: str
    root: Node
    members: set[Node] = field(default_factory=set)
    also: tuple[Node, ...] = ()  # members whose outputs are the kernel's too, after the root's
    takes: Mapping[str, slice] = field(default_factory=dict)  # by op: the inputs that the kernel computes itself


def is_packed_linear(node: Node) -> bool:
    """A linear layer whose weight has a matmul layout."""
    return is_linear(node) and node.inputs[1].type.packing is not None


def is_layer(node: Node, templates: Templates, producers: Mapping[Value, Node]) -> bool:
    """Whether a node is a linear layer of a template's. What a kernel computed is no dense weight: on a GPU weights are
    fetched before the kernel before has ended."""
    return templates.linear(node) and (node.inputs[1] not in producers or node.inputs[1].type.packing is not None)


PACKED = Templates(is_packed_linear, whole=frozenset({"self_attention"}))


def fuse(graph: Graph, templates: Templates = PACKED) -> Graph:
    """The graph as fusions, plus reshapes (which stay views of memory) and control flow."""
    return _Fuser(graph, templates).run()


class _Fuser:
    def __init__(self, graph: Graph, templates: Templates) -> None:
        self.templates = templates
        self.graph, self.users, self.producer = graph, graph.users(), graph.producers()
        self.external = set(graph.outputs)
        self.group: dict[Node, Group] = {}
        self.order = {n: i for i, n in enumerate(graph.nodes)}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if is_layer(node, self.templates, self.producer):
                self._grow_epilogue(node)
            elif node.op == "attention" and self.templates.attention_decode:
                self._join_append(node)
        for node in reversed(self.graph.nodes):
            if node not in self.group and node.op not in VIEWS and node.op != "if":
                self._place(node)
        kept = self._views_in_memory()
        if self.templates.side_by_side:
            self._put_side_by_side()
        return self._emit(kept)

    def _grow_epilogue(self, dot: Node) -> None:
        """Takes in what follows a matmul while it is the only reader and works on the same elements."""
        group = Group("matmul", dot, {dot})
        while group.root.out not in self.external:
            following = self._next_elementwise(group.root.out, self.users.get(group.root.out, []))
            if not following or any(n in self.group for n in following):
                break
            group.members.update(following)
            group.root = following[-1]
        self._take_norm(group, dot)
        self._take_scale(group)
        self._take_squares(group)
        self.group.update((n, group) for n in group.members)

    def _take_norm(self, group: Group, dot: Node) -> None:
        """rms_norm -> matmul of few rows: each block of the matmul normalises the rows for itself."""
        norm = self.producer.get(dot.inputs[0])
        rows = upper_bound(product(dot.inputs[0].type.shape[:-1]), self.graph.dims)
        if norm is None or norm.op != "rms_norm" or rows > self.templates.norm_rows:
            return
        if norm.out not in self.external and self.users[norm.out] == [dot]:
            group.members.add(norm)

    def _take_scale(self, group: Group) -> None:
        """rms_scale of each row, by which the epilogue multiplies."""
        for node in list(group.members):
            for value in node.inputs:
                view = self.producer.get(value)
                scale = self.producer.get(view.inputs[0]) if view is not None and view.op == "broadcast_in_dim" else None
                if scale is not None and scale.op == "rms_scale":
                    group.members.add(scale)

    def _take_squares(self, group: Group) -> None:
        """What is made for a norm behind the next product: sums of squares, and the scaled copy that it multiplies."""
        readers = self.users.get(group.root.out, [])
        squares = next((n for n in readers if n.op == "sums_of_squares"), None)
        if squares is None:
            return
        for reader in readers:
            chain, last = [reader], reader
            while len(self.users.get(last.out, [])) == 1 and _is_elementwise(self.users[last.out][0]):
                last = self.users[last.out][0]
                chain.append(last)
            ends = self.users.get(last.out, [])
            if reader.op == "multiply" and len(ends) == 1 and self.templates.linear(ends[0]):
                weight = self.producer.get(next(v for v in reader.inputs if v is not group.root.out))
                group.members.update([*chain, squares] + ([weight] if weight is not None and weight.op == "convert" else []))
                group.also = (last, squares)
                return

    def _join_append(self, attention: Node) -> None:
        """kv_append -> attention over one token a row: the kernel that attends writes keys and values as well."""
        append = self.producer.get(attention.inputs[1])
        q, seq_lens = attention.inputs[0], attention.inputs[3]
        if append is None or append.op != "kv_append" or q.type.shape[0] != seq_lens.type.shape[0]:
            return
        if self.users[append.out] == [attention]:
            group = Group("attention_decode", attention, {attention, append}, (append,), _KEYS | _QUERY)
            self.group.update((n, group) for n in group.members)

    def _next_elementwise(self, value: Value, readers: list[Node]) -> list[Node]:
        if len(readers) == 1 and _is_elementwise(readers[0]) and readers[0].out.type.shape == value.type.shape:
            return [readers[0]]
        return self._halves(value, readers)

    def _halves(self, value: Value, readers: list[Node]) -> list[Node]:
        """gate, up = y[:, :n], y[:, n:] read by one node only: both halves are at hand in the epilogue."""
        width = value.type.shape[-1]
        if len(readers) != 2 or any(n.op != "slice" for n in readers) or not isinstance(width, int) or width % 32:
            return []
        half = width // 2
        if sorted(n.attrs.start[-1] for n in readers) != [0, half] or any(
            n.out.type.shape[-1] != half for n in readers
        ):
            return []
        finals = {u for n in readers for u in self.users.get(n.out, [])}
        if len(finals) != 1 or any(n.out in self.external for n in readers):
            return []
        (final,) = finals
        return [*readers, final] if _is_elementwise(final) else []

    def _place(self, node: Node) -> None:
        """Joins the only group that reads the node, or opens one."""
        target = Group(node.op if node.op in WHOLE else "loops", node, takes=self._takes(node))
        reads = self._reads(node.outputs[0]) if node.op not in WHOLE else None
        if reads:
            groups = {id(self.group[r.reader]): self.group[r.reader] for r in reads if r.reader in self.group}
            complete = all(r.reader in self.group for r in reads)
            if complete and len(groups) == 1 and all(self._joins(node, r) for r in reads):
                (target,) = groups.values()
        target.members.add(node)
        self.group[node] = target

    def _takes(self, node: Node) -> Mapping[str, slice]:
        query = _QUERY if self.templates.attention_query else {}
        return {"kv_append": _KEYS, "attention": query}.get(node.op, {})

    def _reads(self, value: Value) -> list[Read] | None:
        """Who reads a value, seen through views; None where it, or a view of it, must be in memory."""
        if value in self.external:
            return None
        reads: list[Read] = []
        for reader in self.users.get(value, []):
            if reader.op == "if":
                return None
            if reader.op not in VIEWS:
                reads.append(Read(reader, value, 1))
                continue
            inner = self._reads(reader.out)
            if inner is None:
                return None
            grows = reader.op == "broadcast_in_dim" and reader.out.type.size != value.type.size
            reads += [replace(r, times=2 if grows else r.times) for r in inner]
        return reads

    def _joins(self, node: Node, read: Read) -> bool:
        """Whether the reader's kernel may compute the node where it needs it."""
        group = self.group[read.reader]
        if not inlines(group, read.reader, read.value) or group.kind == "matmul":
            return False
        if node.op in REDUCING:
            # A reduction is computed once a row: only readers that walk the same elements may take it in.
            same = _is_elementwise(read.reader) and read.reader.out.type.shape == node.out.type.shape
            return same and read.value is node.out and group.kind == "loops" and not _reduces(group)
        if node.op in MOVES or (node.op == "convert" and (read.reader.op == "rope" or _is_elementwise(read.reader))):
            return True  # repeating it costs nothing
        if not _is_elementwise(node) and node.op != "rope":
            return False
        if read.times > 1 or read.reader.op in ("convolution", "dot_general", "reduce_window", "gather", "rope"):
            return False  # computing it once into memory is better
        return read.reader.op not in ("softmax", "layer_norm", "rms_norm") or node.op in CHEAP

    def _views_in_memory(self) -> set[Node]:
        """Views that a reader needs as a buffer. Reshapes keep their input's memory; others become kernels."""
        kept: set[Node] = set()

        def keep(value: Value) -> None:
            node = self.producer.get(value)
            if node is None or node.op not in VIEWS or node in kept or node in self.group:
                return
            if node.op == "reshape":
                kept.add(node)
                keep(node.inputs[0])
            else:
                self.group[node] = Group("loops", node, {node})

        for value in self.graph.outputs:
            keep(value)
        for node in self.graph.nodes:
            if node.op == "if":
                for v in node.inputs:
                    keep(v)
            elif node in self.group and node.op not in VIEWS:
                for v in node.inputs:
                    if not inlines(self.group[node], node, v):
                        keep(v)
        return kept

    def _put_side_by_side(self) -> None:
        """Loops that need nothing but the program's inputs become one kernel: each is too small to be worth a launch. What
        only they read is computed where it is read."""
        first: list[Node] = []
        members: set[Node] = set()
        for node in self.graph.nodes:
            group = self.group.get(node)
            if group is None or group.root is not node or group.kind != "loops" or _reduces(group):
                continue
            if all(self._is_at_hand(v, members | group.members) for n in group.members for v in n.inputs):
                first.append(node)
                members |= group.members
        roots = [n for n in first if self._is_read_outside(n.out, members)]
        if len(roots) > 1:
            together = Group("side_by_side", roots[0], members, tuple(roots[1:]))
            self.group.update((n, together) for n in members)

    def _is_at_hand(self, value: Value, members: set[Node]) -> bool:
        """Whether a value is an input, a weight, made by `members`, or a view of such."""
        node = self.producer.get(value)
        if node is None or node in members:
            return True
        return node.op in VIEWS and node not in self.group and all(self._is_at_hand(v, members) for v in node.inputs)

    def _is_read_outside(self, value: Value, members: set[Node]) -> bool:
        reads = self._reads(value)
        return reads is None or any(r.reader not in members for r in reads)

    def _emit(self, kept: set[Node]) -> Graph:
        """One fusion a group at the place of its root, in the graph's order."""
        nodes: list[Node] = []
        for node in self.graph.nodes:
            group = self.group.get(node)
            if group is not None and group.root is node:
                nodes.append(build_fusion(group, self.group, self.producer, self.order))
            elif node in kept or node.op == "if":
                nodes.append(node)
        return replace(self.graph, nodes=tuple(nodes))


@dataclass(frozen=True)
class Read:
    """`reader` takes `value`; `times` > 1 where a broadcast between repeats each element."""

    reader: Node
    value: Value
    times: int


def inlines(group: Group, reader: Node, value: Value) -> bool:
    """Whether a kernel can compute `value` itself where `reader`, a member, takes it; else it reads memory."""
    if group.kind in ("loops", "side_by_side"):
        return True
    if group.kind == "matmul":
        return reader.op != "dot_general"
    if not group.takes:
        return False
    taken = reader.inputs[group.takes[reader.op]] if reader.op in group.takes else None
    return taken is None or (value in taken and reader.inputs.count(value) == 1)


def _is_elementwise(node: Node) -> bool:
    return OPS[node.op].elementwise or node.op == "swiglu"


def _reduces(group: Group) -> bool:
    return any(n.op in REDUCING for n in group.members)


def build_fusion(group: Group, groups: dict[Node, Group], producer: dict[Value, Node], order: dict[Node, int]) -> Node:
    """The fusion node of a group: its members, and the views they read, form the body."""
    body: set[Node] = set()

    def include(node: Node) -> None:
        if node in body:
            return
        body.add(node)
        for v in node.inputs:
            inner = producer.get(v)
            if inner is None:
                continue
            repeated = inner.op in VIEWS and inner not in groups and (node.op in VIEWS or inlines(group, node, v))
            if inner in group.members or repeated:
                include(inner)

    for node in (group.root, *group.also):
        include(node)
    nodes = sorted(body, key=order.__getitem__)
    made = {v for n in nodes for v in n.outputs}
    inputs = tuple(dict.fromkeys(v for n in nodes for v in n.inputs if v not in made))
    local = {v: Value(f"i{i}", v.type) for i, v in enumerate(inputs)}
    for n in nodes:
        for v in n.outputs:
            local[v] = Value(f"v{len(local) - len(inputs)}", v.type)
    inner_nodes = tuple(
        replace(n, inputs=tuple(local[v] for v in n.inputs), outputs=tuple(local[v] for v in n.outputs), sources=())
        for n in nodes
    )
    root = group.root
    outputs = (*root.outputs, *(v for n in group.also for v in n.outputs))
    names = tuple(f"o{i}" for i in range(len(outputs)))
    aliases = tuple(
        (names[outputs.index(n.outputs[o])], local[n.inputs[i]].name)
        for n in (root, *group.also) for o, i in linear_pairs(n)
    )  # fmt: skip
    graph = Graph(
        group.kind,
        (),
        tuple(local[v] for v in inputs),
        tuple(local[v] for v in outputs),
        names,
        inner_nodes,
        aliases=aliases,
    )
    sources = tuple(dict.fromkeys(s for n in nodes for s in n.sources))
    return Node("fusion", inputs, outputs, FusionAttrs(group.kind, graph), sources)
