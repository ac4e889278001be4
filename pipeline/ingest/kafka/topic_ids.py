"""The identity of a topic: its id, or the epoch in the settings. A topic that is deleted and recreated begins at offset
0 again, and must not be mistaken for the old one."""

from __future__ import annotations

from typing import Any

from kafka import KafkaAdminClient

from pipeline.adapters.kafka.connection import KafkaSettingsError
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.ports import PipelineError


class TopicIds:
    """Reads the ids of topics. Not thread-safe."""

    def __init__(self, settings: KafkaIngestSettings) -> None:
        self._settings = settings
        self._admin: Any = None

    def cluster_of(self, topic: str) -> str:
        """The id that distinguishes the topic from all others of its name.

        Raises:
            PipelineError: it doesn't exist yet.  KafkaSettingsError: the brokers give topics no ids, and no epoch is
                set.
        """
        if self._settings.epoch is not None:
            return self._settings.epoch
        if self._admin is None:
            self._admin = KafkaAdminClient(**self._settings.connection.admin_options())
        for found in self._admin.describe_topics([topic]):
            if found["name"] != topic or found["error_code"]:
                continue
            number = str(found.get("topic_id") or "").replace("-", "")
            if number.strip("0"):
                return number
            raise KafkaSettingsError(f"kafka: the brokers give topic {topic} no id; set epoch in the settings")
        raise PipelineError(f"kafka: there is no topic {topic} yet, or no right to see it")

    def close(self) -> None:
        """Close the connection."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
