"""Measures attention backends on this device, so that `auto` takes the fastest one that computes correctly.

Each backend computes the same two steps with the model's heads, windows and dtype, over a small cache of its own: a
decoding step, and a step of prompt chunks. The first call of each is compared with the first backend's (Triton's), and
a backend that raises or differs is left out: a build without pages of keys is found so. The others are timed.

The rule: a backend's score is the mean of two ratios of times to the first backend's, of decoding and of prompts. A
backend that can't be captured in graphs is charged in decoding at least the time in which the host launches the layers,
which graphs would save. The lowest score is chosen, if it is below the first backend's by a margin.

Measurements are stored in a file, and read when a device, the libraries and a model's layout are the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionBatch, CapturableAttention, KVLayout
from engine.attention.storage import KVStorage
from engine.errors import EngineError
from engine.logs import get_logger
from engine.models.base import ModelSpec
from engine.native.build import default_cache
from engine.plan import CacheGroup

logger = get_logger(__name__)

CONTEXT = 1024
"""Maximum keys of a sequence."""

DECODE_ROWS = 256
"""Sequences of the decoding step, with between half of `CONTEXT` and all of it; half as many while the memory is too
small."""

PROMPT_ROWS, PROMPT_TOKENS = 4, 512
"""Sequences of the step of prompts, and their tokens, behind none to `CONTEXT` less of these."""

MEMORY_SHARE = 4
"""The caches and their contents take at most this part of the device's free memory: one by so many."""

CALLS, REPEATS = 4, 5
"""A time is the median of `REPEATS` measurements of `CALLS` calls in a row."""

HEAD_START_CYCLES = 10_000_000
"""For which the device waits before calls that are timed, about 5 ms, so that launching them is not timed."""

MARGIN = 0.95
"""A backend's score must be below this share of the first backend's: only the first one has graphs, shared prefixes and
small blocks."""

TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 0.001}
"""Distance from the first backend's result, as a share of its length, that rounding explains: of each token's head."""


@runtime_checkable
class StoredAttention(AttentionBackend, Protocol):
    """A backend whose cache is a `KVStorage`."""

    storage: KVStorage


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend to measure.

    Attributes:
        block_size: tokens of a block of its cache.
        version: changes with its code.
        make: creates it, with its cache allocated.
    """

    name: str
    block_size: int
    version: str
    make: Callable[[KVLayout], StoredAttention]


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """A backend's times.

    Attributes:
        decode_seconds, prompt_seconds: of the model's layers together, in either step.
        has_graphs: it is a `CapturableAttention`.
        refusal: why it can't be used; None: it can. Then there are no times.
    """

    name: str
    decode_seconds: float
    prompt_seconds: float
    has_graphs: bool
    refusal: str | None


def measure_backends(
    candidates: Sequence[Candidate],
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path | None = None,
) -> list[AttentionTimes] | None:
    """Return measurements of all candidates, of which the first is the reference; stored ones, if there are.

    Args:
        spec: of a model whose layers have the same heads.
        folder: of stored measurements; None: that of native kernels.

    Returns:
        None: the device's memory is too small to measure.
    """
    key = _key(candidates, spec, dtype, device)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (folder or default_cache()) / f"attention-{digest}.json"
    measured = _read(file, key)
    if measured is None:
        try:
            measured = _measure_all(candidates, spec, dtype, device)
        except torch.OutOfMemoryError as error:
            logger.warning("attention is not measured: the device's memory is too small", reason=str(error))
            return None
        finally:
            torch.cuda.empty_cache()
        _write(file, key, measured)
    for one in measured:
        if one.refusal is not None:
            logger.warning("an attention backend is left out", backend=one.name, reason=one.refusal, file=str(file))
    times = {
        one.name: [round(1e6 * one.decode_seconds), round(1e6 * one.prompt_seconds)]
        for one in measured
        if one.refusal is None
    }
    logger.info("attention was measured: microseconds of decoding and of prompts", **times, file=str(file))
    return measured


def fastest(measured: Sequence[AttentionTimes], num_layers: int, launch_seconds: float) -> str:
    """Return the name of the fastest backend, by the rule above.

    Args:
        num_layers: that attend.
        launch_seconds: time in which the host launches a layer without a graph; 0: no backend will have graphs.
    """
    first, *others = measured

    def score(one: AttentionTimes) -> float:
        decode = one.decode_seconds if one.has_graphs else max(one.decode_seconds, num_layers * launch_seconds)
        return (decode / first.decode_seconds + one.prompt_seconds / first.prompt_seconds) / 2

    best = min((one for one in others if one.refusal is None), key=score, default=first)
    return best.name if score(best) < MARGIN * score(first) else first.name


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the device's time of a call, without the host's for launching it."""
    times: list[float] = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that every backend computes: the tokens of some sequences, int32 [B] each, and their queries."""

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    q: Tensor

    @property
    def tokens(self) -> NDArray[np.int64]:
        """int64 [T], of all sequences' tokens."""
        ranges = zip(self.starts.tolist(), self.counts.tolist(), strict=True)
        return np.concatenate([np.arange(start, start + n) + row * CONTEXT for row, (start, n) in enumerate(ranges)])


