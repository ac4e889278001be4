"""`tokenmill quantize`: a quantized checkpoint of a model, and what that costs in quality."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, Json, Threads
from tokenmill.errors import UserError
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from engine.quant.quantize import QuantizationReport
    from engine.quant.writing import Scheme
    from workers.model.quality import QualityComparison
    from workers.text.tokenizer import TokenIds

Target = Literal["int8", "int4", "fp8"]
Method = Literal["rtn", "smoothquant", "gptq"]

WINDOW = 512
HELD_OUT_SHARE = 4
"""One in so many windows of a calibration text is held out for the report."""


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in 'tokenmill run'.")],
    to: Annotated[
        Target,
        typer.Option(
            help="int8: weights and activations (W8A8); int4: weights in groups, which costs much quality unless "
            "--method gptq and --asymmetric are given; fp8: weights and activations."
        ),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new folder for the checkpoint.")],
    method: Annotated[
        Method,
        typer.Option(
            help="rtn: to nearest; smoothquant: outliers of activations move into weights first; gptq: columns make up "
            "for each other's rounding."
        ),
    ] = "rtn",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text (requests, or lines with text, or .txt) that smoothquant and gptq run over. A quarter of it is "
            "held out for the report; with rtn all of it is.",
        ),
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text for the report instead, of the same kinds.")
    ] = None,
    group: Annotated[int, typer.Option(help="int4: columns that share a scale: 32, 64 or 128.")] = 32,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="int4: with zero points: better by much, and read by fewer programs.")
    ] = False,
    windows: Annotated[int, typer.Option(min=4, help="At most so many windows of 512 tokens of each text.")] = 64,
    threads: Threads = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Write a quantized checkpoint of MODEL in the format of compressed-tensors (vLLM and transformers read it, too).

    Tensors are quantized one by one. With a text the report says what it costs: perplexity before and after, and how
    far log-probabilities moved, on text that was not calibrated with.
    """
    from engine.quant.writing import Scheme
    from tokenmill.config.job_options import choose_model
    from tokenmill.processes.logging import log_to_stderr
    from workers.model.loaded_model import model_path

    log_to_stderr()
    if method == "smoothquant" and (calibration is None or to != "int8"):
        raise UserError("--method smoothquant is for --to int8, and needs --calibration FILE")
    if method == "gptq" and (calibration is None or to == "fp8"):
        raise UserError("--method gptq is for --to int4 and int8, and needs --calibration FILE")
    if group not in (32, 64, 128) or (group != 32 and to != "int4"):
        raise UserError(f"--group {group}: give 32, 64 or 128, with --to int4")
    if asymmetric and to != "int4":
        raise UserError("--asymmetric is for --to int4")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists; choose another folder for the checkpoint")
    path = model_path(choose_model(model, read_settings().model_cache).source.path)
    used, scored = _texts(path, method, calibration, held_out, windows)
    try:
        report = _make(path, out, Scheme(to, group, not asymmetric), method, used, scored, threads)
    except OSError as error:
        raise UserError(f"{out} can't be written: {error}") from error
    if as_json:
        output.print_json(report)
    else:
        _show(out, report)


