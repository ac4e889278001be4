"""The adapters of FlashAttention, called with functions of the libraries' signatures that compute by definition."""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import AttentionBatch, KVLayout, make_backend
from engine.attention import choice as choosing
from engine.attention.flash import LIBRARIES, FlashAttention, find_flash2, find_flash3, find_torch_varlen
from engine.errors import EngineError
from engine.plan import CacheGroup
from tests.engine.attention.test_paged_attention import Sequences, store

CUDA = torch.device("cuda")
LAYOUT = KVLayout((CacheGroup((0,), None, 4),), 256, 2, 64, 4)


def paged_reference(
    q: Tensor, keys: Tensor, values: Tensor, firsts: Tensor, lengths: Tensor, table: Tensor, scale: float, window: Any
) -> Tensor:
    """Attention as all of the libraries define it: rows of q at the end of their keys, window (left, right)."""
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (firsts, lengths, table))
    assert q.is_contiguous()
    assert keys.is_contiguous()
    out = torch.full_like(q, float("nan"))
    left, right = (math.inf if side < 0 else side for side in window)
    for i, length in enumerate(lengths.tolist()):
        begin, end = int(firsts[i]), int(firsts[i + 1])
        pages = table[i, : -(-length // keys.shape[1])].long()
        k, v = (t[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // t.shape[2], 1) for t in (keys, values))
        at = torch.arange(length - (end - begin), length)[:, None]
        key_at = torch.arange(length)[None, :]
        seen = (key_at >= at - left) & (key_at <= at + right)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k) * scale
        weights = scores.masked_fill(~seen, -math.inf).softmax(2)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v.masked_fill(~seen.any(0)[:, None, None], 0))
    return out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """The function of FlashAttention 3."""
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return paged_reference(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size)


def vllm_varlen(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
    q_descale=None, k_descale=None, v_descale=None, num_splits=0, fa_version=2, s_aux=None,
):  # fmt: skip
    """vLLM's `flash_attn_varlen_func`, which takes either lengths of keys or where they begin."""
    assert causal
    assert fa_version == 3
    assert cu_seqlens_k is None
    assert isinstance(window_size, list)
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(seqused_k.max()))
    return paged_reference(q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, window_size)


def flash2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """FlashAttention 2's `flash_attn_varlen_func`, which has the lengths of paged keys from `cu_seqlens_k`."""
    assert causal
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    lengths = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(lengths.max()))
    return paged_reference(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, window_size)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """The function of torch; causal is a window that ends at the query."""
    assert enable_gqa
    assert key.shape[1] % 256 == 0
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
    return paged_reference(query, key, value, cu_seq_q, seqused_k, block_table, scale, window_size)


def module(**functions: Any) -> ModuleType:
    made = ModuleType("stand_in")
    vars(made).update(functions)
    return made


