"""Attention backends: one interface, chosen by name when the engine is loaded."""

from __future__ import annotations

from engine.attention.base import AttentionBackend, AttentionBatch, AttentionStep, KVLayout
from engine.attention.choice import backend_names, log_choice, make_backend, supports_fp8_cache

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionStep",
    "KVLayout",
    "backend_names",
    "supports_fp8_cache",
    "make_backend",
    "log_choice",
]
