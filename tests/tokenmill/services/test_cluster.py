"""A whole installation as real processes on real servers: every ingest source gives the same table, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import BUCKET, running_cluster
from tests.cluster.ingest import NUM_SOURCES, all_done, answers, by_source, num_messages, send
from tests.waiting import wait_for

ROWS = 200


@pytest.mark.exhaustive
def test_a_file_from_each_ingest_source_gives_the_table_of_run(
    folder: Path, model_folder: Path, chat: Any, write_lines: Any, tokenmill: Any, results: Any
) -> None:
    source = write_lines(*[chat(f"r{n}", f"number {n}", max_tokens=12) for n in range(ROWS - 1)], "not json")
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "1")
    assert tokenmill("run", source, "--output", "alone", *engine).code == 0
    rows = results(folder / "alone")
    alone = sorted((row["custom_id"] or "", row["text"] or "", row["error_code"] or "") for row in rows)
    # Two intakes get each event, and each event of a drop is sent twice more.
    processes = ("dispatcher-1", "dispatcher-2", "intake-1", "intake-2", "worker-1")
    with running_cluster(folder / "cluster", (*engine, "--replicas", "2"), processes) as cluster:
        wait_for(lambda: list(cluster.store().list("catalog/")), "no worker is up")
        send(cluster, source)
        events = cluster.s3.client("sqs")
        for message in events.receive_message(QueueUrl=cluster.queue_url, MaxNumberOfMessages=10).get("Messages", []):
            for _ in range(2):
                events.send_message(QueueUrl=cluster.queue_url, MessageBody=message["Body"])
        wait_for(lambda: all_done(cluster, ROWS, refused=1), "the jobs did not end")
        sources = by_source(cluster)
        assert len(sources) == NUM_SOURCES
        for source, jobs in sources.items():
            rows = [row for job, _ in jobs for row in answers(cluster, job)]
            found = sorted((row["custom_id"] or "", row["text"] or "", row["error_code"] or "") for row in rows)
            if source == "kafka requests":  # what is no request there is a dead letter
                assert found == [row for row in alone if row[2] != "invalid_json"]
            else:
                assert (source, found) == (source, alone)
        assert num_messages(cluster, 2 * ROWS - 1) == 2 * ROWS - 1
        dead_letters = list(cluster.store().list("deadletters/"))
        assert dead_letters, f"the line that is no request, at s3://{BUCKET}"
        assert set(cluster.stop().values()) == {0}
