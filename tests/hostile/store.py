"""Attacks on the store and on workers: a job's damaged objects, and stopped workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.hostile.attack import Answer, Attack, Expected, Target
from tests.hostile.client import CHAT, batch_end, chat, create_batch, line, request, upload
from tests.hostile.objects import Objects, objects_of
from tests.waiting import HANG_SECONDS

ROWS: Final = 100
TOKENS: Final = 40
PLAN_SECONDS: Final = 40.0
ENDS_SECONDS: Final = 400.0
"""Timeout of a job that must end: three attempts read a shard before it counts as lost."""
LEFT_SECONDS: Final = 60.0
"""Timeout of a job that may stay open."""
OTHER_SECONDS: Final = 150.0
STOPPED_SECONDS: Final = 16.0
STORMS: Final = 3

Damage = Callable[[Objects, str], bool]
"""Damages the objects of a job, by its prefix; False: they do not exist yet."""


def _batch_of(target: Target, rows: int, tokens: int, key: str) -> tuple[str | None, Answer]:
    lines = (line(f"{key}-{row}", body=chat(f"number {row} of {key}", tokens, ignore_eos=True)) for row in range(rows))
    file, answer = upload(target, b"".join(lines), "rows.jsonl", key=key)
    return (None, answer) if file is None else create_batch(target, file, key=key)


def _damaged(target: Target, damage: Damage, seconds: float = LEFT_SECONDS) -> list[Answer]:
    """How the damaged job ended, and whether another tenant's batch, made after the damage, was computed."""
    objects = objects_of(target)
    victim, answer = _batch_of(target, ROWS, TOKENS, "bad")
    if victim is None:
        return [answer]
    until = time.monotonic() + PLAN_SECONDS
    while not damage(objects, f"jobs/{victim}/"):
        if time.monotonic() > until:
            return [Answer("check", "not damaged", message=f"{victim} has not the objects that would be damaged")]
        time.sleep(0.2)
    other, answer = _batch_of(target, 4, 2, "other")
    if other is None:
        return [answer]
    found = batch_end(target, other, key="other", seconds=OTHER_SECONDS)
    return [
        Answer("check", f"other batch {found.status}", found.code, found.message),
        batch_end(target, victim, seconds=seconds),
    ]


def _last(objects: Objects, prefix: str, part: str) -> str | None:
    """The last key that holds `part`."""
    return max((key for key in objects.list(prefix) if part in key), default=None)


