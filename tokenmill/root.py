"""The root that holds all jobs of an installation: a folder, or a bucket with a prefix."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pipeline.adapters.folder.durable import private_disk
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.store_clock import StoreClock
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.intake import Intake, IntakeMetrics, IntakeSettings
from pipeline.inputs.open import PinnedInput, open_pinned, pin_uri
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.maintenance.retention import RetentionSettings
from pipeline.ports import World
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.tracing import NO_TRACES, Traces
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Tier
from tokenmill.errors import UserError

if TYPE_CHECKING:
    from pipeline.adapters.s3.client import S3Connection
    from pipeline.adapters.s3.store import S3Store
    from schemas.settings.settings import Settings

S3 = "s3://"

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Root:
    """An opened root.

    Attributes:
        url: as given.  world: its store, the store's time, and this machine's randomness.
        s3: a client for S3, where the root or settings need one; else inputs there use AWS's default configuration.
        ingest_metrics: metrics of this process's ingest.
    """

    url: str
    world: World
    s3: S3Connection | None
    ingest_metrics: IntakeMetrics = field(default_factory=IntakeMetrics)

    @property
    def folder(self) -> Path | None:
        """The folder, if it is one."""
        return None if self.url.startswith(S3) else Path(self.url)

    def ledger(self, job: str) -> JobLedger:
        """The job of this id."""
        return JobLedger(self.world.store, f"{JOBS}{job}/")

    def pin(self, uri: str) -> InputRef:
        """The current state of the input at the URI."""
        return pin_uri(uri, s3=self.s3)

    def open_input(self, pinned: InputRef, on_read: Callable[[], None] | None = None) -> PinnedInput:
        """The pinned input, ready to be read; see `open_pinned`."""
        return open_pinned(pinned, self.s3, on_read)


@contextmanager
def open_root(
    url: str | None, settings: Settings, *, read_only: bool = False, traces: Traces = NO_TRACES
) -> Iterator[Root]:
    """Open the root at a path or an s3:// URL; by default the one in the settings. A folder and its new files are
    accessible to their owner only, because they hold prompts, answers and hashes of keys.

    Args:
        read_only: nothing is created, not even a missing folder, and a bucket isn't probed by writing.

    Raises:
        UserError: none is named.  StoreError: it can't be used.
    """
    url = url or settings.root
    if not url:
        raise UserError("no root is named; give --root FOLDER or --root s3://BUCKET/PREFIX, or set TOKENMILL_ROOT")
    s3 = s3_connection(settings) if url.startswith(S3) or settings.s3.endpoint else None
    if url.startswith(S3):
        from pipeline.adapters.s3.store import S3Store
        from pipeline.adapters.s3.url import split_url

        with S3Store(*split_url(url), s3 or s3_connection(settings), read_only=read_only) as bucket:
            yield Root(url, _world(bucket, read_only, traces), s3)
        return
    folder = Path(url).expanduser()
    with FolderStore(folder, read_only=read_only, disk=private_disk(folder)) as store:
        yield Root(str(store.root), _world(store, read_only, traces), s3)


def warn_if_readable_by_all(root: Root) -> None:
    """Log a warning if every user of this machine may enter the folder."""
    if root.folder is not None and (mode := stat.S_IMODE(root.folder.stat().st_mode)) & stat.S_IRWXO:
        logger.warning(
            "root_readable_by_all", root=str(root.folder), mode=f"{mode:04o}", advice=f"run: chmod 700 {root.folder}"
        )


def _world(store: FolderStore | S3Store, read_only: bool, traces: Traces) -> World:
    """The root's world; a read-only one has no scratch folder."""
    random = SystemRandomness()
    # A folder's times are this machine's own.
    clock = SystemClock() if isinstance(store, FolderStore) else StoreClock(SystemClock(), store.time_offset)
    scratch = Path(".") if read_only else store.scratch
    return World(store, clock, random, scratch, traces)


def request_executor(root: Root, threads: int) -> Executor:
    """An executor for this many concurrent requests to the root's store; a folder, which is fast, needs no threads."""
    return InlineExecutor() if root.folder else ThreadPoolExecutor(threads, thread_name_prefix="store")


def s3_connection(settings: Settings) -> S3Connection:
    """A connection to S3 by the settings."""
    from pipeline.adapters.s3.client import S3Connection
    from pipeline.adapters.s3.settings import S3Settings

    return S3Connection(S3Settings(**settings.s3.model_dump()))


def open_intake(root: Root, settings: Settings) -> Intake:
    """The intake, which creates jobs from ingest sources."""
    return Intake(root.world, intake_settings(settings), root.ingest_metrics)


def intake_settings(settings: Settings) -> IntakeSettings:
    """The defaults and limits of ingested jobs."""
    return IntakeSettings(
        default_model=settings.default_model,
        default_tier=settings.default_tier,
        caps={tier: settings.max_output_tokens.of(tier) for tier in Tier},
        default_max_tokens=settings.default_max_tokens,
        limits=settings.limits,
        plan=settings.plan,
        max_tenant_tokens=settings.max_tenant_tokens,
        noticed=frozenset(settings.gateway.webhooks.endpoints),
    )


def retention_settings(
    settings: Settings,
    outputs: timedelta | None = None,
    dead_letters: timedelta | None = None,
    intake: timedelta | None = None,
) -> RetentionSettings:
    """Retention times: the given ones, else those of the settings."""
    chosen = settings.retention
    return RetentionSettings(
        outputs=chosen.outputs if outputs is None else outputs,
        dead_letters=chosen.deadletters if dead_letters is None else dead_letters,
        intake=chosen.intake if intake is None else intake,
        answers=settings.answers,
    )
