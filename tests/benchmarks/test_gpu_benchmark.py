"""The GPU benchmark's arithmetic by hand, its report, its packing of wheels, and a dry run with all else hidden."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    attention,
    carry,
    correctness,
    kernels,
    machine,
    mixed,
    models,
    peers,
    profile_stage,
    profiling,
    published,
    report,
    serve,
)
from benchmarks.gpu.context import Context, Skipped
from benchmarks.gpu.roofline import Form, Rates, Shape, bound
from engine import EngineConfig, Request, SamplingParams, as_token_ids
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parent.parent.parent
LEASE = ROOT / "benchmarks" / "gpu" / "lease.sh"
RATES = Rates(bandwidth=4.3e12, bf16=790e12, fp8=1450e12)
LLAMA = Shape(32, 4096, 14336, 32, 8, 128, 128256)

GPU_MACHINE_PACKAGES = ("torch", "numpy", "transformers", "triton", "tokenizers", "safetensors")
"""Packages that a machine with a GPU is assumed to have, with their requirements except `NEWER`."""

NEWER = {"pydantic", "pydantic_core"}
"""Packages that only newer versions of those require."""


def test_given_a_model_when_its_sizes_are_taken_then_they_are_those_counted_by_hand() -> None:
    assert LLAMA.layer_parameters == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert LLAMA.head_parameters == 4096 * 128256
    assert LLAMA.layers * LLAMA.kv_bytes(2) == 131072
    assert Shape.of({
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }) == LLAMA  # fmt: skip


def test_given_layers_with_a_window_when_tokens_are_counted_then_none_sees_more_than_it_has() -> None:
    gemma = Shape.of(models.CONFIGS[models.GEMMA])
    assert gemma.windows == (512,) * 15

    def by_hand(first: int, last: int) -> int:
        return sum(3 * tokens + 15 * min(tokens, 512) for tokens in range(first, last + 1))

    assert gemma.seen(1100) == by_hand(1, 1100)
    assert gemma.seen(300) == by_hand(1, 300)
    found = bound(gemma, Form(), RATES, [(1100, 359)], batch=1)
    assert found.cache == pytest.approx(by_hand(1101, 1458) * 2 * 256 * 2 / RATES.bandwidth)
    assert found.prompts == pytest.approx(4 * 4 * 256 * by_hand(1, 1100) / RATES.bf16)


def test_given_one_request_at_a_time_when_it_is_bounded_then_reading_the_weights_is_what_takes_time() -> None:
    found = bound(LLAMA, Form(), RATES, [(128, 100)], batch=1)

    weights = 2 * (LLAMA.layer_parameters + LLAMA.head_parameters)
    assert found.weights_bound
    assert found.products == pytest.approx(100 * weights / 4.3e12)
    assert found.cache == pytest.approx(99 * (128 + 50) * 131072 / 4.3e12)
    assert found.prompts == pytest.approx(4 * 32 * 32 * 128 * (128 * 129 / 2) / 790e12)
    assert found.tokens_per_second == pytest.approx(100 / found.seconds)


@pytest.mark.parametrize(
    ("isl", "osl", "form", "wanted"),
    [
        (128, 128, Form(2, 2), 22_700),
        (128, 2048, Form(2, 2), 18_100),
        (1000, 1000, Form(2, 2), 11_900),
        (2048, 128, Form(2, 2), 2_500),
        (128, 2048, Form(1, 1), 35_000),
    ],
)
def test_given_many_requests_when_they_are_bounded_then_it_is_about_the_published_estimate(
    isl: int, osl: int, form: Form, wanted: float
) -> None:
    """An estimate for one H200 that was computed separately, without the prompts' attention and with one rate."""
    found = bound(LLAMA, form, RATES, [(isl, osl)] * 1000, batch=None)

    assert not found.weights_bound
    assert found.tokens_per_second == pytest.approx(wanted, rel=0.12)


