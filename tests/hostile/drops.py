"""Attacks by files in the inbox: links, pipes, sidecars and names."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

from tests.hostile.attack import Answer, Attack, Expected, Target
from tests.hostile.client import line
from tests.hostile.objects import Objects, dead_letter_about, objects_of, outcome_of

SECRET_KEY: Final = "aws_secret_key_HOSTILE"
GOOD_SECONDS: Final = 45.0

GOOD_FILE: Final = Expected("job", "completed", required=True)


def _dead_letter(message: str) -> tuple[Expected, ...]:
    return (Expected("dead_letter", "written", message=message, required=True), GOOD_FILE)


def good_file(objects: Objects, name: str) -> Answer:
    """Drops a good file, and waits for its job: the watcher must still take files."""
    before = objects.jobs()
    objects.write(f"incoming/{name}.jsonl", line(name))
    until = time.monotonic() + GOOD_SECONDS
    while time.monotonic() < until:
        for job in objects.jobs() - before:
            found = outcome_of(objects, job)
            if found.status != "open" and name in (objects.read(f"jobs/{job}/job.json") or b"").decode():
                return found
        time.sleep(1.0)
    return Answer("job", "open", message=f"the good file {name} was not taken within {GOOD_SECONDS:.0f} s")


def _incoming(target: Target) -> Path:
    return Path(target.root) / "incoming"


def linked_input(target: Target) -> list[Answer]:
    (_incoming(target) / "linked.jsonl").symlink_to("/etc/passwd")
    objects = objects_of(target)
    return [dead_letter_about(objects, "linked.jsonl"), good_file(objects, "after-link")]


def linked_sidecar(target: Target) -> list[Answer]:
    """The sidecar is a link to a JSON file that only the service may read: its keys must not leak."""
    secret = Path(target.scratch) / "secret.json"
    secret.write_text(json.dumps({SECRET_KEY: "x"}))
    objects = objects_of(target)
    (_incoming(target) / "linked-sidecar.job.json").symlink_to(secret)
    objects.write("incoming/linked-sidecar.jsonl", line("linked-sidecar"))
    found = dead_letter_about(objects, "linked-sidecar.")
    leaked = SECRET_KEY in json.dumps(list(objects.dead_letters()))
    return [
        found,
        Answer("check", "leaked" if leaked else "not leaked", message="a key of the linked file, in a dead letter"),
    ]


def pipe(target: Target) -> list[Answer]:
    os.mkfifo(_incoming(target) / "pipe.jsonl")
    objects = objects_of(target)
    return [dead_letter_about(objects, "pipe.jsonl"), good_file(objects, "after-pipe")]


def link_to_pipe(target: Target) -> list[Answer]:
    """A sidecar that is a link to a pipe: a process that opens it waits for ever."""
    os.mkfifo(Path(target.scratch) / "fifo")
    (_incoming(target) / "held.job.json").symlink_to(Path(target.scratch) / "fifo")
    objects = objects_of(target)
    objects.write("incoming/held.jsonl", line("held"))
    return [dead_letter_about(objects, "held."), good_file(objects, "after-held")]


def pipe_as_sidecar(target: Target) -> list[Answer]:
    os.mkfifo(_incoming(target) / "piped.job.json")
    objects = objects_of(target)
    objects.write("incoming/piped.jsonl", line("piped"))
    return [dead_letter_about(objects, "piped."), good_file(objects, "after-piped")]


def sidecar_bombs(target: Target) -> list[Answer]:
    """Deep, large, and no object; each is refused, and the next good file is taken."""
    objects, found = objects_of(target), []
    bombs = {"deep": b'{"a":' * 100_000, "large": b'{"metadata": [' + b"[]," * 8_000_000 + b"[]]}", "none": b"[1]"}
    for name, data in bombs.items():
        objects.write(f"incoming/bomb-{name}.job.json", data)
        objects.write(f"incoming/bomb-{name}.jsonl", line(name))
    found += [dead_letter_about(objects, f"bomb-{name}.") for name in bombs]
    return [*found, good_file(objects, "after-bombs")]


def names(target: Target) -> list[Answer]:
    """Names with traversal, markup and line ends, and no UTF-8 where a folder allows it."""
    objects = objects_of(target)
    given = ["..%2f..%2fescape.jsonl", "..\\..\\escape.jsonl", "a" * 200 + ".jsonl", "\u202egnp.jsonl"]
    # moto takes no line ends in keys, and a folder has no "..".
    given.append("a\nb.jsonl" if target.form == "serve" else "../../escape.jsonl")
    for name in given:
        objects.write(f"incoming/{name}", line("named"))
    if target.form == "serve":
        (Path(os.fsdecode(os.fsencode(_incoming(target)) + b"/\xff\xfe.jsonl"))).write_bytes(line("bytes"))
    found = good_file(objects, "after-names")
    escaped = [str(path) for path in Path(target.scratch).parent.rglob("*escape*") if "incoming" not in path.parts]
    return [found, Answer("check", "escaped" if escaped else "held", message=", ".join(escaped))]


def unknown_folder(target: Target) -> list[Answer]:
    """A folder that is no tier."""
    objects = objects_of(target)
    objects.write("incoming/root/x.jsonl", line("x"))
    return [dead_letter_about(objects, "root/x.jsonl"), good_file(objects, "after-folder")]


TABLE: Final = (
    Attack("drop: symbolic link as input", linked_input, _dead_letter("link"), ("serve",)),
    Attack(
        "drop: symbolic link as sidecar", linked_sidecar,
        (Expected("dead_letter", "written", message="link|regular|file", required=True),
         Expected("check", "not leaked", required=True)), ("serve",),
    ),
    Attack("drop: FIFO as input", pipe, (Expected("dead_letter", "written|none"), GOOD_FILE), ("serve",)),
    Attack("drop: FIFO as sidecar", pipe_as_sidecar, _dead_letter("regular|file|pipe|FIFO"), ("serve",)),
    Attack("drop: link to a FIFO as sidecar", link_to_pipe, _dead_letter("link|regular|file"), ("serve",)),
    Attack("drop: sidecar bombs", sidecar_bombs, _dead_letter("json|nest|object|bytes|large|deep")),
    Attack("drop: names with traversal", names, (Expected("check", "held", required=True), GOOD_FILE)),
    Attack("drop: folder that is no tier", unknown_folder, _dead_letter("tier|folder")),
)  # fmt: skip
