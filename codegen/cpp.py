"""How loop nests are written in C++, for CPUs and for kernels in CUDA C++."""

from __future__ import annotations

import math
from typing import Any

from aotc.errors import UnsupportedError
from aotc.ir.dtypes import DType
from aotc.ir.graph import Node
from aotc.ir.sizes import FloorDiv, Size

STORAGE = {
    "f64": "double", "f32": "float", "f16": "f16", "bf16": "bf16", "i64": "int64_t", "i32": "int32_t",
    "i16": "int16_t", "i8": "int8_t", "u64": "uint64_t", "u32": "uint32_t", "u16": "uint16_t", "u8": "uint8_t",
    "bool": "uint8_t",
}  # fmt: skip
"""The C++ type of an element in memory; f16 and bf16 are structs of `dtypes.h`."""

_FUNCTIONS = {
    "exponential": "fast_exp", "exponential_minus_one": "expm1", "log": "log", "log_plus_one": "log1p", "sqrt": "sqrt",
    "cbrt": "cbrt", "erf": "fast_erf", "sine": "sin", "cosine": "cos", "tan": "tan", "tanh": "tanh", "asin": "asin",
    "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh", "asinh": "asinh", "acosh": "acosh",
    "atanh": "atanh", "floor": "floor", "ceil": "ceil", "round_nearest_even": "nearbyint", "trunc": "trunc",
    "power": "pow", "atan2": "atan2",
}  # fmt: skip
_OPERATORS = {"add": "+", "subtract": "-", "multiply": "*", "and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}


def register(dtype: DType) -> str:
    """The C++ type that a value is computed in."""
    if dtype.name in ("f16", "bf16"):
        return "float"
    return "bool" if dtype.name == "bool" else STORAGE[dtype.name]


class CppSyntax:
    """Implements `codegen.loops.Syntax`."""

    def size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        return "(" + " + ".join(self._monomial(atoms, coef) for atoms, coef in size.terms) + ")"

    def dim(self, name: str) -> str:
        """The variable of a dim."""
        return name

    def _monomial(self, atoms: tuple[Any, ...], coef: int) -> str:
        factors = [f"({self.size(a.num)} / {a.den})" if isinstance(a, FloorDiv) else self.dim(a) for a in atoms]
        return " * ".join(factors + ([str(coef)] if coef != 1 or not factors else []))

    def declare(self, dtype: DType, name: str, expression: str) -> str:
        return f"const {register(dtype)} {name} = {expression};"

    def load(self, pointer: str, dtype: DType, offset: str) -> str:
        if dtype.name in ("f16", "bf16"):
            return f"to_f32({pointer}[{offset}])"
        return f"{pointer}[{offset}]" + (" != 0" if dtype.name == "bool" else "")

    def store(self, pointer: str, dtype: DType, offset: str, value: str) -> str:
        """The statement that writes a scalar."""
        return f"{pointer}[{offset}] = {self.stored(dtype, value)};"

    def stored(self, dtype: DType, value: str) -> str:
        if dtype.name in ("f16", "bf16"):
            return f"from_f32<{STORAGE[dtype.name]}>({value})"
        return value

    def constant(self, value: Any, dtype: DType) -> str:
        if dtype.name == "bool":
            return "true" if value else "false"
        if not dtype.is_float:
            return f"({STORAGE[dtype.name]}){int(value)}LL" if int(value) != -(2**63) else "INT64_MIN"
        suffix = "" if dtype.name == "f64" else "f"
        if math.isnan(value) or math.isinf(value):
            sign = "-" if value < 0 else ""
            return f"({register(dtype)})({sign}{'NAN' if math.isnan(value) else 'INFINITY'})"
        return (
            f"{float(value)!r}{suffix}"
            if "e" in repr(float(value)) or "." in repr(float(value))
            else f"{value}.0{suffix}"
        )

    def convert(self, expression: str, source: DType, target: DType) -> str:
        if source == target or register(source) == register(target):
            return expression
        if target.name == "bool":
            return f"({expression} != 0)"
        if source.is_float and target.is_int:
            return f"saturate<{register(target)}>({expression})"
        return f"({register(target)})({expression})"

    def select(self, condition: str, yes: str, no: str) -> str:
        return f"(({condition}) ? {yes} : {no})"

    def call(self, op: str, dtype: DType, args: list[str], attrs: Any) -> str:
        """`attrs` is the node for ops of the graph, None for the folds of reductions."""
        kind = register(dtype)
        if op.startswith("start_"):
            return {
                "sum": "0", "product": "1", "maximum": f"lowest<{kind}>()", "minimum": f"highest<{kind}>()",
                "and": "true", "or": "false",
            }[op[6:]]  # fmt: skip
        if op.startswith("fold_"):
            op = {"sum": "add", "product": "multiply"}.get(op[5:], op[5:])
        if op in ("maximum", "minimum"):
            return f"{op}({args[0]}, {args[1]})"
        if op in _OPERATORS:
            wrapped = f"{args[0]} {_OPERATORS[op]} {args[1]}"
            return f"({kind})({wrapped})" if dtype.is_int else wrapped
        if op in _FUNCTIONS:
            suffix = "f" if kind == "float" and op not in ("exponential", "erf") else ""
            return f"{_FUNCTIONS[op]}{suffix}({', '.join(args)})"
        return self._special(op, dtype, args, attrs)

    def _special(self, op: str, dtype: DType, args: list[str], node: Node) -> str:
        kind = register(dtype)
        if op == "compare":
            return f"{args[0]} {_COMPARISONS[node.attrs.direction]} {args[1]}"
        if op == "convert":
            return self.convert(args[0], node.inputs[0].type.dtype, dtype)
        if op == "divide":
            return f"{args[0]} / {args[1]}" if dtype.is_float else f"divide<{kind}>({args[0]}, {args[1]})"
        if op == "remainder":
            return f"fmod({args[0]}, {args[1]})" if dtype.is_float else f"remainder<{kind}>({args[0]}, {args[1]})"
        templates = {
            "select": "{0} ? {1} : {2}", "negate": f"({kind})(-{{0}})", "abs": f"absolute<{kind}>({{0}})",
            "sign": f"({kind})(({{0}} > 0) - ({{0}} < 0))", "rsqrt": "1 / sqrt({0})", "logistic": "1 / (1 + fast_exp(-{0}))",
            "not": "!{0}" if dtype.name == "bool" else f"({kind})~{{0}}",
            "shift_left": f"({kind})({{0}} << {{1}})", "shift_right": f"({kind})({{0}} >> {{1}})",
        }  # fmt: skip
        if op not in templates:
            raise UnsupportedError(f"op {op} has no C++ form")
        return templates[op].format(*args)

    def packed_offset(self, packing: str, index: tuple[str, ...], shape: tuple[str, ...]) -> str:
        """Offset of element (n, k) in the matmul layouts of `aotc.ir.packing`."""
        (n, k), (_, depth) = index, shape
        if packing == "n16k1":
            return f"(({n}) / 16 * {depth} + {k}) * 16 + ({n}) % 16"
        assert packing == "n16k2", packing
        return f"(({n}) / 16 * (({depth} + 1) / 2) + ({k}) / 2) * 32 + ({n}) % 16 * 2 + ({k}) % 2"


def lead_index(flat: str, lead: tuple[Size, ...], names: tuple[str, ...], syntax: CppSyntax) -> list[tuple[str, str]]:
    """The leading index of a flat row: (name, expression) of each axis."""
    found, rest = [], f"(int64_t){flat}"
    for name, size in reversed(list(zip(names, lead, strict=True))):
        found.append((name, rest if name == names[0] else f"{rest} % {syntax.size(size)}"))
        rest = f"{rest} / {syntax.size(size)}"
    return found
