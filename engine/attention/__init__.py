"""Attention backends: one interface, chosen by name when the engine is loaded."""

from __future__ import annotations

from engine.attention.base import AttentionBackend, AttentionBatch, AttentionStep, KVLayout
from engine.attention.choice import (
    AttentionChoice,
    backend_names,
    choose_attention,
    default_block_size,
    log_choice,
    make_backend,
    supports_fp8_cache,
)

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionChoice",
    "AttentionStep",
    "KVLayout",
    "backend_names",
    "choose_attention",
    "default_block_size",
    "supports_fp8_cache",
    "make_backend",
    "log_choice",
]
