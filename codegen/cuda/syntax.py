"""How loop nests are written in Triton: a name holds a scalar or a block, f16 and bf16 are computed in f32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aotc.errors import UnsupportedError
from aotc.ir.dtypes import DType
from aotc.ir.graph import Node
from aotc.ir.ops.contraction import highest, lowest
from aotc.ir.sizes import FloorDiv, Size

POINTER = {
    "f64": "*fp64", "f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "i64": "*i64", "i32": "*i32", "i16": "*i16",
    "i8": "*i8", "u64": "*u64", "u32": "*u32", "u16": "*u16", "u8": "*u8", "bool": "*u8",
}  # fmt: skip
"""Types of arguments in a signature. Bools lie in memory as bytes."""

STORAGE = {
    "f64": "tl.float64", "f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16", "i64": "tl.int64",
    "i32": "tl.int32", "i16": "tl.int16", "i8": "tl.int8", "u64": "tl.uint64", "u32": "tl.uint32", "u16": "tl.uint16",
    "u8": "tl.uint8", "bool": "tl.uint8",
}  # fmt: skip
"""The Triton type of an element in memory."""

_FUNCTIONS = {
    "exponential": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt", "erf": "tl.erf", "sine": "tl.sin",
    "cosine": "tl.cos", "floor": "tl.floor", "ceil": "tl.ceil", "abs": "tl.abs",
}  # fmt: skip
LIBDEVICE = {
    "exponential_minus_one": "expm1", "log_plus_one": "log1p", "cbrt": "cbrt", "tan": "tan", "tanh": "tanh",
    "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh", "asinh": "asinh", "acosh": "acosh",
    "atanh": "atanh", "round_nearest_even": "rint", "trunc": "trunc", "power": "pow", "atan2": "atan2",
    "remainder": "fmod",
}  # fmt: skip
"""Functions of NVIDIA's libdevice, in f32 and f64."""
_OPERATORS = {
    "add": "+", "subtract": "-", "multiply": "*", "and": "&", "or": "|", "xor": "^", "shift_left": "<<",
    "shift_right": ">>",
}  # fmt: skip
_COMPARISONS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}


