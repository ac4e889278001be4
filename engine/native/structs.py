"""csrc/api.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch


class ElementKind(IntEnum):
    """Element kinds. I8 weights multiply quantized activations, those below it plain ones: they are unpacked as they
    are multiplied, W8 scaled afterwards, the others by groups before."""

    F32 = 0
    BF16 = 1
    I8 = 2
    W8 = 3
    Q4 = 4
    Q8 = 5
    E4M3 = 6


PARTS = ("norm", "product", "rotate", "attention", "quantize", "head", "route", "adapters")
"""Categories of time, in the order of the kernels' counters."""

KIND_OF = {torch.float32: ElementKind.F32, torch.bfloat16: ElementKind.BF16}
"""Kinds that activations can have."""


class FactorForm(IntEnum):
    """Storage forms of a small weight's factors."""

    NONE = 0
    F16 = 1
    BF16 = 2
    F32 = 3
    TWO_I8 = 4
    TWO_U8 = 5


class FactorsStruct(ctypes.Structure):
    _fields_ = (("form", c_int32), ("per", c_int32), ("values", c_void_p), ("steps", c_void_p))


class LinearStruct(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32), ("n", c_int32), ("k", c_int32), ("kw", c_int32),
        ("packed", c_void_p), ("scale", c_void_p), ("offset", c_void_p), ("bias", c_void_p),
        ("scales", FactorsStruct), ("lows", FactorsStruct), ("order", c_void_p),
        ("group", c_int32), ("unused", c_int32),
    )  # fmt: skip


class Gate(IntEnum):
    """The activation of a gated MLP, by its name as an `Activation`, or of one without a gate."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWIGLU = 2
    PLAIN_SILU = 3
    PLAIN_GELU_TANH = 4
    PLAIN_RELU2 = 5


class Scoring(IntEnum):
    """What a router's logits become."""

    SOFTMAX = 0
    SIGMOID = 1


class ExpertsStruct(ctypes.Structure):
    _fields_ = (
        ("num_experts", c_int32), ("top_k", c_int32), ("scoring", c_int32), ("renormalize", c_int32),
        ("num_groups", c_int32), ("top_groups", c_int32), ("shared", c_int32), ("shared_gate", c_int32),
        ("scale", c_float), ("scales_inputs", c_int32), ("group_scores", c_int32), ("routed", c_int32),
        ("gate_up", POINTER(LinearStruct)), ("down", POINTER(LinearStruct)), ("router", LinearStruct),
        ("correction", c_void_p), ("counts", c_void_p),
    )  # fmt: skip


class LowRankStruct(ctypes.Structure):
    _fields_ = (("a", LinearStruct), ("b", c_void_p), ("ranks", c_void_p))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("qkv", LinearStruct), ("output", LinearStruct), ("gate_up", LinearStruct), ("down", LinearStruct),
        ("experts", POINTER(ExpertsStruct)),
        ("input_norm", c_void_p), ("mlp_norm", c_void_p), ("qk_norm", c_void_p),
        ("output_norm", c_void_p), ("down_norm", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("key_scales", c_void_p), ("value_scales", c_void_p),
        ("sinks", c_void_p), ("adapters", c_void_p),
        ("group", c_int32), ("rope", c_int32),
    )  # fmt: skip


class CacheShape(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32), ("block_size", c_int32), ("columns", c_int32), ("kv_heads", c_int32),
        ("head_dim", c_int32), ("value_dim", c_int32), ("value_stride", c_int32),
    )  # fmt: skip


class DecoderShape(ctypes.Structure):
    _fields_ = (
        ("activations", c_int32), ("num_layers", c_int32), ("hidden", c_int32), ("intermediate", c_int32),
        ("heads", c_int32), ("gate", c_int32), ("layer_norm", c_int32), ("parallel", c_int32),
        ("joint_qk_norm", c_int32), ("late_qk_norm", c_int32),
        ("eps", c_float), ("attention_scale", c_float), ("embedding_scale", c_float), ("residual_scale", c_float),
        ("cache", CacheShape),
        ("table", c_void_p),
    )  # fmt: skip


