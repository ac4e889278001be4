"""What compiled kernels cost a GPU, read from their machine code: `python -m tests.engine.triton.machine_code CASE …`.

A kernel's registers, stack and shared memory say how many of its programs fit a multiprocessor; its opcodes say how
wide it reads memory and how much it reads ahead. Both decide how near a kernel that reads memory comes to the memory's
bandwidth, and need no GPU. cuobjdump, which comes with Triton, disassembles.

Launches go through our own code with the shapes of published models (see `compiling`). What comes out is a JSON list.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from engine.attention import KVLayout
from engine.attention.triton_paged import TritonPagedAttention
from engine.models.base import LayerCache
from engine.models.layer_ops import Activation, HeadLayout, Update
from engine.models.rope import Rotation
from engine.plan import CacheGroup
from engine.quant.base import Fp8Input
from engine.quant.weight import Activations, Factors, QWeight, TwoLevel
from engine.triton_kernels.fp8 import GroupedFp8Product, quantize_rows
from engine.triton_kernels.layers import activate, add_norm, rotate_and_store
from engine.triton_kernels.small_weights import SmallWeightProduct
from tests.engine.triton.compiling import CPU, FP8, SHARED, Device, batch, compile_instead, draw

BF16 = torch.bfloat16

REGISTERS, SHARED_OF_ALL, THREADS = 64 << 10, 228 << 10, 2048
"""Of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, table of technical specifications)."""

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A kernel for compute capability 9.0.

    Attributes:
        registers: of a thread.  stack: bytes of a thread.  shared: bytes of a program.  warps: of a program.
        loads, copies: instructions by the bytes that a thread reads with each from global memory, into registers and,
            asynchronously, into shared memory.
        spills: instructions that read or write the stack.
        programs: that fit a multiprocessor.
        in_flight: most bytes of asynchronous copies of a multiprocessor that are not waited for yet.
    """

    registers: int
    stack: int
    shared: int
    warps: int
    loads: dict[int, int]
    copies: dict[int, int]
    spills: int
    programs: int
    in_flight: int

    def narrower(self, width: int) -> int:
        """Loads and copies of fewer bytes a thread."""
        return sum(count for of in (self.loads, self.copies) for each, count in of.items() if each < width)


def read(cubin: bytes, shared: int, warps: int) -> MachineCode:
    """The costs of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (_cuobjdump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    found = _RESOURCES.search(usage)
    assert found is not None, usage
    registers, stack = map(int, found.groups())
    opcodes = _INSTRUCTION.findall(code)
    loads, copies = (
        Counter(_width(name) for name, _ in opcodes if name.split(".")[0] == kind) for kind in ("LDG", "LDGSTS")
    )
    programs = programs_that_fit(registers, shared, warps)
    spills = sum(name.split(".")[0] in ("LDL", "STL") for name, _ in opcodes)
    in_flight = read_ahead(opcodes) * 32 * warps * programs
    return MachineCode(registers, stack, shared, warps, dict(loads), dict(copies), spills, programs, in_flight)


def programs_that_fit(registers: int, shared: int, warps: int) -> int:
    """Programs that fit a multiprocessor: registers are given to a warp by 256, to each of its four parts apart, and
    each program takes a KiB of shared memory for itself."""
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // 4 // of_warp * 4 // warps
    return min(by_registers, SHARED_OF_ALL // (shared + 1024), THREADS // (32 * warps), 32)


def read_ahead(opcodes: list[tuple[str, str]]) -> int:
    """Most bytes of a thread's copies that are under way at once, going through the code in its order."""
    groups: deque[int] = deque([0])
    most = 0
    for name, operands in opcodes:
        match name.split("."):
            case ["LDGSTS", *_]:
                groups[-1] += _width(name)
                most = max(most, sum(groups))
            case ["LDGDEPBAR", *_]:
                groups.append(0)
            case ["DEPBAR", "LE"]:
                left = int(operands.split(",")[1], 16)
                while len(groups) - 1 > left:
                    groups.popleft()
            case _:
                pass
    return most


def _width(name: str) -> int:
    return next((_WIDTHS[part] for part in name.split(".") if part in _WIDTHS), 4)


def _cuobjdump(option: str, path: str) -> str:
    return subprocess.run([str(_CUOBJDUMP), option, path], capture_output=True, text=True, check=True).stdout


def layout(heads: int, kv_heads: int, head_dim: int) -> KVLayout:
    return KVLayout((CacheGroup((0,), None, 8),), 32, kv_heads, head_dim, heads)