def _cut(part: str) -> Damage:
    """Cuts the last object whose key holds `part` in half."""

    def damage(objects: Objects, job: str) -> bool:
        key = _last(objects, job, part)
        data = None if key is None else objects.read(key)
        if key is None or data is None or not _planned(objects, job):
            return False
        objects.write(key, data[: len(data) // 2])
        return True

    return damage


def _planned(objects: Objects, job: str) -> bool:
    return any("/plan/" in key for key in objects.list(job))


def shard_cut(target: Target) -> list[Answer]:
    return _damaged(target, _cut("/shards/"), ENDS_SECONDS)


def shard_gone(target: Target) -> list[Answer]:
    def damage(objects: Objects, job: str) -> bool:
        key = _last(objects, job, "/shards/")
        if key is None or not _planned(objects, job):
            return False
        objects.remove(key)
        return True

    return _damaged(target, damage, ENDS_SECONDS)


def plan_cut(target: Target) -> list[Answer]:
    return _damaged(target, _cut("/plan/"))


def job_cut(target: Target) -> list[Answer]:
    return _damaged(target, _cut("/job.json"))


def attempt_cut(target: Target) -> list[Answer]:
    return _damaged(target, _cut("/attempt-"), ENDS_SECONDS)


def closing_cut(target: Target) -> list[Answer]:
    def damage(objects: Objects, job: str) -> bool:
        if not _planned(objects, job):
            return False
        objects.write(f"{job}closing.json", b'{"version": 1, "kind": "can')
        objects.write(f"close/{job.split('/')[1]}", b"")
        return True

    return _damaged(target, damage)


def foreign_part(target: Target) -> list[Answer]:
    """A whole part of another job as a part of this one."""
    other, answer = _batch_of(target, 4, 1, "other")
    if other is None:
        return [answer]
    answer = batch_end(target, other, key="other", seconds=OTHER_SECONDS)
    if answer.status != "completed":
        return [answer]

    def damage(objects: Objects, job: str) -> bool:
        shard, part = _last(objects, job, "/shards/"), _last(objects, f"jobs/{other}/results/", "part-")
        data = None if part is None else objects.read(part)
        if shard is None or data is None or not _planned(objects, job):
            return False
        objects.write(f"{job}results/part-{shard[-13:-8]}.parquet", data)
        return True

    return _damaged(target, damage)


def stopped_worker(target: Target) -> list[Answer]:
    """SIGSTOP for longer than a worker may be silent; a chat that comes meanwhile is answered in the end."""
    os.kill(target.pids["worker"], signal.SIGSTOP)
    begun = time.monotonic()
    try:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

        with ThreadPoolExecutor(1) as pool:
            time.sleep(1.0)
            waiting = pool.submit(request, target, "POST", CHAT, chat("are you there"), key="other", seconds=90)
            time.sleep(max(0.0, begun + STOPPED_SECONDS - time.monotonic()))
            os.kill(target.pids["worker"], signal.SIGCONT)
            return [waiting.result()]
    finally:
        os.kill(target.pids["worker"], signal.SIGCONT)


def terminated_workers(target: Target) -> list[Answer]:
    """A second worker that gets SIGTERM again and again: while it starts, when it serves, and twice at once."""
    drawn, found = random.Random(target.seed), []
    for number in range(STORMS):
        log = Path(target.scratch) / f"second-worker-{number}.log"
        with log.open("wb") as stream:
            worker = subprocess.Popen(
                target.worker_command, stdout=stream, stderr=stream, env={**os.environ, **target.variables}
            )
        time.sleep(drawn.uniform(0.5, 14.0))
        for _ in range(drawn.choice((1, 2, 5))):
            worker.send_signal(signal.SIGTERM)
            time.sleep(drawn.uniform(0.0, 0.3))
        try:
            code = worker.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            worker.kill()
            code = worker.wait()
        output = log.read_text(errors="replace")
        orderly = code in (0, 130, -signal.SIGTERM) and "Traceback" not in output
        found.append(Answer("check", "ended in order" if orderly else f"exit {code}", message=output[-300:]))
    return found


OTHER: Final = Expected("check", "other batch completed", required=True)
FAILED: Final = (
    OTHER, Expected("job", "failed|rows_failed", message=r"read|damaged|shard|lost|belongs"),
)  # fmt: skip
LEFT: Final = (*FAILED, Expected("job", "open|cancelled"), Expected("http", "5..", message="."))
"""A job whose own record can't be read can't be ended: it is skipped, and others continue."""

TABLE: Final = (
    Attack("store: shard cut in half", shard_cut, FAILED, limit_seconds=HANG_SECONDS),
    Attack("store: shard removed", shard_gone, FAILED, limit_seconds=HANG_SECONDS),
    Attack(
        "store: attempt record cut", attempt_cut, (*FAILED, Expected("job", "completed")), limit_seconds=HANG_SECONDS
    ),
    Attack("store: plan segment cut", plan_cut, LEFT, limit_seconds=400, leaves_jobs=True),
    Attack("store: closing.json cut", closing_cut, LEFT, limit_seconds=400, leaves_jobs=True),
    Attack("store: job.json cut", job_cut, LEFT, limit_seconds=400, leaves_jobs=True),
    Attack("store: part of another job", foreign_part, LEFT, limit_seconds=400, leaves_jobs=True),
    Attack("process: worker stopped for 16 s", stopped_worker, (Expected("http", "200"),), ("cluster",)),
    Attack(
        "process: SIGTERM storm of a second worker", terminated_workers, (Expected("check", "ended in order"),),
        ("cluster",), limit_seconds=300,
    ),
)  # fmt: skip