class GroupInput(ctypes.Structure):
    """One cache group of a step, from which its tasks are made."""

    _fields_ = (
        ("starts", c_void_p), ("counts", c_void_p), ("tables", c_void_p), ("slots", c_void_p),
        ("num_sequences", c_int32), ("num_decodes", c_int32), ("table_width", c_int32), ("window", c_int32),
    )  # fmt: skip


class AttentionGroup(ctypes.Structure):
    _fields_ = (
        ("tables", c_void_p), ("slots", c_void_p), ("table_width", c_int32), ("window", c_int32),
        ("num_first", c_int32), ("num_second", c_int32), ("num_merges", c_int32), ("num_rows", c_int32),
        ("first", c_void_p), ("second", c_void_p), ("merges", c_void_p),
        ("row_token", c_void_p), ("row_position", c_void_p),
    )  # fmt: skip


class StepStruct(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int32), ("num_groups", c_int32), ("token_ids", c_void_p), ("groups", c_void_p),
        ("positions", c_void_p), ("rotations", POINTER(c_void_p)), ("query_factors", POINTER(c_void_p)),
        ("hidden", c_void_p),
        ("wanted", c_void_p), ("num_wanted", c_int32),
        ("num_states", c_int32), ("state_layers", c_void_p), ("states", c_void_p), ("adapters", c_void_p),
    )  # fmt: skip


class WorkspaceStruct(ctypes.Structure):
    _fields_ = (
        ("hidden_stride", c_int64), ("qkv_stride", c_int64), ("attended_stride", c_int64), ("gated_stride", c_int64),
        ("input_words", c_int64), ("scale_stride", c_int64),
        ("residual", c_void_p), ("update", c_void_p), ("qkv", c_void_p), ("row_scale", c_void_p),
        ("state", c_void_p), ("partial", c_void_p),
        ("input", c_void_p), ("attended", c_void_p), ("gated", c_void_p), ("query", c_void_p),
        ("thread_space", c_void_p), ("thread_bytes", c_int64),
        ("logits_stride", c_int64), ("logits", c_void_p), ("factors", c_void_p), ("expert_scale", c_void_p),
        ("expert_output", c_void_p), ("expert_input", c_void_p), ("expert_gated", c_void_p), ("chosen", c_void_p),
        ("sorted", c_void_p), ("expert_starts", c_void_p), ("runs", c_void_p),
        ("low_rank_stride", c_int64), ("delta_stride", c_int64), ("plain_words", c_int64),
        ("low_rank", c_void_p), ("delta", c_void_p), ("plain", c_void_p),
        ("spent", c_void_p),
    )  # fmt: skip


class RecurrenceStruct(ctypes.Structure):
    _fields_ = (
        ("key_heads", c_int32), ("value_heads", c_int32), ("key_dim", c_int32), ("value_dim", c_int32),
        ("kernel_size", c_int32), ("channels", c_int32), ("query_at", c_int32), ("key_at", c_int32),
        ("value_at", c_int32), ("unit", c_int32), ("corrects", c_int32), ("rates", c_int32),
        ("least_step", c_float), ("most_step", c_float), ("decay_scale", c_void_p),
        ("conv", c_void_p), ("bias", c_void_p), ("skip", c_void_p),
    )  # fmt: skip


class StateScanStruct(ctypes.Structure):
    _fields_ = (
        ("segments", c_int64), ("first", c_void_p), ("count", c_void_p), ("read", c_void_p), ("write", c_void_p),
        ("x", c_void_p), ("gates", c_void_p), ("inputs", c_void_p), ("matrices", c_void_p), ("history", c_void_p),
        ("out", c_void_p), ("thread_space", c_void_p), ("thread_bytes", c_int64),
    )  # fmt: skip


class GatedNormStruct(ctypes.Structure):
    _fields_ = (
        ("features", c_int32), ("group", c_int32), ("gates_first", c_int32), ("eps", c_float), ("weight", c_void_p),
    )  # fmt: skip


ABI = sum(
    size * ctypes.sizeof(struct)
    for size, struct in (
        (1, LayerStruct),
        (1000, WorkspaceStruct),
        (1_000_000, AttentionGroup),
        (1_000_000_000, ExpertsStruct),
    )
)
"""What `tm_abi` must return: the sizes agree, or a field is missing on one side."""
