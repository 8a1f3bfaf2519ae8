"""Jinja for chat templates, which come with model files and may be hostile.

Jinja's own sandbox keeps a template away from Python. It does not keep one from never ending or from filling the
memory: a loop that writes nothing yields nothing to check between, and `'a' * 10**9` is one operation. So:

- only nodes, filters, tests, methods and functions that chat templates use are there (lists below);
- the template's tree is rewritten so that everything that makes a value, writes text, compares, or takes a step of a
  loop goes through this file, which looks at the clock;
- no value gets large (`max_chars` characters, `MAX_NODES` elements; checked before where an operation multiplies) and
  all values together are paid for out of a budget of bytes. Every single operation is thus short.

Nothing is folded at compile time, where no budget would apply.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, NoneType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from aotc.errors import RequestError

MAX_NODES = 200_000  # elements of a value, those of its elements included
MAX_DEPTH = 64  # of lists in lists
MAX_BITS = 256  # of an integer
MAX_RANGE = 100_000
BYTES_PER_CHAR = 64  # of the budget: all values of a render together, for each character that it may write

_NODES = {
    "Template", "Output", "TemplateData", "For", "If", "Macro", "CallBlock", "FilterBlock", "Assign", "AssignBlock",
    "With", "Scope", "Break", "Continue", "Name", "NSRef", "Const", "Tuple", "List", "Dict", "Pair", "Keyword",
    "CondExpr", "Filter", "Test", "Call", "Getitem", "Getattr", "Slice", "Concat", "Compare", "Operand", "Mul", "Div",
    "FloorDiv", "Add", "Sub", "Mod", "And", "Or", "Not", "Neg", "Pos",
}  # fmt: skip
_FILTERS = {
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "items", "last", "length", "lower",
    "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "title", "trim", "unique",
    "upper",
}  # fmt: skip
_ITERATING = {
    "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "title", "unique",
}  # fmt: skip
_TESTS = TESTS.keys() - {"filter", "test", "callable", "escaped"}
_METHODS: dict[type, set[str]] = {
    str: {
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isnumeric",
        "isspace", "isupper", "join", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rsplit", "rstrip", "split", "startswith", "strip", "title", "upper",
    },
    dict: {"get", "items", "keys", "values"},
    list: {"count", "index"},
    tuple: {"count", "index"},
}  # fmt: skip

_QUADRATIC = {"lstrip", "rfind", "rindex", "rsplit", "rstrip", "strip"}  # in the lengths of text and argument


class Budget:
    """What one render may use: a deadline, the size of a value, and bytes for all values together."""

    def __init__(self, max_chars: int, max_seconds: float) -> None:
        self.max_chars = max_chars
        self._seconds = max_seconds
        self._deadline = time.monotonic() + max_seconds
        self._bytes_left = max_chars * BYTES_PER_CHAR

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise RequestError(f"chat template: not done after {self._seconds:g} s")

    def spend(self, size: int) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise RequestError("chat template: uses too much memory")

    def check_chars(self, count: int) -> None:
        if count > self.max_chars:
            raise RequestError(f"chat template: a text is longer than {self.max_chars} characters")

    def check_plain(self, value: Any) -> None:
        """Refuses what is large, deep, or not made of text, numbers, None, lists and mappings."""
        pending, elements, chars = [(value, 0)], 1, 0
        while pending:
            item, depth = pending.pop()
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, list | tuple | dict):
                elements += len(item) * (2 if isinstance(item, dict) else 1)
                _check(elements <= MAX_NODES, f"a value has over {MAX_NODES} elements")
                _check(depth < MAX_DEPTH, f"a value is nested over {MAX_DEPTH} deep")
                parts = [*item.keys(), *item.values()] if isinstance(item, dict) else item
                pending += [(part, depth + 1) for part in parts]
            elif isinstance(item, int):
                _check(item.bit_length() <= MAX_BITS, f"an integer has over {MAX_BITS} bits")
            else:
                _check(isinstance(item, float | NoneType | Undefined), f"a {type(item).__name__} is no plain value")
            self.check_chars(chars)


_BUDGET: ContextVar[Budget] = ContextVar("chat template budget")


def _check(condition: bool, complaint: str) -> None:
    if not condition:
        raise RequestError(f"chat template: {complaint}")


def _made(value: Any) -> Any:
    """Every new value passes here. Lazy ones (map, select) are paid for element by element."""
    budget = _BUDGET.get()
    budget.tick()
    if isinstance(value, str):
        budget.check_chars(len(value))
        budget.spend(sys.getsizeof(value))
    elif isinstance(value, list | tuple | dict):
        budget.check_plain(value)
        budget.spend(sys.getsizeof(value) + 48 * len(value))
    elif isinstance(value, int):
        budget.check_plain(value)
    return value


def _text(value: Any) -> str:
    """str(value), for plain values only: others have no text, or one of any length."""
    if not isinstance(value, str):
        _BUDGET.get().check_plain(value)
        value = str(value)
    return _made(value)


def _short(*args: Any) -> None:
    for arg in args:
        _check(not isinstance(arg, str) or len(arg) <= 100, "strip or search from the right for a long text")


def _iterable(value: Any) -> Any:
    _check(not hasattr(value, "__len__") or len(value) <= MAX_NODES, f"over {MAX_NODES} steps of a loop")
    return value


def _steps(value: Any) -> Iterator[Any]:
    budget = _BUDGET.get()
    for item in _iterable(value):
        budget.tick()
        yield item


def _list(value: Any) -> list[Any]:
    return _made(list(itertools.islice(_steps(value), MAX_NODES + 1)))


def _join(texts: Iterable[Any], separator: Any = "") -> str:
    pieces, separator = [_text(piece) for piece in _list(texts)], _text(separator)
    _BUDGET.get().check_chars(sum(map(len, pieces)) + len(separator) * max(len(pieces) - 1, 0))
    return _made(separator.join(pieces))


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    text, old, new = _text(text), _text(old), _text(new)
    found = text.count(old) if count < 0 else min(text.count(old), count)
    _BUDGET.get().check_chars(len(text) + found * (len(new) - len(old)))
    return _made(text.replace(old, new, count))


def _split(split: Callable[..., list[str]], separator: str | None = None, maxsplit: int = -1) -> list[str]:
    return _made(split(separator, MAX_NODES if maxsplit < 0 else min(maxsplit, MAX_NODES)))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As in transformers. With `indent` the text can be much larger than the value: counted while it comes."""
    budget = _BUDGET.get()
    budget.check_plain(value)
    _check(indent is None or (isinstance(indent, int) and 0 <= indent <= 16), "tojson: indent is 0 to 16")
    _check(all(len(s) <= 4 for s in separators or ()), "tojson: a separator is over 4 characters long")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return _made(encoder.encode(value))
    pieces, size = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        budget.check_chars(size)
        budget.tick()
    return _made("".join(pieces))


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    _check(not isinstance(value, str) or len(value) <= 100, "int of over 100 characters")
    return _made(FILTERS["int"](value, default, base))