@dataclass(frozen=True)
class TritonSyntax:
    """Implements `codegen.loops.Syntax`. Without `double`, what is f64 for exactness alone is computed in f32."""

    double: bool = True

    def register(self, dtype: DType) -> str:
        """The Triton type that a value is computed in."""
        if dtype.name in ("f16", "bf16") or (dtype.name == "f64" and not self.double):
            return "tl.float32"
        return "tl.int1" if dtype.name == "bool" else STORAGE[dtype.name]

    def size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        text = " + ".join(self._monomial(atoms, coef) for atoms, coef in size.terms)
        return text if text.isidentifier() else f"({text})"

    def _monomial(self, atoms: tuple[Any, ...], coef: int) -> str:
        factors = [f"({self.size(a.num)} // {a.den})" if isinstance(a, FloorDiv) else dim(a) for a in atoms]
        return " * ".join(factors + ([str(coef)] if coef != 1 or not factors else []))

    def declare(self, dtype: DType, name: str, expression: str) -> str:
        return f"{name} = {expression}"

    def load(self, pointer: str, dtype: DType, offset: str, mask: str = "") -> str:
        """An element in its register type; lanes outside of `mask` read 0."""
        masked = f", mask={mask}, other=0" if mask else ""
        loaded = f"tl.load({pointer} + {offset}{masked})"
        if dtype.name == "bool":
            return f"{loaded} != 0"
        return loaded if self.register(dtype) == STORAGE[dtype.name] else f"{loaded}.to({self.register(dtype)})"

    def store(self, pointer: str, dtype: DType, offset: str, value: str, mask: str = "") -> str:
        """The statement that writes elements where `mask` holds."""
        masked = f", mask={mask}" if mask else ""
        stored = value if self.register(dtype) == STORAGE[dtype.name] else f"{value}.to({STORAGE[dtype.name]})"
        return f"tl.store({pointer} + {offset}, {stored}{masked})"

    def constant(self, value: Any, dtype: DType) -> str:
        return f"tl.full([], {self.literal(value, dtype)}, {self.register(dtype)})"

    def literal(self, value: Any, dtype: DType) -> str:
        """A number as Python writes it."""
        if dtype.name == "bool":
            return str(bool(value))
        if not dtype.is_float:
            return str(int(value))
        number = float(value)
        return f'float("{number}")' if math.isnan(number) or math.isinf(number) else repr(number)

    def convert(self, expression: str, source: DType, target: DType) -> str:
        """`expression` is a name: it may be written more than once."""
        if source == target or self.register(source) == self.register(target):
            return expression
        if target.name == "bool":
            return f"{expression} != 0"
        if source.is_float and target.is_int:
            return self._saturated(expression, target)
        return f"{expression}.to({self.register(target)})"

    def _saturated(self, x: str, target: DType) -> str:
        """Truncates; what does not fit becomes the nearest number that does, NaN becomes 0."""
        bits = target.itemsize * 8
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if target.kind == "int" else (0, 2**bits)
        kind = self.register(target)
        inside = f"tl.where({x} <= {float(low)!r}, {self.constant(low, target)}, {x}.to({kind}))"
        below = f"tl.where({x} >= {float(high)!r}, {self.constant(high - 1, target)}, {inside})"
        return f"tl.where({x} != {x}, {self.constant(0, target)}, {below})"

    def select(self, condition: str, yes: str, no: str) -> str:
        return f"tl.where({condition}, {yes}, {no})"

    def call(self, op: str, dtype: DType, args: list[str], attrs: Any) -> str:
        """`attrs` is the node for ops of the graph, None where a reduction asks: `start_` is what it starts from."""
        if op.startswith("start_"):
            return self._start(op[6:], dtype)
        if op in ("maximum", "minimum"):
            if dtype.name == "bool":
                return f"{args[0]} {'|' if op == 'maximum' else '&'} {args[1]}"
            nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float else ""
            return f"tl.{op}({args[0]}, {args[1]}{nan})"
        if op in _OPERATORS:
            return f"{args[0]} {_OPERATORS[op]} {args[1]}"
        if op in _FUNCTIONS:
            return f"{_FUNCTIONS[op]}({', '.join(args)})"
        if op in LIBDEVICE and dtype.is_float:
            return f"libdevice.{LIBDEVICE[op]}({', '.join(args)})"
        return self._special(op, dtype, args, attrs)

    def _special(self, op: str, dtype: DType, args: list[str], node: Node) -> str:
        if op == "compare":
            return f"{args[0]} {_COMPARISONS[node.attrs.direction]} {args[1]}"
        if op == "convert":
            return self.convert(args[0], node.inputs[0].type.dtype, dtype)
        if op == "divide" and dtype.is_float:
            return f"{args[0]} / {args[1]}"
        if op in ("divide", "remainder"):  # of integers, by 0: 0
            sign = "//" if op == "divide" else "%"
            zero, one = self.constant(0, dtype), self.constant(1, dtype)
            return f"tl.where({args[1]} == 0, {zero}, {args[0]} {sign} tl.where({args[1]} == 0, {one}, {args[1]}))"
        bits = dtype.itemsize * 8
        ones = self.constant(2**bits - 1 if dtype.kind == "uint" else -1, dtype)
        templates = {
            "select": "tl.where({0}, {1}, {2})", "negate": "-{0}", "logistic": "1 / (1 + tl.exp(-{0}))",
            "not": "{0} == 0" if dtype.name == "bool" else f"{{0}} ^ {ones}",
            "sign": self._sign(dtype),
        }  # fmt: skip
        if op not in templates:
            raise UnsupportedError(f"op {op} has no Triton form")
        return templates[op].format(*args)

    def _start(self, kind: str, dtype: DType) -> str:
        if kind in ("sum", "product"):
            return self.literal(kind == "product", dtype)
        if kind in ("and", "or"):
            return str(kind == "and")
        return self.literal(lowest(dtype.np) if kind == "maximum" else highest(dtype.np), dtype)

    def _sign(self, dtype: DType) -> str:
        plus, zero, minus = (self.constant(v, dtype) for v in (1, 0, -1))
        positive = f"tl.where({{0}} > 0, {plus}, {zero})"
        if dtype.kind == "uint":
            return positive
        signed = f"tl.where({{0}} < 0, {minus}, {positive})"
        return f"tl.where({{0}} != {{0}}, {{0}}, {signed})" if dtype.is_float else signed

    def packed_offset(self, packing: str, index: tuple[str, ...], shape: tuple[str, ...]) -> str:
        raise UnsupportedError(f"weights in the layout {packing} have no CUDA template")


def dim(name: str) -> str:
    """The variable of a dim. The prefix keeps dims apart from whatever a template names."""
    return f"n_{name}"