@dataclass(frozen=True)
class Signature:
    """A function's parameters in a library's own source.

    Attributes:
        source: repository, version or commit, and file.
        required: names of positional parameters.  optional: names of those with defaults, which follow.
    """

    source: str
    required: str
    optional: str

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Values by the names of the parameters. Raises TypeError as the function would."""
        names = [(name, inspect.Parameter.empty) for name in self.required.split()]
        names += [(name, None) for name in self.optional.split()]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        made = inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in names])
        return dict(made.bind(*args, **kwargs).arguments)


_KV_CACHE = "q k_cache v_cache"
_PAGED = "q k v max_seqlen_q cu_seqlens_q max_seqlen_k"
_VARLEN = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash3": [
        Signature(
            "Dao-AILab/flash-attention v2.7.4.post1 hopper/flash_attn_interface.py", _KV_CACHE,
            "k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q "
            "cu_seqlens_k_new max_seqlen_q q_descale k_descale v_descale softmax_scale causal window_size "
            "sink_token_length softcap rotary_interleaved num_splits pack_gqa sm_margin return_softmax_lse",
        ),
        Signature(
            "Dao-AILab/flash-attention v2.8.0 to 0251105a (August 2026) hopper/flash_attn_interface.py", _KV_CACHE,
            "k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q "
            "cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
            "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
            "return_softmax_lse",
        ),
    ],
    "flash3 of vLLM": [
        Signature(
            "vllm-project/flash-attention b99f8c82 (August 2025) vllm_flash_attn/flash_attn_interface.py", _PAGED,
            "cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
            "return_attn_probs block_table return_softmax_lse out scheduler_metadata q_descale k_descale v_descale "
            "num_splits fa_version s_aux",
        ),
        Signature(
            "vllm-project/flash-attention 188be165 (December 2025) vllm_flash_attn/flash_attn_interface.py", _PAGED,
            "cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
            "return_attn_probs block_table return_softmax_lse out scheduler_metadata q_descale k_descale v_descale "
            "num_splits fa_version s_aux cp_world_size cp_rank cp_tot_seqused_k",
        ),
        Signature(
            "vllm-project/vllm 01420e05 vllm/vllm_flash_attn/flash_attn_interface.py", _PAGED,
            "cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
            "return_attn_probs block_table return_softmax_lse out scheduler_metadata q_descale k_descale v_descale "
            "num_splits output_scale fa_version s_aux cp_world_size cp_rank cp_tot_seqused_k mask_mod "
            "block_sparse_tensors aux_tensors aux_tensor_leading_dims dynamic_causal",
        ),
    ],
    "flash2": [
        Signature(
            "Dao-AILab/flash-attention v2.5.9.post1 flash_attn/flash_attn_interface.py", _VARLEN,
            "dropout_p softmax_scale causal window_size alibi_slopes deterministic return_attn_probs block_table",
        ),
        Signature(
            "Dao-AILab/flash-attention v2.6.3 to v2.8.3.post1 flash_attn/flash_attn_interface.py", _VARLEN,
            "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs "
            "block_table",
        ),
    ],
}  # fmt: skip
"""Of the functions that the adapters call, by their stand-ins. (Torch's own function is read where it is installed.)"""

STAND_INS = {
    "flash3": ("flash3", module(flash_attn_with_kvcache=flash_attn_with_kvcache)),
    "flash3 of vLLM": (
        "flash3",
        module(flash_attn_varlen_func=vllm_varlen, fa_version_unsupported_reason=lambda _: None),
    ),
    "flash2": ("flash2", module(flash_attn_varlen_func=flash2_varlen)),
    "torch-varlen": ("torch-varlen", module(varlen_attn=varlen_attn)),
}


@pytest.mark.parametrize("which", list(STAND_INS))
@pytest.mark.parametrize("window", [None, 1, 300])
def test_adapters_agree_with_the_oracle(which: str, window: int | None) -> None:
    name, stand_in = STAND_INS[which]
    rng = np.random.default_rng(7)
    torch.manual_seed(7)
    sequences = Sequences(rng, count=4, longest=600, block_size=256, window=window)
    layout = KVLayout(sequences.groups, 256, 2, 16, 6)
    fast = FlashAttention(LIBRARIES[name], (stand_in, "here"), layout, torch.float32, torch.device("cpu"))
    oracle = make_backend("reference", layout, torch.float32, torch.device("cpu"))
    for stored in (*fast.storage.keys, *fast.storage.values):
        stored.fill_(float("nan"))
    for counts in ([250, 3, 1, 40], [7, 1, 1, 300], [1, 1, 1, 1]):
        batch = sequences.batch([0, 1, 2, 3], counts)
        mine, theirs = fast.prepare(batch), oracle.prepare(batch)
        for layer in range(2):
            q, k, v = torch.randn(sum(counts), 10, 16).split([6, 2, 2], dim=1)
            if layer == 0:
                got = fast.attend(layer, q, k, v, 0.3, mine)
            else:
                store(fast.layer_cache(layer, mine), k, v)
                got = fast.attend(layer, q, None, None, 0.3, mine)
            torch.testing.assert_close(got, oracle.attend(layer, q, k, v, 0.3, theirs), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("which", "signature"), [(name, each) for name, of in SIGNATURES.items() for each in of])
def test_adapters_call_functions_as_the_libraries_define_them(which: str, signature: Signature) -> None:
    calls: list[dict[str, Any]] = []

    def take(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(signature.bind(args, kwargs))
        return torch.empty(0)

    name, stand_in = STAND_INS[which]
    functions = {key: take if key.startswith("flash_attn") else value for key, value in vars(stand_in).items()}
    layout = KVLayout((CacheGroup((0,), 300, 4),), 256, 2, 16, 6)
    fast = FlashAttention(LIBRARIES[name], (module(**functions), "here"), layout, torch.float32, torch.device("cpu"))
    batch = AttentionBatch(
        np.array([7, 2], np.int32), np.array([1, 3], np.int32), 1, (np.array([[2], [1]], np.int32),),
        (np.array([519, 258, 259, 260]),),
    )  # fmt: skip
    q, k, v = torch.randn(4, 10, 16).split([6, 2, 2], dim=1)
    fast.attend(0, q, k, v, 0.3, fast.prepare(batch))
    (call,) = calls
    keys, values = (stored[0].view(4, 256, 2, 16) for stored in (fast.storage.keys, fast.storage.values))
    expected = {
        "q": q, "k": keys, "v": values, "k_cache": keys, "v_cache": values, "softmax_scale": 0.3, "causal": True,
        "window_size": (299, 0), "cu_seqlens_q": [0, 1, 4], "cu_seqlens_k": [0, 8, 13], "cache_seqlens": [8, 5],
        "seqused_k": [8, 5], "max_seqlen_q": 3, "max_seqlen_k": 8, "page_table": [[2], [1]],
        "block_table": [[2], [1]], "fa_version": 3,
    }  # fmt: skip
    needed = {"flash3": {"page_table", "cache_seqlens"}, "flash2": {"block_table", "cu_seqlens_k"}}
    assert call.keys() >= {"softmax_scale", "causal", "window_size", "cu_seqlens_q", "max_seqlen_q"}
    assert call.keys() >= needed.get(which, {"block_table", "seqused_k", "fa_version"})
    for parameter, value in call.items():
        found, want = value, expected[parameter]
        if isinstance(found, Tensor):
            assert torch.equal(found, want if isinstance(want, Tensor) else torch.tensor(want, dtype=torch.int32))
        else:
            assert (tuple(found) if isinstance(found, list) else found) == want


@pytest.mark.parametrize("which", list(SIGNATURES))
def test_stand_ins_have_parameters_of_the_libraries(which: str) -> None:
    (function,) = (value for key, value in vars(STAND_INS[which][1]).items() if key.startswith("flash_attn"))
    names = list(inspect.signature(function).parameters)
    assert names in [[*each.required.split(), *each.optional.split()] for each in SIGNATURES[which]]


@pytest.mark.slow
def test_torchs_own_function_has_the_signature_it_is_called_with() -> None:
    found = find_torch_varlen(download=False)
    if found is None:
        pytest.skip(f"NOT TESTED HERE: torch {torch.__version__} knows no pages of keys; 2.12 does")
    theirs, ours = (inspect.signature(f).parameters for f in (found[0].varlen_attn, varlen_attn))
    assert {name: (p.kind, p.default) for name, p in theirs.items()} == {
        name: (p.kind, p.default) for name, p in ours.items()
    }


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "capability", "reason"),
    [
        ("flash2", {"block_size": 32}, torch.bfloat16, (9, 0), "blocks of 256 tokens or a multiple, not of 32"),
        ("torch-varlen", {"block_size": 300}, torch.bfloat16, (9, 0), "blocks of 256 tokens or a multiple, not of 300"),
        ("flash3", {}, torch.float32, (9, 0), "bfloat16 and float16, not float32"),
        ("flash3", {}, torch.bfloat16, (8, 0), "not for devices of compute capability 8.0"),
        ("flash3", {}, torch.bfloat16, (10, 0), "not for devices of compute capability 10.0"),
        ("flash2", {"head_dim": 512}, torch.bfloat16, (9, 0), "heads of a multiple of 8 up to 256, not of 512"),
        ("flash2", {}, torch.bfloat16, (8, 6), None),
        ("flash3", {"block_size": 32}, torch.float16, (9, 0), None),
    ],
)
def test_what_a_library_can_not_do_is_said_with_the_fix(
    name: str,
    changes: dict[str, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    refusal = LIBRARIES[name].refusal(replace(LAYOUT, **changes), dtype, CUDA)
    assert (refusal is None) if reason is None else (refusal is not None and reason in refusal)


def test_a_library_selected_by_name_is_used_or_an_error_names_the_reason() -> None:
    with pytest.raises(EngineError, match=r"^attention 'flash3' runs on CUDA devices, not on cpu$"):
        make_backend("flash3", LAYOUT, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(EngineError, match=r"^attention 'flash2' takes blocks of 256 .*: set kv_block_size$"):
        make_backend("flash2", replace(LAYOUT, block_size=32), torch.bfloat16, torch.device("cpu"))


def test_a_library_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name, package in (("flash3", "flash_attn_interface, kernels or vllm"), ("flash2", "flash-attn")):
        with pytest.raises(EngineError, match=rf"^attention '{name}' needs {package}, which can't be imported here$"):
            make_backend(name, LAYOUT, torch.bfloat16, CUDA)


@pytest.mark.parametrize(
    ("installed", "block_size", "fp8", "chosen"),
    [
        (("triton", "flash3", "flash2"), 32, False, "triton"),
        (("triton", "flash3", "flash2"), 32, True, "triton"),
        (("flash3", "flash2"), 256, False, "flash3"),
        (("triton", "flash2", "torch-varlen"), 256, False, "triton"),
        (("flash2", "torch-varlen"), 256, False, "flash2"),
        (("torch-varlen",), 256, False, "torch-varlen"),
        (("flash2", "torch-varlen"), 32, False, "paged-sdpa"),
        ((), 256, False, "paged-sdpa"),
    ],
)
def test_without_measuring_the_first_installed_backend_that_fits_is_chosen(
    installed: tuple[str, ...], block_size: int, fp8: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(choosing, "find_spec", lambda name: name if name in installed else None)
    there = {
        name: replace(library, find=lambda download, name=name: (module(), name) if name in installed else None)
        for name, library in LIBRARIES.items()
    }
    monkeypatch.setattr(choosing, "LIBRARIES", there)
    name, found = choosing._preferred(replace(LAYOUT, block_size=block_size), torch.bfloat16, CUDA, fp8)
    assert name == chosen
    assert (found is not None) == (chosen in LIBRARIES)


def test_flash3_is_searched_in_its_packages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, vllm = module(), module(is_fa_version_supported=lambda version: version == 3)
    downloads: list[str] = []
    packages = {
        "flash_attn_interface": module(),
        "kernels": module(get_kernel=lambda name: downloads.append(name) or kernel),
        "vllm.vllm_flash_attn": vllm,
    }
    imported = lambda name: (packages[name], name) if name in packages else None  # noqa: E731
    monkeypatch.setattr("engine.attention.flash._imported", imported)
    assert find_flash3(True) == (packages.pop("flash_attn_interface"), "flash_attn_interface")
    assert find_flash3(False) == (vllm, "vllm.vllm_flash_attn")
    assert not downloads, "nothing is downloaded without permission"
    assert find_flash3(True) == (kernel, "kernels: kernels-community/flash-attn3")
    packages["kernels"] = module(get_kernel=lambda name: {}[name])
    assert find_flash3(True) == (vllm, "vllm.vllm_flash_attn")
    packages["vllm.vllm_flash_attn"] = module(is_fa_version_supported=lambda version: version == 2)
    assert find_flash3(False) is None


def test_an_empty_module_in_the_place_of_a_package_is_not_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM puts one in the place of flash_attn when its own FlashAttention is imported."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert find_flash2(False) is None


def test_a_package_that_can_not_be_imported_here_is_not_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_flash2(False) is None
