"""Checkpoints of compressed-tensors (what LLM Compressor writes): fp8, W8A8, and 4 or 8 bits packed in words.

`config_groups` say which modules are quantized how: by exact name, by regular expression ("re:"), or by class. Packed
weights lie along the input, lowest bits first, as q + 2^(bits - 1); zeros likewise, but along the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.errors import CorruptWeights, UnsupportedModel
from engine.quant.formats.base import FLOATS, StoredTensors, affine, column_order, part, part_shape, unpacked
from engine.quant.formats.fp8 import matrix_shape, single, spread_scale
from engine.quant.formats.settings import FormatSettings, GroupSize, Names, Patterns, Text, read_settings
from engine.quant.weight import Activations, QWeight

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
_Bits = Annotated[int, Field(strict=True, ge=1, le=16)]
_Size = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]


class Arguments(FormatSettings):
    """How one kind of tensor is quantized."""

    num_bits: _Bits = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: GroupSize | None = None
    strategy: Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"] | None = None
    block_structure: tuple[_Size, _Size] | None = None
    dynamic: bool | Literal["local"] = False


class _Scheme(FormatSettings):
    targets: Names
    weights: Arguments | None = None
    input_activations: Arguments | None = None
    format: Text | None = None


class _CompressedTensors(FormatSettings):
    config_groups: Annotated[dict[Text, _Scheme], Field(max_length=10_000)]
    format: Text = "dense"
    ignore: Names | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class CompressedTensors:
    """Reads modules that hold `weight_packed` or `weight_scale`."""

    markers = (".weight_packed", ".weight_scale")
    parts = (
        ".weight", ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx",
        ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point",
    )  # fmt: skip

    def __init__(self, stored: StoredTensors, values: Mapping[str, Any]) -> None:
        self._stored = stored
        settings = read_settings(_CompressedTensors, values)
        groups = settings.config_groups
        formats = {"format": settings.format} | {f"config_groups.{name}.format": g.format for name, g in groups.items()}
        for key, found in formats.items():
            if found is not None and found not in _FORMATS:
                known = ", ".join(_FORMATS)
                raise UnsupportedModel(f"quantization_config.{key} is {found[:40]!r}; what can be read is {known}")
        if (sparsity := (settings.sparsity_config or {}).get("format", "dense")) != "dense":
            raise UnsupportedModel(f"quantization_config.sparsity_config.format is {str(sparsity)[:40]!r}, not 'dense'")
        if (settings.transform_config or {}).get("config_groups"):
            raise UnsupportedModel("quantization_config.transform_config asks for rotated inputs: no kernel makes them")
        self._ignored = Patterns.prefixed("quantization_config.ignore", settings.ignore or [])
        self._ignored_names = frozenset(settings.ignore or [])
        self._targets = {target: group for group in groups.values() for target in group.targets}
        self._expressions = [
            (Patterns.prefixed("quantization_config.config_groups", [target]), self._targets[target])
            for target in sorted(self._targets)
            if target.startswith("re:")
        ]

    def shape(self, module: str) -> tuple[int, int]:
        if f"{module}.weight_packed" not in self._stored.names:
            return matrix_shape(self._stored, f"{module}.weight")
        name = f"{module}.weight_shape"
        sizes = part(self._stored, name, [torch.int64, torch.int32], (2,)).tolist()
        rows, words = matrix_shape(self._stored, f"{module}.weight_packed")
        bits = self._bits(module, self._arguments(module))
        if sizes[0] != rows or sizes[1] < 1 or -(-sizes[1] * bits // 32) != words:
            raise CorruptWeights(f"tensor {name} says {sizes}, but {module}.weight_packed is {[rows, words]}")
        return rows, sizes[1]

    def weight(self, module: str) -> QWeight:
        arguments = self._arguments(module)
        activations = self._activations(module)
        if f"{module}.weight_packed" in self._stored.names:
            return self._packed(module, arguments, activations)
        return self._plain(module, arguments, activations)

    def _packed(self, module: str, arguments: Arguments, activations: Activations | None) -> QWeight:
        stored, bits, (n, k) = self._stored, self._bits(module, arguments), self.shape(module)
        codes = unpacked(part(stored, f"{module}.weight_packed", [torch.int32]), bits)[:, :k]
        name = f"{module}.weight_scale"
        group, scale = spread_scale((n, k), part(stored, name, FLOATS), name, group=_group(module, arguments, k))
        zero = None
        if (name := f"{module}.weight_zero_point") in stored.names:
            zero = self._zero(name, scale.shape, bits)
        elif not arguments.symmetric:
            raise CorruptWeights(f"tensor {name} is missing, but quantization_config says that {module} is asymmetric")
        order = None
        if (name := f"{module}.weight_g_idx") in stored.names:
            groups = part(stored, name, [torch.int32, torch.int64], (k,))
            if int(groups[0]) != -1:  # none was made
                order = column_order(groups, name, group, scale.shape[1])
        if order is not None:
            codes = codes.index_select(1, order)
        return affine(codes, bits, scale, zero, group, order, activations)

    def _zero(self, name: str, shape: torch.Size, bits: int) -> Tensor:
        """The zeros as the codes are stored, [n, groups]: packed along n, or one by one as int8."""
        n, count = shape
        if part_shape(self._stored, name) == (-(-n * bits // 32), count):
            zero = part(self._stored, name, [torch.int32, torch.int8])
            if zero.dtype == torch.int32:
                return unpacked(zero.t(), bits)[:, :n].t()
        zero = part(self._stored, name, [torch.int8]).to(torch.int32) + (1 << (bits - 1))
        if zero.numel() == 1:
            return zero.reshape(1, 1).expand(shape)
        return part(self._stored, name, [torch.int8], shape).to(torch.int32) + (1 << (bits - 1))

    def _plain(self, module: str, arguments: Arguments, activations: Activations | None) -> QWeight:
        stored, (n, k) = self._stored, self.shape(module)
        dtype = torch.int8 if arguments.type == "int" else torch.float8_e4m3fn
        codes = part(stored, f"{module}.weight", [dtype])
        name = f"{module}.weight_scale"
        scale = part(stored, name, FLOATS)
        block = arguments.block_structure if arguments.strategy == "block" else None
        group, scale = spread_scale((n, k), scale, name, block, _group(module, arguments, k))
        zero = None
        if (name := f"{module}.weight_zero_point") in stored.names:
            zero = spread_scale((n, k), part(stored, name, [torch.int8, dtype]).float(), name, block, group)[1]
            zero = zero if bool(zero.any()) else None
        elif not arguments.symmetric:
            raise CorruptWeights(f"tensor {name} is missing, but quantization_config says that {module} is asymmetric")
        low = None if zero is None else scale.float() * -zero
        form: Literal["int8", "fp8"] = "int8" if arguments.type == "int" else "fp8"
        return QWeight(form, codes, n, k, group, scale, low, activations=activations)

    def _activations(self, module: str) -> Activations | None:
        """What the inputs of a module are quantized to; None: nothing, or what no kernel does (4 bits, asymmetric)."""
        inputs = self._scheme(module).input_activations
        if inputs is None or inputs.num_bits != 8 or not inputs.symmetric:
            return None
        form: Literal["int8", "fp8"] = "int8" if inputs.type == "int" else "fp8"
        if inputs.dynamic:
            return Activations(form)
        name = f"{module}.input_scale"
        return Activations(form, single(part(self._stored, name, FLOATS), name))

    def _arguments(self, module: str) -> Arguments:
        weights = self._scheme(module).weights
        if weights is None:
            raise CorruptWeights(f"{module} holds a quantized weight, but no weights of its group are, by its config")
        return weights

    def _bits(self, module: str, arguments: Arguments) -> int:
        if arguments.type != "int" or arguments.num_bits not in (4, 8):
            raise UnsupportedModel(
                f"quantization_config has num_bits {arguments.num_bits} of type {arguments.type!r} for the packed "
                f"weight of {module}; int of 4 and 8 bits can be read"
            )
        return arguments.num_bits

    def _scheme(self, module: str) -> _Scheme:
        """Exact names before expressions before classes, as the library has it."""
        kind = "Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear"
        if self._ignored.match(module) or kind in self._ignored_names:
            raise CorruptWeights(f"{module} holds a quantized weight, but quantization_config.ignore names it")
        if (found := self._targets.get(module)) is not None:
            return found
        for patterns, scheme in self._expressions:
            if patterns.match(module):
                return scheme
        if (found := self._targets.get(kind)) is not None:
            return found
        raise CorruptWeights(f"{module} holds a quantized weight, but no target of quantization_config matches it")


def _group(module: str, arguments: Arguments, k: int) -> int | None:
    """Columns that share a scale; None: all.

    Raises:
        UnsupportedModel: they don't divide the weight, or there is no size.
    """
    if arguments.strategy not in ("group", "tensor_group") and not (arguments.group_size or 0) > 0:
        return None
    size = arguments.group_size
    if size is None or size < 1:
        raise UnsupportedModel(f"quantization_config has group_size {size} for {module}, but must have a number")
    if k % size:
        raise UnsupportedModel(f"quantization_config has group_size {size} for {module}, which has {k} columns")
    return size
