"""Attention backends: one interface, chosen by name when the engine is loaded."""

from __future__ import annotations

from engine.attention.base import AttentionBackend, AttentionBatch, AttentionStep, KVLayout
from engine.attention.choice import backend_names, keeps_fp8, make_backend, say_choice

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionStep",
    "KVLayout",
    "backend_names",
    "keeps_fp8",
    "make_backend",
    "say_choice",
]
