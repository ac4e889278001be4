"""Takes from vLLM's statistics of each step what its outputs don't say."""

from __future__ import annotations

from typing import Any

from engine.speculative.stats import SourceCounts, SpeculationStats


class StepRecorder:
    """A logger of vLLM's statistics, and its own factory (`StatLoggerFactory`).

    Attributes:
        cache_usage: used share of the KV cache.  waiting: requests that the last step had no room for.
        preemptions: since the start.
    """

    def __init__(self) -> None:
        self.cache_usage = 0.0
        self.waiting = self.preemptions = 0
        self._drafted: list[int] = []  # by position
        self._accepted: list[int] = []

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> StepRecorder:
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.cache_usage = scheduler_stats.kv_cache_usage
            self.waiting = scheduler_stats.num_waiting_reqs
            if (drafts := scheduler_stats.spec_decoding_stats) is not None:
                _add(self._drafted, drafts.num_draft_tokens_per_pos)
                _add(self._accepted, drafts.num_accepted_tokens_per_pos)
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    @property
    def speculation(self) -> SpeculationStats:
        """Counts of vLLM's drafts."""
        if not self._drafted:
            return SpeculationStats()
        return SpeculationStats({"vllm": SourceCounts(tuple(self._drafted), tuple(self._accepted))})

    def log_engine_initialized(self) -> None:
        """vLLM calls it; there is nothing to log."""

    def log(self) -> None:
        """vLLM calls it; there is nothing to log."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """vLLM calls it; the engine never sleeps."""


def _add(sums: list[int], more: list[int]) -> None:
    sums.extend([0] * (len(more) - len(sums)))
    for at, count in enumerate(more):
        sums[at] += count