@dataclass(frozen=True, slots=True)
class _Work:
    """What every backend computes with.

    Attributes:
        keys, values: [sequences * CONTEXT, kv_heads, head_dim], stored before; steps store the same ones again.
        steps: decoding, then prompts.
        layers: a layer for each window -> the number of layers with that window.
    """

    spec: ModelSpec
    keys: Tensor
    values: Tensor
    steps: tuple[_Step, _Step]
    layers: dict[int, int]


def _measure_all(
    candidates: Sequence[Candidate], spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> list[AttentionTimes]:
    with torch.inference_mode():
        work = _make_work(spec, dtype, device)
        expected: list[Tensor] = []
        measured = []
        for candidate in candidates:
            try:
                measured.append(_measure(candidate, work, expected, device))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not expected:
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                measured.append(AttentionTimes(candidate.name, 0.0, 0.0, False, reason))
        return measured


def _make_work(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> _Work:
    free, _ = torch.cuda.mem_get_info(device)
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    held = token_bytes * CONTEXT * (1 + len(spec.window_layers))  # of a sequence: a cache for each window, its contents
    rows = DECODE_ROWS
    while rows > PROMPT_ROWS and rows * held > free // MEMORY_SHARE:
        rows //= 2
    if rows * held > free // MEMORY_SHARE:
        raise torch.OutOfMemoryError(f"{rows * held >> 20} MiB of {free >> 20} free MiB are too many")

    def draw(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, spec.head_dim, dtype=dtype, device=device)

    def step(starts: NDArray[np.float64], count: int) -> _Step:
        counts = np.full(len(starts), count, dtype=np.int32)
        return _Step(starts.astype(np.int32), counts, draw(len(starts) * count, spec.num_heads))

    decoding = step(np.linspace(CONTEXT // 2, CONTEXT - 1, rows), 1)
    prompts = step(np.linspace(0, CONTEXT - PROMPT_TOKENS, PROMPT_ROWS), PROMPT_TOKENS)
    keys, values = (draw(rows * CONTEXT, spec.num_kv_heads) for _ in range(2))
    windows = [spec.windows[layer] for layer in spec.attending_layers]
    layers = {layers[0]: windows.count(window) for window, layers in spec.window_layers.items()}
    return _Work(spec, keys, values, (decoding, prompts), layers)


def _measure(candidate: Candidate, work: _Work, expected: list[Tensor], device: torch.device) -> AttentionTimes:
    """Measure one backend. `expected`: results of the first one, which appends them.

    Raises:
        EngineError: the results differ.  Others: of the backend.
    """
    size, rows = candidate.block_size, len(work.keys) // CONTEXT
    width = -(-CONTEXT // size)
    table = 1 + np.random.default_rng(0).permutation(rows * width).reshape(rows, width).astype(np.int32)
    groups = tuple(CacheGroup((layer,), work.spec.windows[layer], 1 + rows * width) for layer in work.layers)
    backend = candidate.make(KVLayout.of(work.spec, groups, size))
    everything = torch.from_numpy(_slots(table, size, np.arange(rows * CONTEXT))).to(device)
    for layer in work.layers:
        backend.storage.write(layer, work.keys, work.values, everything)
    calls = []
    for step in work.steps:
        tokens = step.tokens
        table_of, slots = table[: len(step.starts)], _slots(table, size, tokens)
        batch = AttentionBatch(
            step.starts, step.counts, len(step.starts) if step.counts[0] == 1 else 0, (table_of,) * len(groups),
            (slots,) * len(groups),
        )  # fmt: skip
        at = torch.from_numpy(tokens).to(device)
        q, k, v = step.q, work.keys.index_select(0, at), work.values.index_select(0, at)
        prepared = backend.prepare(batch)

        def attend(layer: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, prepared: object = prepared) -> Tensor:
            return backend.attend(layer, q, k, v, q.shape[2] ** -0.5, prepared)

        calls.append(attend)
    results = [attend(layer) for attend in calls for layer in work.layers]
    if expected:
        tolerance = TOLERANCE[work.keys.dtype]
        if any(_differs(got, want, tolerance) for got, want in zip(results, expected, strict=True)):
            raise EngineError("its results are wrong")
    else:
        torch.cuda.synchronize(device)
        expected.extend(results)
    decode, prompt = (
        sum(count * device_seconds(partial(attend, layer), device) for layer, count in work.layers.items())
        for attend in calls
    )
    return AttentionTimes(candidate.name, decode, prompt, isinstance(backend, CapturableAttention), None)


def _slots(table: NDArray[np.int32], size: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where tokens of sequences of `CONTEXT` are stored."""
    row, position = np.divmod(tokens, CONTEXT)
    slots: NDArray[np.int64] = table[row, position // size].astype(np.int64) * size + position % size
    return slots


def _differs(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether the result of any token's head is further away than `tolerance`, or not finite."""
    got, want = got.float(), want.float()
    return not bool(((got - want).norm(dim=-1) <= tolerance * want.norm(dim=-1)).all())


def _key(candidates: Sequence[Candidate], spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return all that measurements depend on, but which of equal devices it is."""
    here = Path(__file__).parent
    sources = hashlib.sha256()
    for path in (*sorted(here.glob("*.py")), here.parent / "triton_kernels" / "attention.py"):
        sources.update(path.read_bytes())
    windows = [spec.windows[layer] for layer in spec.attending_layers]
    return {
        "device": torch.cuda.get_device_properties(device).name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "tokenmill": sources.hexdigest(),
        "backends": [[one.name, one.block_size, one.version] for one in candidates],
        "dtype": str(dtype),
        "heads": [spec.num_heads, spec.num_kv_heads, spec.head_dim],
        "windows": [[window, windows.count(window)] for window in spec.window_layers],
    }


def _read(file: Path, key: dict[str, Any]) -> list[AttentionTimes] | None:
    """Return stored measurements; None: there are none, or the file is not one of this key's."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return _parse(stored, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("a file of attention's measurements is not used: measuring again", file=str(file), reason=reason)
        return None


def _parse(stored: Any, key: dict[str, Any]) -> list[AttentionTimes]:
    """Return what `_write` stored. Raises ValueError, TypeError or KeyError if it is anything else."""
    if stored["key"] != key:
        raise ValueError("it is of another device, library or model")
    measured: list[AttentionTimes] = []
    for one, (name, *_) in zip(stored["measurements"], key["backends"], strict=True):
        refusal, has_graphs = one["refusal"], one["has_graphs"]
        times = [float(one[field]) for field in ("decode_seconds", "prompt_seconds")]
        is_refused = isinstance(refusal, str) and measured
        are_times = refusal is None and all(0 < seconds < math.inf for seconds in times)
        if one["name"] != name or not isinstance(has_graphs, bool) or not (is_refused or are_times):
            raise ValueError(f"not a measurement of {name}: {one}")
        measured.append(AttentionTimes(name, times[0], times[1], has_graphs, refusal))
    return measured


def _write(file: Path, key: dict[str, Any], measured: list[AttentionTimes]) -> None:
    """Store measurements; if the folder is not writable, the next process measures again."""
    stored = {"key": key, "measurements": [asdict(one) for one in measured]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json", delete=False) as made:
            json.dump(stored, made, indent=1)
        os.replace(made.name, file)
    except OSError as error:
        logger.warning("attention's measurements can't be stored", file=str(file), reason=str(error))