def test_given_prefixes_in_common_when_a_job_is_bounded_then_they_cost_nothing_but_their_reading() -> None:
    alone = bound(LLAMA, Form(), RATES, [(1000, 10)] * 8, batch=8)
    shared = bound(LLAMA, Form(), RATES, [(1000, 10)] * 8, batch=8, cached=7 * 900)

    assert shared.prompts == pytest.approx(alone.prompts * (1 - 7 * 900 / 8000))
    assert shared.products < alone.products
    assert shared.cache == alone.cache
    with pytest.raises(ValueError, match="no fp8 rate"):
        bound(LLAMA, Form(1, 2), Rates(1.0, 1.0), [(1, 1)], batch=1)


def test_given_kernels_that_overlap_when_they_are_added_up_then_time_counts_once_and_gaps_are_what_none_covers() -> (
    None
):
    found = profiling.account(
        [(0.0, 10.0, "nvjet_gemm"), (5.0, 12.0, "attend_tiles"), (20.0, 30.0, "nvjet_gemm"), (29.0, 40.0, "relu")]
    )

    assert found["span_seconds"] == pytest.approx(40e-6)
    assert found["busy_seconds"] == pytest.approx(32e-6)
    assert found["idle_share"] == pytest.approx(8 / 40)
    assert found["longest_gaps_us"] == [8.0]
    assert found["kernels"][0] | {"share": 0} == {
        "name": "nvjet_gemm", "calls": 2, "seconds": 2e-05, "share": 0, "mean_us": 10.0
    }  # fmt: skip
    assert found["shares"]["products"] == pytest.approx(20 / 38)
    assert sum(found["shares"].values()) == pytest.approx(1)
    with pytest.raises(ValueError, match="saw nothing"):
        profiling.account([])


def test_given_two_stages_when_they_report_then_neither_loses_the_others_findings(tmp_path: Path) -> None:
    first = report.Report(tmp_path, "machine", dry_run=False)
    first.add("copy", {"bytes_per_second": 2.0})
    second = report.Report(tmp_path, "serve", dry_run=False)
    second.add("cell", {"rate": math.inf, "many": (1, 2)})
    first.add("bf16", {"operations_per_second": 3.0})
    first.end()

    stages = report.read(tmp_path)["stages"]
    assert stages["machine"]["parts"] == {"copy": {"bytes_per_second": 2.0}, "bf16": {"operations_per_second": 3.0}}
    assert stages["machine"]["ended"]
    assert stages["serve"]["parts"]["cell"] == {"rate": "inf", "many": [1, 2]}
    assert not stages["serve"]["ended"], "it did not say so"
    assert report.measured_rates(tmp_path, dry=False) == Rates(2.0, 3.0, None)
    assert report.measured_rates(tmp_path, dry=True) is None, "a dry run has no measured rates"


def test_given_a_stage_that_hangs_or_fails_when_it_runs_apart_then_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "_GRACE", 0.0)
    wanted = ["--stage", "machine", "--out", str(tmp_path), "--limit-seconds"]

    assert command.main([*wanted, "0.05"]) == 1

    assert "did not end within" in report.read(tmp_path)["stages"]["machine"]["error"]


@pytest.mark.exhaustive
def test_given_no_time_is_left_when_a_stage_runs_then_its_parts_are_skipped_one_by_one(tmp_path: Path) -> None:
    late = Context(torch.device("cpu"), dry=True, deadline=time.monotonic(), folder=tmp_path)

    found = dict([*serve.run(late), *mixed.run(late)])

    assert len(found) == 4 + 2, "what must be loaded first, in each form"
    assert all(list(part) == ["skipped"] for part in found.values())