def _range(*args: int) -> range:
    steps = range(*args)
    _check(len(steps) <= MAX_RANGE, f"range of over {MAX_RANGE} steps")
    return steps


def _strftime_now(pattern: str) -> str:
    _check(isinstance(pattern, str) and len(pattern) <= 100, "strftime_now of over 100 characters")
    _check(not re.search(r"%[^a-zA-Z]*\d", pattern), "strftime_now with a width")
    return datetime.now().strftime(pattern)


def _raise_exception(message: Any) -> None:
    raise TemplateError(_text(message))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return _made(dict(*(_iterable(arg) for arg in args), **kwargs))


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    return Namespace(*(_made(arg) for arg in args), **kwargs)


_GLOBALS = {
    "range": _range, "dict": _dict, "namespace": _namespace, "strftime_now": _strftime_now,
    "raise_exception": _raise_exception,
}  # fmt: skip


def _internal(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """A filter for rewritten trees. Taking the context keeps Jinja from calling it while it compiles."""
    return pass_context(lambda _context, value: function(value))


def _guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """One of Jinja's filters or tests, whose arguments are bounded and whose result is paid for."""
    opaque = name in ("defined", "undefined", "sameas", "none")  # look at no content

    @wraps(function)  # keeps Jinja's mark of what it wants passed
    def call(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            if not opaque:
                _check(not isinstance(arg, Namespace | Macro | LoopContext), f"{name} of a {type(arg).__name__}")
            if name in _ITERATING:
                _iterable(arg)
        if name == "trim":
            _short(*args[1:], *kwargs.values())
        return _made(function(*args, **kwargs))

    return call


class _Rewriter(NodeTransformer):
    """Refuses nodes that are not listed and puts the filters of this file where values are made."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        kind = type(node).__name__
        _check(kind in _NODES, f"{kind} is not allowed in chat templates (line {node.lineno})")
        node = self.generic_visit(node)
        if isinstance(node, nodes.Output):
            texts = [
                nodes.Const(n.data, lineno=n.lineno) if isinstance(n, nodes.TemplateData) else n for n in node.nodes
            ]
            node.nodes = [_filtered(n, "aotc text") for n in texts]
        elif isinstance(node, nodes.For):
            _check(not node.recursive, f"recursive loops are not allowed (line {node.lineno})")
            node.iter = _filtered(node.iter, "aotc steps")
        elif isinstance(node, nodes.Concat):
            node.nodes = [_filtered(n, "aotc text") for n in node.nodes]
        makes = isinstance(node, nodes.Concat | nodes.List | nodes.Dict | nodes.Compare)
        makes |= isinstance(node, nodes.Tuple) and node.ctx == "load"
        makes |= isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        return _filtered(node, "aotc made") if makes else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates with transformers' settings, within a `Budget`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0,
            extensions=[LoopControlExtension, _GenerationTag],
        )  # fmt: skip
        self.globals = dict(_GLOBALS)
        self.tests = {name: _guarded(TESTS[name], name) for name in _TESTS}
        self.filters = {name: _guarded(FILTERS[name], name) for name in _FILTERS}
        self.filters |= {
            "string": _text, "safe": _text, "list": _list, "replace": _replace, "tojson": _tojson, "int": _int,
            "join": pass_context(_join_filter), "aotc text": _internal(_text), "aotc steps": _internal(_steps),
            "aotc made": _internal(_made),
        }  # fmt: skip

    def compile_template(self, source: str) -> Any:
        """A `jinja2.Template` of `source`, rewritten."""
        tree = _Rewriter().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: Any, variables: dict[str, Any], budget: Budget) -> str:
        """Raises `RequestError` where the budget ends, and whatever the template raises."""
        previous = _BUDGET.set(budget)
        try:
            pieces, size = [], 0
            for piece in template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                budget.check_chars(size)
            return "".join(pieces)
        finally:
            _BUDGET.reset(previous)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, LoopContext | Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"{type(obj).__name__}.{attribute} is not allowed in chat templates")

    def getattr(self, obj: Any, attribute: str) -> Any:
        _BUDGET.get().tick()
        if isinstance(obj, dict) and attribute not in _METHODS[dict]:  # a key that is also a method's name
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _BUDGET.get().tick()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        budget.tick()
        if operator == "%":
            _check(not isinstance(left, str), "formatting with % is not allowed, use ~ or +")
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    budget.check_chars(len(many) * times)
                    _check(isinstance(many, str) or len(many) * times <= MAX_NODES, "a list is repeated too often")
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        _BUDGET.get().tick()
        if isinstance(__obj, BuiltinMethodType):
            given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return __self._call_method(__obj, args, given)
        allowed = isinstance(__obj, Macro | Undefined) or __obj in _GLOBALS.values()
        if not allowed and not isinstance(getattr(__obj, "__self__", None), LoopContext):
            raise SecurityError(f"a {type(__obj).__name__} cannot be called in chat templates")
        return __context.call(__obj, *args, **kwargs)

    def _call_method(self, method: BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, name = method.__self__, method.__name__
        if not self.is_safe_attribute(owner, name, method):
            raise SecurityError(f"{type(owner).__name__}.{name} cannot be called in chat templates")
        if name == "join":
            return _join(*args, separator=owner)
        if name == "replace":
            return _replace(owner, *args, **kwargs)
        if name in _QUADRATIC:
            _short(*args, *kwargs.values())
        if name in ("split", "rsplit"):
            return _split(method, *args, **kwargs)
        return _made(method(*args, **kwargs))


def _join_filter(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), _iterable(value))
    return _join(value, d)