LAYOUTS = {
    "Llama-3.1-8B": layout(32, 8, 128),  # and Qwen3-8B
    "SmolLM2-1.7B": layout(32, 32, 64),
    "SmolLM2-135M": layout(9, 3, 64),
}


def attend(
    model: str, dtype: torch.dtype, cache: torch.dtype, starts: list[int], counts: list[int], *, shared: bool = False
) -> None:
    """Attention of one layer. `shared`: all sequences begin alike."""
    of = LAYOUTS[model]
    backend = TritonPagedAttention(of, cache, CPU, processors=132, shared=SHARED[90])
    q = torch.empty(sum(counts), of.num_heads, of.head_dim, dtype=dtype)
    k, v = (torch.empty(len(q), of.num_kv_heads, of.head_dim, dtype=dtype) for _ in range(2))
    backend.attend(0, q, k, v, 0.1, backend.prepare(batch(starts, counts, of.block_size, shared=shared)))


def two_levels(n: int, k: int, dtype: torch.dtype) -> TwoLevel:
    return TwoLevel(torch.empty(n, k // 32, dtype=dtype), torch.empty(n, k // 256, dtype=torch.float16), 8)


def small_product(form: str, n: int, k: int, group: int, rows: int) -> None:
    """A product with a weight of four or eight bits; "q4_k": with two levels of factors and lowest values."""
    codes = torch.empty(n, k, dtype=torch.int8) if form == "int8" else torch.empty(n, k // 2, dtype=torch.uint8)
    scale: Factors = torch.empty(n, k // group, dtype=BF16)
    low: Factors | None = None
    if form == "q4_k":
        form, scale, low = "int4", two_levels(n, k, torch.uint8), two_levels(n, k, torch.int8)
    weight = QWeight(form, codes, n, k, group, scale, low)  # type: ignore[arg-type]
    SmallWeightProduct(weight, None)(torch.empty(rows, k, dtype=BF16))


def block_product(n: int, k: int, rows: int) -> None:
    """A product with an fp8 weight in blocks of 128 x 128."""
    weight = QWeight(
        "fp8", torch.empty(n, k, dtype=FP8), n, k, 128, torch.empty(n, k // 128), activations=Activations("fp8")
    )
    GroupedFp8Product(weight, None)(torch.empty(rows, k, dtype=BF16))


def layer(
    hidden: int, inner: int, heads: HeadLayout, activation: Activation, cache: torch.dtype, form: Fp8Input | None = None
) -> None:
    """What is between a layer's products. `form`: of the inputs that are quantized."""
    x, norm, turning = torch.empty(2, hidden, dtype=BF16), torch.empty(hidden), torch.empty(2, 1, heads.head_dim)
    dim, keys, queries = heads.head_dim, heads.num_kv_heads, heads.num_heads
    slots = torch.zeros(2, dtype=torch.int32)
    stored = [torch.empty(8, keys, dim, dtype=cache) for _ in range(2)]
    scales = [torch.empty(8, keys) if cache == FP8 else None for _ in range(2)]
    add_norm(x, Update(x, norm if activation == "gelu_tanh" else None), norm, 1e-5, form)
    rotate_and_store(
        heads, torch.empty(2, queries + 2 * keys, dim, dtype=BF16),
        torch.empty(queries + keys, dim) if heads.qk_norm else None, Rotation(turning.to(BF16), turning.to(BF16)), None,
        LayerCache(*stored, *scales, slots), 1e-5,
    )  # fmt: skip
    activate(activation, torch.empty(2, 2 * inner, dtype=BF16), form)


LAYERS: dict[str, Callable[[], None]] = {
    "Llama-3.1-8B": partial(layer, 4096, 14336, HeadLayout(32, 8, 128), "silu", BF16),
    "Qwen3-8B": partial(layer, 4096, 12288, HeadLayout(32, 8, 128, "head"), "silu", BF16),
    "Gemma-3-27B": partial(layer, 5376, 21504, HeadLayout(32, 16, 128, "head"), "gelu_tanh", BF16),
}
QUANTIZED_LAYERS: dict[str, Callable[[], None]] = {
    "Llama-3.1-8B": partial(layer, 4096, 14336, HeadLayout(32, 8, 128), "silu", FP8, Fp8Input(None)),
    "Llama-3.1-70B": partial(layer, 8192, 28672, HeadLayout(64, 8, 128), "silu", FP8, Fp8Input(None)),
    "Gemma-3-27B": partial(layer, 5376, 21504, HeadLayout(32, 16, 128, "head"), "gelu_tanh", FP8, Fp8Input(0.02)),
}
ON_AMPERE = ", capability 8.0"
"""The end of such a case's name; others are for 9.0."""


def quantize(k: int) -> None:
    quantize_rows(torch.empty(64, k, dtype=BF16))


VOCABULARIES = {"Llama 3": 128_256, "Qwen 3": 151_936, "Gemma 3": 262_144}

ROWS = (16, 32, 64, 128, 256)
DECODE, CHUNK, SPLIT = ([1499] * 256, [1] * 256), ([512, 0], [512, 512]), ([8000] * 4, [1] * 4)
CASES: dict[str, Callable[[], None]] = {
    "decode bf16": partial(attend, "Llama-3.1-8B", BF16, BF16, *DECODE),
    "decode bf16, split": partial(attend, "Llama-3.1-8B", BF16, BF16, *SPLIT),
    "decode bf16, SmolLM2-1.7B": partial(attend, "SmolLM2-1.7B", BF16, BF16, *DECODE),
    "decode bf16, SmolLM2-135M": partial(attend, "SmolLM2-135M", BF16, BF16, *DECODE),
    "decode fp8": partial(attend, "Llama-3.1-8B", BF16, FP8, *DECODE),
    "decode fp8, split": partial(attend, "Llama-3.1-8B", BF16, FP8, *SPLIT),
    "decode fp8, SmolLM2-135M": partial(attend, "SmolLM2-135M", BF16, FP8, *DECODE),
    "decode float32": partial(attend, "Llama-3.1-8B", torch.float32, torch.float32, *DECODE),
    "shared bf16": partial(attend, "Llama-3.1-8B", BF16, BF16, *DECODE, shared=True),
    "shared bf16, SmolLM2-135M": partial(attend, "SmolLM2-135M", BF16, BF16, *DECODE, shared=True),
    "shared fp8": partial(attend, "Llama-3.1-8B", BF16, FP8, *DECODE, shared=True),
    "shared float32": partial(attend, "Llama-3.1-8B", torch.float32, torch.float32, *DECODE, shared=True),
    "chunk bf16": partial(attend, "Llama-3.1-8B", BF16, BF16, *CHUNK),
    "chunk bf16, SmolLM2-135M": partial(attend, "SmolLM2-135M", BF16, BF16, *CHUNK),
    "chunk fp8": partial(attend, "Llama-3.1-8B", BF16, FP8, *CHUNK),
    "chunk float32": partial(attend, "Llama-3.1-8B", torch.float32, torch.float32, *CHUNK),
    **{
        f"int4 by {group}, {rows} rows": partial(small_product, "int4", 28672, 4096, group, rows)
        for group in (32, 128)
        for rows in ROWS
    },
    "int4 by 128, 16 rows, K = 14336": partial(small_product, "int4", 4096, 14336, 128, 16),
    "int4 by 32, 16 rows, K = 576": partial(small_product, "int4", 1536, 576, 32, 16),
    **{f"Q4_K, {rows} rows": partial(small_product, "q4_k", 28672, 4096, 32, rows) for rows in ROWS},
    **{f"int8 by rows, {rows} rows": partial(small_product, "int8", 28672, 4096, 4096, rows) for rows in ROWS},
    **{f"fp8 by blocks, {rows} rows": partial(block_product, 28672, 4096, rows) for rows in (16, 256)},
    "fp8 rows": partial(quantize, 4096),
    **{f"draws, {model}": partial(draw, 2, vocab) for model, vocab in VOCABULARIES.items()},
    **{f"layer, {name}": case for name, case in LAYERS.items()},
    **{f"layer in fp8, {name}": case for name, case in QUANTIZED_LAYERS.items()},
    **{f"layer, {name}{ON_AMPERE}": case for name, case in LAYERS.items()},
}  # fmt: skip


def compiled(names: list[str]) -> list[dict[str, Any]]:
    """The kernels that each case launches, with their costs."""
    launched = compile_instead(90)
    found = []
    for name in names:
        launched.clear()
        driver.set_active(Device(80 if name.endswith(ON_AMPERE) else 90))
        CASES[name]()
        for kernel in launched:
            code = read(kernel.asm["cubin"], kernel.metadata.shared, kernel.metadata.num_warps)
            found.append({"case": name, "kernel": kernel.metadata.name, **asdict(code)})
    return found


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1:] or list(CASES))))
