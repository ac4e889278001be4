"""Loads a rank's shard of a model; used by the leader and by the other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoints.stacked import UnstackedWeights
from engine.config import Quantize
from engine.errors import OutOfMemory, UnsupportedModel
from engine.models.decoder_builder import TorchBuilder, build_decoder
from engine.models.load import open_model
from engine.parallel.decoder import RankBuilder, RankDecoder
from engine.parallel.expert_placement import balanced_placement, check_expert_counts
from engine.parallel.process_group import RankGroups
from engine.parallel.sharding import Share
from engine.parallel.weight_slicing import ShareOfWeights


def load_share(
    path: Path,
    dtype: torch.dtype,
    groups: RankGroups,
    *,
    quantize: Quantize,
    max_positions: int | None,
    expert_parallel: bool,
    expert_counts: NDArray[np.int64] | None,
) -> RankDecoder:
    """Load this rank's shard. Quantizing at load rounds each shard separately.

    Args:
        expert_parallel: each rank has whole experts.  expert_counts: [layers, experts], to place them by.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptWeights, OutOfMemory: as `load_model`; and where the model can't be
            sharded over so many ranks.
    """
    opened = open_model(path)
    if opened.decoder is None:
        raise UnsupportedModel(
            f"{path}: {opened.config.model_type} models are computed by transformers' code, which can't be shared by "
            "several devices; leave --tensor-parallel and --pipeline-parallel out"
        )
    if expert_parallel and opened.decoder.experts is None:
        raise UnsupportedModel(
            f"{path}: expert_parallel is set, but {opened.config.model_type} models have no experts; "
            "leave --expert-parallel out"
        )
    share = Share(
        opened.decoder, groups.stage.rank, groups.stage.size, expert_parallel,
        stage=groups.stage_index, num_stages=groups.num_stages,
    )  # fmt: skip
    if expert_counts is not None and opened.decoder.experts is not None:
        check_expert_counts(expert_counts, opened.decoder.num_layers, opened.decoder.experts.num_experts)
        placement = tuple(balanced_placement(counts.tolist(), share.size) for counts in expert_counts)
        share = replace(share, placement=placement)
    builder = RankBuilder(share, groups, TorchBuilder(quantize))
    apart = replace(opened.decoder, fused_qkv=False, fused_gate_up=False)
    stacked = {"qkv_proj": apart.qkv_rows, "gate_up_proj": apart.gate_up_rows(apart.intermediate_size)}
    try:
        model = build_decoder(
            share.local,
            ShareOfWeights(UnstackedWeights(opened.weights, stacked), share),
            dtype=dtype,
            device=groups.device,
            positions=max_positions,
            builder=builder,
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(f"a share of {path} does not fit the memory of {groups.device}: {error}") from error
    assert isinstance(model, RankDecoder)
    return model


def rank_device(kind: str, rank: int) -> torch.device:
    """Return a rank's device: of the visible GPUs, the one with its number."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def resident_bytes() -> int:
    """Return the private memory of this process, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