def test_given_a_lease_when_its_stages_begin_then_each_has_the_time_that_it_asks_for_first() -> None:
    """On a real device; a dry run asks for none. Importing torch and transformers comes off a stage's time."""
    importing, call = 25.0, 300.0
    first = {
        "machine": machine._SECONDS, "correctness": correctness._MODEL_SECONDS, "attention": attention._CASE_SECONDS,
        "serve": serve._LOAD_SECONDS + 10, "published": published._SECONDS + 10, "mixed": mixed._SECONDS,
        "peers": peers._START_SECONDS, "profile": profile_stage._SECONDS, "kernels": kernels._SECONDS,
    }  # fmt: skip
    script = LEASE.read_text(encoding="utf-8")
    calls = [re.findall(r"^ +stage (\w+) (\d+)$", lines, re.MULTILINE) for lines in script.split(";;")]
    (on_a_new_machine, *_) = (part for part in calls if part)
    assert on_a_new_machine.pop(0)[0] == "machine"
    of_calls = [[("machine", "33"), *part] for part in calls if part]

    assert "  stage machine 33" in script
    assert len(of_calls) == 5
    assert {name for part in of_calls for name, _ in part} == set(command.STAGES) == set(first)
    for part in of_calls:
        assert sum(float(limit) for _, limit in part) <= call
        assert [name for name, limit in part if float(limit) < first[name] + importing] == []
    tests = re.findall(r" timeout (\d+) .* -m pytest", script)
    assert [float(limit) for limit in tests] <= [float(dict(of_calls[0])["correctness"])], "they run beside it"


def test_given_a_call_that_is_killed_when_it_has_found_something_then_the_file_is_there_and_whole_all_the_time(
    tmp_path: Path,
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"""#!/bin/bash
for size in 1 2 3 4 5 6 7 8 9; do
  {sys.executable} -c 'print("[" + "0," * 4_000_000 + "0]")' >"$KEEP/new" && mv "$KEEP/new" "$KEEP/gpu.json"
done
sleep 60
""")
    stand_in.chmod(0o755)
    out = tmp_path / "out"
    folders = {"OUT": str(out), "KEEP": str(tmp_path / "work"), "PYTHON": str(stand_in), "EVERY": "0.02"}
    env = {**os.environ, **folders}
    call = subprocess.Popen(
        ["bash", str(LEASE), "2"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )  # fmt: skip
    try:
        while not (out / "gpu.json").exists():
            assert call.poll() is None, "it ended by itself"
            time.sleep(0.01)
        for _ in range(20):
            assert (out / "gpu.json").read_text().endswith("0]\n")
    finally:
        os.killpg(call.pid, signal.SIGKILL)
        call.wait()

    assert len(json.loads((out / "gpu.json").read_text())) == 4_000_001


def test_given_peers_on_a_device_when_they_run_in_turn_then_ours_runs_on_both_sides_of_vllm_and_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(torch.device("cpu"), dry=False, deadline=time.monotonic() + 100, folder=tmp_path)
    monkeypatch.setattr(peers, "measured", lambda *given: {"reserve": given[-1]})

    found = dict(peers.run(context))

    reserved = [(label, part["reserve"]) for label, part in found.items() if "reserve" in part]
    ours = peers._AGAIN_SECONDS
    assert reserved[:3] == [("tokenmill", ours), ("vllm", ours), ("tokenmill again", 0)]
    assert dict(reserved[3:]) == {"vllm, eager": 0, "transformers": 0}


def test_given_shapes_of_published_models_when_weights_are_made_then_they_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    for name, parameters in ((models.SMOLLM_135M, 134_515_008), (models.SMOLLM_1_7B, 1_711_376_384),
                             (models.GEMMA, 268_098_176)):  # fmt: skip
        weights = models.RandomWeights(models.write_config(tmp_path, name))
        assert sum(math.prod(weights.shape(each)) for each in weights.names) == parameters
    for name in ("tiny-llama", "tiny-qwen3", "tiny-smollm2", "tiny-gemma3"):
        folder = models.write_config(tmp_path, name)
        theirs = models.load_transformers(folder, torch.float32, torch.device("cpu"))
        ours = models.RandomWeights(folder)
        assert {each: ours.shape(each) for each in ours.names} == {
            each: tuple(weight.shape) for each, weight in theirs.named_parameters()
        }
        config = EngineConfig(device="cpu", dtype="float32", attention="paged-sdpa", max_model_len=64)
        engine, ids = models.load_engine(folder, config), list(range(5, 25))
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (completion,) = engine.run([Request("1", as_token_ids(ids), params)])
        with torch.inference_mode():
            for token in completion.choices[0].token_ids:
                assert int(theirs(torch.tensor([ids])).logits[0, -1].argmax()) == token, name
                ids.append(token)


def test_given_a_family_with_other_weights_when_they_are_made_then_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**models.CONFIGS["tiny-qwen3"], "attention_bias": True}))

    with pytest.raises(AssertionError, match="weights that are not made here"):
        models.RandomWeights(tmp_path)


