"""Active degradation steps on Redis: for each model and step a key that expires unless a gateway renews it."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.adapters.redis.connection import RedisClient, RedisSettings, milliseconds
from schemas.settings.overload import StepName


class RedisDegradationBoard:
    """`DegradationBoard` on Redis; threads may share it."""

    def __init__(self, settings: RedisSettings) -> None:
        self._client = RedisClient(settings)

    def report(self, model: str, steps: Collection[StepName], lifetime_seconds: float) -> None:
        """See `DegradationBoard.report`."""
        with self._client.translate_errors("report degradation"), self._client.raw.pipeline(transaction=False) as pipe:
            for step in steps:
                pipe.set(self._key(model, step), b"1", px=milliseconds(lifetime_seconds))
            pipe.execute()

    def active(self, model: str, among: Collection[StepName]) -> frozenset[StepName]:
        """See `DegradationBoard.active`."""
        steps = list(among)
        with self._client.translate_errors("read degradation"):
            values = self._client.raw.mget([self._key(model, step) for step in steps]) if steps else []
        return frozenset(step for step, value in zip(steps, values, strict=True) if value is not None)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _key(self, model: str, step: StepName) -> str:
        return self._client.key("degradation", step, model)
