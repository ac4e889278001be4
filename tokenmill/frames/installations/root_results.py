"""Results of a job that has ended, from its root."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger.ledger import part_key
from pipeline.results.verification import check_files
from tokenmill.errors import UserError
from tokenmill.frames.jobs.results import result_columns
from tokenmill.frames.tasks.task import Task
from tokenmill.root import open_root
from tokenmill.settings import read_settings


def read_from_root(root_url: str, job: str, task: Task) -> pa.Table:
    """The columns of the job's results that the task needs, part by part.

    Raises:
        UserError: a part can't be read.
        ResultsRemoved: their retention is over.  ResultsDamaged: a part is missing or cut.  StoreError: no access.
    """
    wanted, tables = result_columns(task), []
    with open_root(root_url, read_settings(), read_only=True) as root:
        ledger = root.ledger(job)
        ledger.check_results()
        manifest = ledger.manifest()
        if manifest is not None:
            check_files(ledger, manifest)
        for number in ledger.result_parts(manifest):
            key = part_key(number)
            try:
                with ledger.store.open(ledger.prefix + key) as stream:
                    tables.append(pq.ParquetFile(stream).read(columns=wanted))
            except pa.ArrowException as error:
                raise UserError(f"{ledger.location(key)}: can't be read: {error}") from error
    return pa.concat_tables(tables, promote_options="default")