def test_given_more_rows_than_the_cache_holds_when_a_cell_is_measured_then_it_is_skipped_and_says_how_many_fit(
    tmp_path: Path,
) -> None:
    context = Context(torch.device("cpu"), dry=True, deadline=time.monotonic() + 100, folder=tmp_path, batch=4)
    variant, cell = serve.variants(context)[0], serve.Cell(24, 8)
    engine = serve.engine_for(context, "tiny-llama", variant, [cell])

    with pytest.raises(Skipped, match="the cache holds 4 of 5 rows"):
        serve.measure(engine, replace(cell, rows=5), "tiny-llama", variant, context, gaps=False)

    assert serve.Cell(1000, 1000, top_p=0.9, rows=512).name == "1000/1000, top_p 0.9, 512 rows"


def test_given_several_answers_that_end_with_each_step_when_a_batch_is_filled_then_it_becomes_full(
    tmp_path: Path,
) -> None:
    context = Context(torch.device("cpu"), dry=True, deadline=time.monotonic() + 100, folder=tmp_path, window=0.1)
    cell = serve.Cell(8, 2, rows=16)
    variant = serve.variants(context)[0]
    flow = serve.Flow(serve.engine_for(context, "tiny-llama", variant, [cell]), cell, context)

    flow.fill()

    assert flow.engine.num_running + flow.engine.num_waiting == 16
    assert flow.step() >= 1
    flow.stop()
    assert not flow.engine.has_work


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
    """A wheel of these files."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, "", ""]))
    return path


FAKE_VLLM = b"""
class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens

class _Answer:
    def __init__(self, count):
        self.token_ids = [1] * count

class _Output:
    def __init__(self, count):
        self.outputs = [_Answer(count)]

class LLM:
    def __init__(self, model, *, load_format, skip_tokenizer_init, enable_prefix_caching, max_model_len, **options):
        assert load_format == "dummy"
        assert options.pop("max_num_batched_tokens") and options.pop("max_num_seqs")
        assert set(options) <= {"dtype", "gpu_memory_utilization", "enforce_eager"}, options

    def generate(self, prompts, params, use_tqdm):
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        return [_Output(each.max_tokens) for each in params]
"""

FAKE_FLASH = b"""
import torch

