"""One node of a model, as its operator's row sees it: attributes, version, and parameters that must be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.onnx.known import Known, Tensor, is_known
from aotc.frontend.onnx.tensors import plain
from aotc.ir.sizes import Size

_MOST_COUNTED = 1 << 22


class UnknownParameterError(UnsupportedError):
    """A shape, axis or count comes from `tensor`, whose elements are known at run time only."""

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class Call:
    """A node, its inputs (None: left out), and the opset that gives it meaning."""

    def __init__(
        self, proto: NodeProto, opset: int, inputs: Sequence[Tensor | None], attributes: Mapping[str, AttributeProto]
    ) -> None:
        self.proto, self.opset, self.inputs, self.attributes = proto, opset, inputs, attributes
        self.outputs = len(proto.output)

    @property
    def label(self) -> str:
        """The node's name, or that of its first output."""
        return self.proto.name or next((o for o in self.proto.output if o), "")

    def __str__(self) -> str:
        domain = f", domain {plain(self.proto.domain)}" if self.proto.domain not in ("", "ai.onnx") else ""
        return f"node '{plain(self.label)}' ({plain(self.proto.op_type)}, opset {self.opset}{domain})"

    def require_inputs(self) -> None:
        """Raises SourceError where the operator's definition asks for more inputs, or for fewer."""
        if not onnx.defs.has(self.proto.op_type) or not self.opset:
            return
        try:
            schema = onnx.defs.get_schema(self.proto.op_type, self.opset)
        except onnx.defs.SchemaError:  # younger than the opset: its row refuses it or takes it
            return
        if len(self.inputs) > schema.max_input:
            raise SourceError(f"{self} has {len(self.inputs)} inputs, and takes {schema.max_input} at most")
        options = onnx.defs.OpSchema.FormalParameterOption
        for i in range(max(len(self.inputs), schema.min_input)):
            parameter = schema.inputs[min(i, len(schema.inputs) - 1)]
            given = i < len(self.inputs) and self.inputs[i] is not None
            if not given and parameter.option != options.Optional:
                raise SourceError(f"{self} lacks its input {parameter.name}")

    def refusal(self, message: str) -> UnsupportedError:
        """An error that names the node."""
        return UnsupportedError(f"{self}: {message}")

    def misfit(self, message: str, *sizes: Size) -> SourceError | UnsupportedError:
        """An error for sizes that do not fit: a fault of the file, or, where some are dims, a limit of ours."""
        if all(isinstance(s, int) for s in sizes):
            return SourceError(f"{self}: {message}")
        return self.refusal(message if "static" in message else f"{message}: make the dims in them static")

    def counted(self, count: float) -> int:
        """A number of elements that are computed while compiling. Raises UnsupportedError for more than memory is for."""
        if not 0 <= count <= _MOST_COUNTED:
            raise self.refusal(f"needs {count} elements when compiling, and aotc makes {_MOST_COUNTED} at most")
        return int(count)

    def wants(self, output: int) -> bool:
        """True where the model uses that output."""
        return output < len(self.proto.output) and bool(self.proto.output[output])

    def has(self, name: str) -> bool:
        """True where the node has the attribute."""
        return name in self.attributes

    def _attribute(self, name: str, kind: int, default: object) -> AttributeProto | None:
        attribute = self.attributes.get(name)
        if attribute is None:
            if default is _REQUIRED:
                raise SourceError(f"{self} has no attribute {name}")
            return None
        if attribute.type != kind:
            raise SourceError(f"{self}: the attribute {name} has the wrong type")
        return attribute

    def attr_int(self, name: str, default: int | None = None) -> int:
        """An integer attribute; required where no default is given."""
        found = self._attribute(name, AttributeProto.INT, _REQUIRED if default is None else default)
        return default if found is None else found.i  # type: ignore[return-value]

    def attr_float(self, name: str, default: float | None = None) -> float:
        """A float attribute; required where no default is given."""
        found = self._attribute(name, AttributeProto.FLOAT, _REQUIRED if default is None else default)
        return default if found is None else found.f  # type: ignore[return-value]

    def attr_string(self, name: str, default: str | None = None) -> str:
        """A string attribute; required where no default is given."""
        found = self._attribute(name, AttributeProto.STRING, _REQUIRED if default is None else default)
        return default if found is None else found.s.decode("utf-8", "replace")  # type: ignore[return-value]

    def attr_ints(self, name: str) -> list[int] | None:
        """A list of integers, or None where the node has none."""
        found = self._attribute(name, AttributeProto.INTS, None)
        return None if found is None else list(found.ints)

    def attr_floats(self, name: str) -> list[float] | None:
        found = self._attribute(name, AttributeProto.FLOATS, None)
        return None if found is None else list(found.floats)

    def attr_strings(self, name: str) -> list[str] | None:
        found = self._attribute(name, AttributeProto.STRINGS, None)
        return None if found is None else [s.decode("utf-8", "replace") for s in found.strings]

    def attr_tensor(self, name: str) -> TensorProto | None:
        found = self._attribute(name, AttributeProto.TENSOR, None)
        return None if found is None else found.t

    def attr_graph(self, name: str) -> GraphProto:
        """A graph attribute, required."""
        found = self._attribute(name, AttributeProto.GRAPH, _REQUIRED)
        assert found is not None
        return found.g

    def axis(self, axis: int, rank: int) -> int:
        """An axis from the front. Raises SourceError where the tensor has no such axis."""
        if not -rank <= axis < rank:
            raise SourceError(f"{self}: axis {axis} of a tensor with {rank} axes")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        """Axes from the front, in the order given."""
        found = tuple(self.axis(a, rank) for a in axes)
        if len(set(found)) != len(found):
            raise SourceError(f"{self}: axes {list(axes)[:32]} repeat")
        return found

    def array(self, tensor: Tensor) -> np.ndarray:
        """The elements of a parameter that must be known. Raises UnknownParameterError."""
        if is_known(tensor):
            return tensor.array  # type: ignore[union-attr]
        raise self._unknown(tensor)

    def sizes(self, tensor: Tensor) -> list[Size]:
        """The elements of an integer parameter, flat, as sizes. Raises UnknownParameterError."""
        if not isinstance(tensor, Known):
            raise self._unknown(tensor)
        return [e if tensor.symbolic and not isinstance(e, int | np.integer) else int(e) for e in tensor.array.flat]

    def integers(self, tensor: Tensor) -> list[int]:
        """The elements of an integer parameter, flat. Raises UnknownParameterError."""
        return [int(e) for e in self.array(tensor).flat]

    def _unknown(self, tensor: Tensor) -> UnknownParameterError:
        name = next((n for n, x in zip(self.proto.input, self.inputs, strict=False) if x is tensor), "")
        if isinstance(tensor, Known):
            message = (
                f"{self}: its parameter '{plain(name)}' depends on a dynamic dim: make that dim static, for example --dim N=4"
            )
        else:
            message = (
                f"{self}: its parameter '{plain(name)}' is computed at run time, and shapes must be known when compiling: "
                f"make it an initialiser"
            )
        return UnknownParameterError(message, name)


class _Required:
    """The default of an attribute that has none."""


_REQUIRED = _Required()
