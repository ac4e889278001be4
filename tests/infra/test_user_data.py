"""Tests of a worker machine's start-up script, with stand-ins for the programs that need root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "infra/terraform/modules/workers/user_data.sh.tftpl"


class Machine:
    """A folder instead of /, with stand-ins for disks. `missing`: programs that it lacks and can't install."""

    def __init__(self, root: Path, disks: int, missing: tuple[str, ...] = ()) -> None:
        self.root = root
        for folder in ("etc/ecs", "dev/disk/by-id", "bin", "mnt"):
            (root / folder).mkdir(parents=True)
        for number in range(disks):
            disk = root / f"dev/nvme{number}n1"
            disk.touch()
            for name in ("", "_1"):  # each disk has two names
                link = root / f"dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{number}{name}"
                link.symlink_to(disk)
        for program in ("mdadm", "mkfs.xfs", "mount", "install", "dnf"):
            if program not in missing:
                fails = "exit 1" if program == "dnf" else ""
                self._program(program, f'echo "{program} $*" >>{root}/said\n{fails}')

    def _program(self, name: str, body: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def start(self) -> list[str]:
        """Run the script; returns the commands that it ran, with paths as on a machine."""
        script = TEMPLATE.read_text(encoding="utf-8").replace("$${", "${")
        script = script.replace("${cluster}", "tokenmill-chat").replace("${stop_seconds}", "110")
        for path in ("/etc/ecs", "/mnt/cache", "/dev/"):
            script = script.replace(path, f"{self.root}{path}")
        script = script.replace(f">{self.root}/dev/null", ">/dev/null")
        # Only coreutils, findutils and the stand-ins: the test's machine may have an mdadm of its own.
        for program in ("cat", "find", "sort", "mkdir", "readlink", "bash"):
            found = next(Path(part) / program for part in ("/bin", "/usr/bin") if (Path(part) / program).exists())
            if not (self.root / "bin" / program).exists():
                (self.root / "bin" / program).symlink_to(found)
        environment = {**os.environ, "PATH": str(self.root / "bin")}
        subprocess.run(["/bin/bash", "-c", script], env=environment, check=True, capture_output=True)
        return (self.root / "said").read_text().replace(str(self.root), "").splitlines()


READY = "install -d -o 10001 -g 10001 -m 0750 /mnt/cache/tokenmill /mnt/cache/scratch"


@pytest.mark.parametrize(
    ("disks", "missing", "done"),
    [
        (0, (), []),
        (1, (), ["mkfs.xfs -f /dev/nvme0n1", "mount -o noatime /dev/nvme0n1 /mnt/cache"]),
        (
            2,
            (),
            ["mdadm --create /dev/md0 --level=0 --force --raid-devices=2 /dev/nvme0n1 /dev/nvme1n1",
             "mkfs.xfs -f /dev/md0", "mount -o noatime /dev/md0 /mnt/cache"],
        ),
        (
            2,
            ("mdadm",),
            ["dnf install -y mdadm", "mkfs.xfs -f /dev/nvme0n1", "mount -o noatime /dev/nvme0n1 /mnt/cache"],
        ),
    ],
    ids=["no disk", "one", "two", "two, and nothing can be installed"],
)  # fmt: skip
def test_given_a_machines_disks_when_it_starts_then_there_is_a_cache_for_our_user_and_it_joins_its_cluster(
    tmp_path: Path, disks: int, missing: tuple[str, ...], done: list[str]
) -> None:
    machine = Machine(tmp_path, disks, missing)
    assert machine.start() == [*done, READY]
    config = dict(line.split("=", 1) for line in (tmp_path / "etc/ecs/ecs.config").read_text().splitlines())
    assert config["ECS_CLUSTER"] == "tokenmill-chat"
    assert config["ECS_CONTAINER_STOP_TIMEOUT"] == "110s"
    assert config["ECS_ENABLE_SPOT_INSTANCE_DRAINING"] == "true"
