"""The report of a run as JSON and as Markdown, compared with an earlier run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.cluster.faults_report import machine
from tests.hostile.attack import as_json
from tests.hostile.judging import MIB, ttft_quantile
from tests.hostile.run import Outcome

MESSAGE_CHARS: Final = 140


def document(outcomes: Sequence[Outcome], worker: str, load_before: Sequence[float]) -> dict[str, Any]:
    """All runs; memory in MiB."""
    return {
        "machine": machine(),
        "load_average": {"before": list(load_before), "after": list(os.getloadavg())},
        "worker": worker,
        "seed": outcomes[0].options.seed,
        "forms": {outcome.form: _form(outcome) for outcome in outcomes},
    }


def _form(outcome: Outcome) -> dict[str, Any]:
    return {
        "seconds": round(outcome.seconds, 1),
        "quiet": _ttfts(outcome.quiet),
        "attacked": _ttfts(outcome.attacked),
        "memory_mib": {
            name: {
                "start": before // MIB,
                "peak": max((result.peaks.get(name, 0) for result in outcome.results), default=0) // MIB,
                "children_peak": max((result.child_peaks.get(name, 0) for result in outcome.results), default=0) // MIB,
                "end": outcome.memory_after.get(name, 0) // MIB,
            }
            for name, before in outcome.memory_before.items()
        },
        "mutated_parquet_files": {
            "uploaded": outcome.options.uploaded_files, "dropped": outcome.options.dropped_files
        },
        "criteria": [
            {"criterion": one.criterion, "holds": one.holds, "found": one.found} for one in outcome.verdicts()
        ],
        "restarts_by_hand": outcome.restarts,
        "attacks": {
            result.attack.name: {
                "expected": [str(one) for one in result.attack.expected],
                "answers": as_json(result.answers),
                "wrong": result.wrong,
                "deaths": [f"{death.name}: exit {death.code}" for death in result.deaths],
                "removed_by_hand": result.removed,
                "seconds": round(result.ended - result.begun, 1),
                "ttft": _ttfts(outcome.samples_during(result)),
                "peak_mib": {name: peak // MIB for name, peak in result.peaks.items()},
                "children_peak_mib": {name: peak // MIB for name, peak in result.child_peaks.items() if peak},
            }
            for result in outcome.results
        },
    }  # fmt: skip


def _ttfts(samples: Sequence[Any]) -> dict[str, float | int | None]:
    if not samples:
        return {"chats": 0, "failed": 0, "p50": None, "p95": None, "worst": None}
    return {
        "chats": len(samples),
        "failed": sum(sample.error is not None for sample in samples),
        **{name: round(ttft_quantile(samples, q), 3) for name, q in (("p50", 0.5), ("p95", 0.95), ("worst", 1.0))},
    }


def markdown(found: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """Tables of the criteria and the attacks; with an earlier run, its columns first."""
    runs = [("before", before), ("after", found)] if before else [("found", found)]
    lines = [_loads(name, run) for name, run in runs if run is not None]
    for form in found["forms"]:
        lines += ["", f"### {form}", ""]
        lines += [*_criteria(form, runs), "", *_attacks(form, runs)]
    return "\n".join(lines) + "\n"


def _loads(name: str, run: Mapping[str, Any]) -> str:
    load = run["load_average"]
    return (
        f"- {name}: {run['machine']['cpu']}, {run['machine']['cores']} cores, seed {run['seed']}, worker "
        f"{run['worker']}; load average {load['before'][0]:.1f} before, {load['after'][0]:.1f} after"
    )


def _criteria(form: str, runs: Sequence[tuple[str, Mapping[str, Any] | None]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for at, (_, run) in enumerate(runs):
        for one in (run or {"forms": {}})["forms"].get(form, {"criteria": []})["criteria"]:
            row = found.setdefault(one["criterion"], ["-"] * len(runs))
            row[at] = f"{'holds' if one['holds'] else '**broken**'}: {_cell(one['found'])}"
    head = ["criterion", *(name for name, _ in runs)]
    return _table(head, [[criterion, *row] for criterion, row in found.items()])


def _attacks(form: str, runs: Sequence[tuple[str, Mapping[str, Any] | None]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for at, (_, run) in enumerate(runs):
        for name, one in (run or {"forms": {}})["forms"].get(form, {"attacks": {}})["attacks"].items():
            row = found.setdefault(name, ["-"] * (1 + 2 * len(runs)))
            row[0] = _cell("; ".join(one["expected"]))  # as the later run has it
            row[1 + 2 * at : 3 + 2 * at] = [_answers(one), _ttft(one["ttft"])]
    head = ["attack", "expected"]
    for name, _ in runs:
        head += [f"answers, {name}", f"TTFT p95, {name} (s)"]
    return _table(head, [[_cell(name), *row] for name, row in found.items()])


def _answers(one: Mapping[str, Any]) -> str:
    """What came, in a cell."""
    parts = ["as expected" if one["wrong"] is None else f"**not as expected**: {_cell(one['wrong'])}"]
    if one["deaths"]:
        parts.append(f"{len(one['deaths'])} deaths ({_cell(', '.join(sorted(set(one['deaths']))))})")
    if one["removed_by_hand"]:
        parts.append(f"by hand: {one['removed_by_hand']}")
    return "; ".join(parts)


def _ttft(one: Mapping[str, Any]) -> str:
    if one["p95"] is None:
        return "-"
    return f"{one['p95']:.2f}" + (f", {one['failed']} failed" if one["failed"] else "")


def _cell(text: str) -> str:
    """Text that stays in one cell of a table."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= MESSAGE_CHARS else shown[:MESSAGE_CHARS] + "…"
    return "".join(c if c.isprintable() else "?" for c in shown).replace("|", "\\|").replace("<", "&lt;")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'--|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