def _make(
    path: Path,
    out: Path,
    scheme: Scheme,
    method: Method,
    used: list[TokenIds],
    scored: list[TokenIds],
    threads: int | None,
) -> dict[str, Any]:
    """Write the checkpoint to a temporary folder next to `out` and rename it when complete; returns its report."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as made:
        folder = Path(made) / "checkpoint"
        folder.mkdir()
        written = _write(path, folder, scheme, method, used, threads)
        _copy_tokenizer(path, folder)
        comparison = _compare(path, folder, scored, threads) if scored else None
        report = _report(path, scheme, method, written, comparison)
        (folder / "quantization.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return report


def _texts(
    path: Path, method: Method, calibration: Path | None, held_out: Path | None, max_windows: int
) -> tuple[list[TokenIds], list[TokenIds]]:
    """The windows for calibration, and others for the report."""
    from workers.model.quality import read_windows
    from workers.text.tokenizer import Tokenizer

    if calibration is None and held_out is None:
        return [], []
    tokenizer = Tokenizer.load(path)
    found = [] if calibration is None else read_windows(calibration, tokenizer, WINDOW, max_windows)
    if held_out is not None:
        return found, read_windows(held_out, tokenizer, WINDOW, max_windows)
    if method == "rtn":
        return [], found
    if len(found) < 2:
        raise UserError(
            f"{calibration} fills {len(found)} window of {WINDOW} tokens; two are needed, or --held-out FILE"
        )
    held_out_windows = max(1, len(found) // HELD_OUT_SHARE)
    return found[:-held_out_windows], found[-held_out_windows:]


def _write(
    path: Path, folder: Path, scheme: Scheme, method: Method, used: list[TokenIds], threads: int | None
) -> QuantizationReport:
    import torch

    from engine.engine import resolve_device, resolve_dtype
    from engine.errors import UnsupportedModel
    from engine.quant.quantize import gptq_weights, smoothing_factors, write_quantized

    if threads is not None:
        torch.set_num_threads(threads)
    texts = [ids.tolist() for ids in used]
    if used:
        output.say(f"calibrating with {len(used)} windows of {WINDOW} tokens")

    def progress(done: int, of: int) -> None:
        if done % 100 == 0 or done == of:
            output.say(f"{done} of {of} tensors")

    by = ready = None
    if method == "smoothquant":
        by = smoothing_factors(path, texts, resolve_dtype("auto", resolve_device("auto")))
    elif method == "gptq":
        ready = gptq_weights(path, texts, scheme, lambda done, of: output.say(f"{done} of {of} products calibrated"))
    written = write_quantized(path, folder, scheme, by, ready, progress)
    if not written.modules:
        raise UnsupportedModel(
            f"{path} can't be quantized to {scheme.target}: no linear layer has columns that fill whole groups of "
            f"{scheme.rounding.group}; take int8"
        )
    return written


def _copy_tokenizer(path: Path, folder: Path) -> None:
    from workers.model.loaded_model import MEANING_FILES
    from workers.text.tokenizer import Tokenizer

    if path.is_file():
        Tokenizer.load(path).save(folder)
        return
    for pattern in MEANING_FILES:
        for file in path.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _compare(path: Path, folder: Path, scored: list[TokenIds], threads: int | None) -> QualityComparison:
    from engine import CacheConfig, Engine, EngineConfig, ScheduleConfig
    from workers.model.quality import TokenScores, compare, token_scores

    config = EngineConfig(
        threads=threads,
        max_model_len=WINDOW,
        cache=CacheConfig(sequences=len(scored), tokens_per_sequence=WINDOW, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=min(32, len(scored))),
    )

    def scores(model: Path, what: str) -> TokenScores:
        output.say(f"scoring {len(scored)} windows with {what}")
        return token_scores(Engine.load(model, config), scored)

    return compare(scores(path, "the model as it was"), scores(folder, "the quantized one"))


def _report(
    path: Path, scheme: Scheme, method: Method, written: QuantizationReport, comparison: QualityComparison | None
) -> dict[str, Any]:
    return {
        "model": path.name,
        "to": scheme.target,
        "method": method,
        "group": scheme.rounding.group,
        "symmetric": scheme.symmetric,
        **asdict(written),
        "quality": None if comparison is None else asdict(comparison),
    }


def _show(out: Path, report: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [
        ("linear layers quantized", output.count(report["modules"])),
        ("left as they were", output.count(len(report["kept"]))),
        ("size", f"{output.size(report['num_bytes'])} of {output.size(report['dense_bytes'])}"),
        ("error of the weights", f"{report['error']:.2%}"),
    ]
    if (quality := report["quality"]) is None:
        output.say("no text was given (--calibration or --held-out), so its quality was not measured")
    else:
        rows += [
            ("perplexity before", f"{quality['before']:.3f} over {quality['tokens']:,} tokens"),
            ("perplexity after", f"{quality['after']:.3f} ({quality['after'] / quality['before'] - 1:+.2%})"),
            ("log-probability moved by", f"{quality['distance']:.4f} a token"),
            ("same first choice", f"{quality['same_greedy']:.1%}"),
        ]
    output.stdout().print(output.table(str(out), ["", "value"], rows, right=["value"]))
