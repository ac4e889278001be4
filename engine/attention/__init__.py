"""Attention backends: one interface, chosen by name when the engine is loaded."""

from __future__ import annotations

from engine.attention.base import AttentionBackend, AttentionBatch, AttentionStep, KVLayout
from engine.attention.choice import backend_names, keeps_fp8, log_choice, make_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionStep",
    "KVLayout",
    "backend_names",
    "keeps_fp8",
    "make_backend",
    "log_choice",
]