def flash_attn_varlen_func(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, causal,
                           fa_version):
    assert causal and fa_version == 3
    out = torch.empty_like(q)
    for row, length in enumerate(seqused_k.tolist()):
        begin, end = cu_seqlens_q[row : row + 2].tolist()
        keys, values = (pages[block_table[row].long()].flatten(0, 1)[:length] for pages in (k, v))
        keys, values = (each.repeat_interleave(q.shape[1] // k.shape[2], 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * q.shape[2] ** -0.5
        hidden = torch.ones(end - begin, length).triu(length - (end - begin) + 1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out
"""


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A folder with the parts of a vLLM that only counts."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    noise = os.urandom(40_000)
    files = {
        "vllm/__init__.py": FAKE_VLLM,
        "vllm/vllm_flash_attn.py": FAKE_FLASH,
        "vllm/_C_stable.abi3.so": noise,
        "vllm/_moe_C.abi3.so": noise,
        "vllm/utils/deep_gemm.py": b"",
        "vllm/third_party/deep_gemm/kernel.cuh": noise,
        "vllm-0.26.0.data/purelib/vllm/extra.py": b"x = 1\n",
        "vllm-0.26.0.data/scripts/vllm": b"#!python",
    }
    wheel(wheels, "vllm", "0.26.0", files)
    wheel(wheels, "tiny", "1.0", {"tiny.py": b"y = 2\n"})
    status = carry.main(["pack", "--to", str(tmp_path / "carried"), "--wheels", str(wheels)])
    assert status == 0
    return tmp_path / "carried"


def test_given_wheels_when_they_are_packed_then_what_is_not_needed_stays_behind_and_the_rest_arrives(
    carried: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"

    carry.main(["unpack", str(carried / "a"), "--to", str(site)])

    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {path for path in found if not path.startswith(".")} == {
        "vllm/__init__.py", "vllm/_C_stable.abi3.so", "vllm/utils/deep_gemm.py", "vllm/extra.py",
        "vllm/vllm_flash_attn.py",
        "vllm-0.26.0.dist-info/METADATA", "tiny.py", "tiny-1.0.dist-info/METADATA",
    }  # fmt: skip
    assert carry.main(["whole", str(site)]) == 0


def test_given_a_file_larger_than_a_part_when_packed_then_parts_are_even_and_make_it_whole_in_any_order(
    tmp_path: Path,
) -> None:
    noise = os.urandom(40_000)
    wheels = [wheel(tmp_path, "vllm", "1", {"vllm/a.so": noise})]
    site, to = tmp_path / "site", tmp_path / "to"

    sizes = carry.pack(wheels, to, 15_000)

    assert [folder.name for folder in sorted(to.iterdir())] == ["a", "b", "c"]
    assert max(sizes) <= 15_000
    assert max(sizes) - min(sizes) < 10
    for letter in "cab":
        assert not carry.whole(site)
        assert carry.main(["whole", str(site)]) == 1
        assert carry.unpack(to / letter, site) == (letter == "b")
    assert carry.whole(site)
    assert (site / "vllm/a.so").read_bytes() == noise

    (to / "b" / "chunk").write_bytes((to / "b" / "chunk").read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="damaged"):
        carry.unpack(to / "b", site)
    carry.pack([wheel(tmp_path, "vllm", "2", {"vllm/a.so": noise[::-1]})], to, 15_000)
    with pytest.raises(ValueError, match="another archive"):
        carry.unpack(to / "a", site)
    with pytest.raises(ValueError, match="there are 26 names"):
        carry.pack(wheels, to, 1_500)
    with pytest.raises(ValueError, match="no room for any"):
        carry.pack(wheels, to, -20_000)


def test_given_a_working_tree_when_it_is_measured_then_what_git_would_carry_counts_and_parts_fit_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, wheels = tmp_path / "tree", tmp_path / "wheels"
    tree.mkdir()
    wheels.mkdir()
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    for name, size in ((".gitignore", 6), ("tracked", 600_000), ("new", 1), ("built", 1 << 20)):
        (tree / name).write_bytes(b"built\n" if size == 6 else bytes(size))
    subprocess.run(["git", "-C", str(tree), "add", "tracked", ".gitignore"], check=True)
    monkeypatch.setattr(carry, "ROOT", tree)
    wheel(wheels, "vllm", "1", {"vllm/a.so": os.urandom(400_000)})

    carry.main(["pack", "--to", str(tmp_path / "to"), "--wheels", str(wheels), "--call-mib", "1"])

    assert carry.tree_bytes(tree) == 3 * 512 + 512 + 600_064 + 512
    parts = sorted((tmp_path / "to").iterdir())
    assert f"it needs {len(parts)} calls" in capsys.readouterr().out
    assert len(parts) == 3
    for part in parts:
        assert sum(path.stat().st_size for path in part.iterdir()) <= (1 << 20) - (256 << 10) - carry.tree_bytes(tree)
    (tree / "new").write_bytes(bytes(800_000))
    with pytest.raises(ValueError, match="no room for any"):
        carry.main(["pack", "--to", str(tmp_path / "to"), "--wheels", str(wheels), "--call-mib", "1"])


def test_given_exact_requirements_when_pins_are_read_then_those_of_extras_are_none(tmp_path: Path) -> None:
    requires = (
        "pydantic_core==2.41.5",
        "other (==1.0) ; extra == 'all'",
        "torch>=2",
        "x==3.0; python_version > '3'",
    )

    found = carry.pins([wheel(tmp_path, "pydantic", "2", {}, requires)])

    assert found == {"pydantic-core": "2.41.5", "x": "3.0"}


def hidden_packages() -> set[str]:
    """Modules that are installed here, but are not to be expected on a machine with a GPU."""
    there, open_ = set(), list(GPU_MACHINE_PACKAGES)
    while open_:
        name = open_.pop().lower().replace("_", "-")
        if name in there:
            continue
        there.add(name)
        try:
            requires = distribution(name).requires or []
        except ModuleNotFoundError:
            continue
        parsed = map(Requirement, requires)
        open_ += [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {
        module for module, owners in packages_distributions().items()
        if not there & {owner.lower().replace("_", "-") for owner in owners} and module not in OURS
    } | NEWER  # fmt: skip


OURS = {"benchmarks", "engine", "pipeline", "schemas", "tokenmill", "workers"}

HIDE = """
import importlib.machinery, sys
HIDDEN = frozenset({hidden!r})
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(importlib.machinery.PathFinder, name)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder()
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose Pythons see nothing but what a machine with a GPU has."""
    hidden = hidden_packages()
    assert {"structlog", "pydantic", "gguf", "orjson", "llguidance", "re2", "pytest"} <= hidden
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=sorted(hidden)))
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


def run_bare(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a value, at any depth."""
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def failures(value: Any, at: str = "") -> list[str]:
    """The paths of all parts with an error or a failed check."""
    if isinstance(value, list):
        return [each for item in value for each in failures(item, at)]
    if not isinstance(value, dict):
        return []
    mine = [f"{at}: {value.get('error', 'not ok')}"] if "error" in value or value.get("ok") is False else []
    return mine + [each for name, inner in value.items() for each in failures(inner, f"{at} / {name}")]


@pytest.mark.exhaustive
def test_given_a_bare_machine_when_all_stages_run_dry_then_every_metric_is_there_and_consistent(
    bare: dict[str, str], carried: Path, tmp_path: Path
) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    carry.unpack(carried / "a", site)

    options = ("--dry-run", "--together", "--out", str(out), "--vllm", str(site))
    done = run_bare(bare, "-m", "benchmarks.gpu", "--stage", "all", *options)

    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((out / "gpu.json").read_text())["stages"]
    assert list(stages) == list(command.STAGES)
    assert not failures(stages), failures(stages)
    assert all(math.isfinite(number) for number in numbers(stages))
    skipped = {
        name for stage in stages.values() for name, part in stage["parts"].items() if "skipped" in part
    }  # fmt: skip
    assert skipped == {"demo model"}, "no file was named"
    check_attention(stages["attention"]["parts"])
    check_steady_states(stages["serve"]["parts"])
    check_published(stages["published"]["parts"])
    check_kernels(stages["kernels"]["parts"])
    check_job(stages["mixed"]["parts"])
    check_peers(stages["peers"]["parts"])
    for part in stages["profile"]["parts"].values():
        assert 0 < part["busy_seconds"] <= part["span_seconds"] <= part["wall_seconds"]
        assert sum(part["shares"].values()) == pytest.approx(1, abs=1e-3)


def check_attention(parts: dict[str, Any]) -> None:
    (timed,) = (part for name, part in parts.items() if name.startswith("time"))
    runs = {name: run for name, run in timed["runs"].items() if "skipped" not in run}
    assert set(runs) == {"triton (ours)", "triton, fp8 cache (ours)", "torch, dense", "FlashAttention 3 of vLLM"}
    for name, run in runs.items():
        assert run["distance"] < (0.1 if "fp8" in name else 1e-5), name
        assert run["ours_is_faster_by"] == pytest.approx(run["seconds"] / runs["triton (ours)"]["seconds"], rel=1e-3)


def check_steady_states(parts: dict[str, Any]) -> None:
    cells = {name: part for name, part in parts.items() if "output_tokens" in part}
    assert len(cells) == 2 * 2 * 3, "models, forms, cells"
    for name, cell in cells.items():
        assert cell["output_tokens_per_second"] == pytest.approx(cell["output_tokens"] / cell["seconds"], rel=1e-4)
        assert cell["steps"] * 4 >= cell["output_tokens"] > 0, name
        assert 1 <= cell["mean_rows"] <= 4
        assert (cell["steps_ahead"] > 0) == ("float32" in name), name
        assert cell["steps_recorded"] == 0, "a CPU has no graphs"
        for least in cell["bound"].values():
            seconds = least["products"] + least["prompts"] + least["cache"]
            assert least["output_tokens_per_second"] == pytest.approx(least["output_tokens"] / seconds, rel=1e-3)
            rate = cell["output_tokens_per_second"]
            assert least["share"] == pytest.approx(rate / least["output_tokens_per_second"], rel=1e-3)


def check_kernels(parts: dict[str, Any]) -> None:
    products = {name: part["3 rows"] for name, part in parts.items() if name.startswith("product tiny")}
    assert set(products) == {f"product tiny {name}" for name in ("bf16", "int8 weights", "fp8, our kernel")}
    assert all(product["distance"] < 0.05 for product in products.values()), products
    assert parts["adapters"]["3 rows"]["distance"] < 1e-5
    launched = [part for name, part in parts.items() if name.startswith("launches")]
    assert [list(part) for part in launched] == [["4 tokens", "8 tokens"]] * 2
    assert all(step["steps"] == 2 for part in launched for step in part.values())


def check_published(parts: dict[str, Any]) -> None:
    assert list(parts) == ["tiny-smollm2", "tiny-gemma3"]
    for part in parts.values():
        assert part["step_rows"] == 128, "as a CPU has it where none is given"
        assert 1 <= part["mean_rows"] <= part["rows"] < 128
        rate = part["output_tokens_per_second"]
        assert part["ours_over_best"] == pytest.approx(rate / part["published_best"], rel=1e-3)
        assert part["ours_over_default"] > part["ours_over_best"]
        assert 0 < part["bound"]["this batch"]["share"] < 1


def check_job(parts: dict[str, Any]) -> None:
    for part in parts.values():
        assert part["done"] == part["requests"] == 12
        assert 0 < part["seconds_until_none_waited"] <= part["seconds"]
        assert 0 < part["bound"]["share"] < 1


def check_peers(parts: dict[str, Any]) -> None:
    rates = {name: part["output_tokens_per_second"] for name, part in parts.items() if "peak_rss_bytes" in part}
    assert set(rates) == {"tokenmill", "vllm", "transformers"}
    ratio = rates["tokenmill"] / rates["transformers"]
    assert parts["ratios"]["ours / transformers"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.exhaustive
def test_given_a_bare_machine_when_a_stage_runs_then_all_is_imported_and_the_file_says_that_there_is_no_gpu(
    bare: dict[str, str], tmp_path: Path
) -> None:
    script = "import sys, engine.engine, engine.quant.quantize\n"
    script += "import engine.embedding.engine, engine.speculative.proposers.eagle\n"
    script += "from benchmarks.gpu.__main__ import main\n"
    script += f"sys.exit(main(['--stage', 'machine', '--together', '--out', {str(tmp_path)!r}]))"

    done = run_bare({**bare, "CUDA_VISIBLE_DEVICES": ""}, "-c", script)

    stages = report.read(tmp_path)["stages"]
    assert stages, done.stderr
    assert "torch sees no GPU" in stages["machine"]["error"]
    assert done.returncode == 1
