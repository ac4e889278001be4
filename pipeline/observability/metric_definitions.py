"""The definitions of all metrics: name, kind, help and labels.

Label values are fixed words (tier, status, kind, …) and names of models that workers serve, never a job, a tenant or
user input, so their number is bounded. Counters start with their process, so they are summed over processes; gauges of
the whole installation have the same value in each process that reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

WORKER: Final = "worker"
"""The label of the worker, where one process reports several."""

OTHER: Final = "other"
"""Label value for models that no worker has ever served: users may submit any name."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of one metric.

    Attributes:
        labels: in order, without `WORKER`.
        by: the commands that report it; `serve` reports all.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    by: tuple[str, ...] = ("worker", "gateway")


_INSTALLATION: Final = ("dispatcher", "gateway")
_DISPATCHER: Final = ("dispatcher",)
_GATEWAY: Final = ("gateway",)

METRICS: Final = (
    # -- workers, since they began to serve their models
    Metric(
        "tokenmill_requests_total", "counter",
        "Requests that have ended at a worker: rows of jobs without their copies, and requests whose callers wait; "
        "by how they ended.",
        ("model", "tier", "status"),
    ),
    Metric(
        "tokenmill_tokens_total", "counter",
        "Tokens of requests that have ended at a worker, by kind: prompt, cached (of the prompt, not computed "
        "again), completion, drafted (guessed), accepted (guessed right).",
        ("model", "tier", "kind"),
    ),
    Metric(
        "tokenmill_engine_tokens_total", "counter",
        "Tokens as the engine goes, by kind: prompt (computed), cached (found in the prefix cache instead), "
        "generated, recomputed (after a preemption), drafted, accepted.",
        ("model", "kind"),
    ),
    Metric(
        "tokenmill_prefix_queried_tokens_total", "counter",
        "Tokens of prompts that were looked up in the prefix cache.",
        ("model",),
    ),
    Metric("tokenmill_prefix_hit_tokens_total", "counter", "Of those, found there.", ("model",)),
    Metric(
        "tokenmill_time_to_first_token_seconds", "histogram",
        "From a request's arrival in a worker's engine to its first token.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_inter_token_seconds", "histogram",
        "From a token of an answer to its next one; guessed tokens that were right come together and count as one.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_request_seconds", "histogram",
        "From a request's arrival in a worker's engine to its end, of those that were answered.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_worker_seconds_total", "counter",
        "Time since a worker began to serve its model, busy or not: what is paid for. The time in which it computed is "
        "the sum of its steps'.",
        ("model",),
    ),
    Metric("tokenmill_step_seconds", "histogram", "Time of an engine's step.", ("model",)),
    Metric(
        "tokenmill_step_rows_total", "counter",
        "Rows in an engine's steps, together: divided by the steps, the batch size.",
        ("model",),
    ),
    Metric(
        "tokenmill_step_tokens_total", "counter",
        "Positions that an engine's steps computed: prompts, answers, guesses.",
        ("model",),
    ),
    Metric("tokenmill_running_requests", "gauge", "Requests in a worker's running batch.", ("model", "tier")),
    Metric(
        "tokenmill_waiting_requests", "gauge",
        "Requests that a worker has and that are not in its batch.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_lane_requests", "gauge",
        "Of requests whose callers wait, those that a worker has: in its engine (open), or on the way there "
        "(waiting).",
        ("model", "state"),
    ),
    Metric("tokenmill_kv_blocks", "gauge", "Blocks of a worker's KV cache.", ("model",)),
    Metric("tokenmill_kv_blocks_used", "gauge", "Of those, the ones that running requests hold.", ("model",)),
    Metric(
        "tokenmill_preemptions_total", "counter",
        "Rows that were put back to make room, and computed again.",
        ("model",),
    ),
    Metric(
        "tokenmill_pace_weight", "gauge",
        "Weight of a term of the objective that pacing lowers: w1 to w4 are ttft, itl, utilisation, drops.",
        ("model", "term"),
    ),
    Metric(
        "tokenmill_pace_term", "gauge",
        "What the weight is multiplied with now: TTFT and ITL as multiples of what is promised, the share of steps "
        "that work was held back from, the share of requests that ran out of time.",
        ("model", "term"),
    ),
    Metric("tokenmill_pace_objective", "gauge", "The sum of the terms, each times its weight.", ("model",)),
    Metric(
        "tokenmill_pace_others_ratio", "gauge",
        "Of the tokens in steps beside callers who wait, the share of other work (bulk's share).",
        ("model",),
    ),
    Metric(
        "tokenmill_pace_allowed_tokens", "gauge",
        "Tokens of a step that are allowed beside answers (streams) and beside prompts whose callers wait.",
        ("model", "beside"),
    ),
    Metric(
        "tokenmill_pace_missed_total", "counter",
        "Promises that were missed: first tokens (ttft), tokens (itl), requests that ran out of time (deadline).",
        ("model", "promise"),
    ),
    Metric(
        "tokenmill_speculation_gained_tokens", "gauge",
        "Tokens that guessing brought beyond what the same time would have brought without; an estimate from "
        "measured steps, less than 0 where it costs more than it brings.",
        ("model",),
    ),
    Metric(
        "tokenmill_speculation_compared_seconds_total", "counter",
        "Time of the steps that this is estimated over.",
        ("model",),
    ),
    Metric(
        "tokenmill_store_outage", "gauge",
        "Whether a worker waits for the store (1), which can't be reached or has no room, or can use it (0).",
        ("model",),
    ),
    # -- the installation
    Metric(
        "tokenmill_workers", "gauge",
        "Workers that live, by the model that they have loaded.",
        ("model",), _INSTALLATION,
    ),
    Metric(
        "tokenmill_backlog_tokens", "gauge",
        "Tokens still to be computed for open jobs, prompts and answers, estimated.",
        ("model", "tier"), _INSTALLATION,
    ),
    Metric(
        "tokenmill_worker_hour_price", "gauge",
        "Price of a worker for an hour, by the model that it has loaded; only where one is configured, in its "
        "currency.",
        ("model",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_leading", "gauge",
        "Whether this dispatcher is the one that works (1) or waits for its turn (0).",
        (), _DISPATCHER,
    ),
    Metric("tokenmill_jobs", "gauge", "Open jobs.", ("tier", "status"), _INSTALLATION),
    Metric(
        "tokenmill_jobs_needing_attention", "gauge",
        "Open jobs that stand still, or did a moment ago, since their stored objects can't be read or contradict each "
        "other. Each is tried again at least every five minutes.",
        (), _DISPATCHER,
    ),
    Metric(
        "tokenmill_shards", "gauge",
        "Shards without their results: waiting, on a queue (queued), at a worker (held).",
        ("tier", "state"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_oldest_waiting_seconds", "gauge",
        "Age of the oldest job of which a shard waits for a worker.",
        ("tier",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_committed_rows_total", "counter",
        "Rows whose results were committed.",
        ("tier", "status"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_committed_tokens_total", "counter",
        "Tokens of rows whose results were committed, by the kinds of a manifest's usage.",
        ("model", "tier", "kind"), _DISPATCHER,
    ),
    Metric("tokenmill_jobs_ended_total", "counter", "Jobs that have ended.", ("tier", "status"), _DISPATCHER),
    Metric("tokenmill_job_seconds", "histogram", "From a job's making to its end.", ("tier",), _DISPATCHER),
    Metric(
        "tokenmill_cost_total", "counter",
        "Cost of jobs that have ended, as their manifests have it; only where a price per hour is configured, in "
        "its currency.",
        ("tier",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_desired_workers", "gauge", "Workers that a pool should have, as was decided last.",
        ("pool",), ("autoscale",),
    ),
    # -- releases
    Metric(
        "tokenmill_warmup_seconds", "gauge",
        "How long a worker's model took to get ready, by part: load, warm_up (real steps), canary (prompts whose "
        "answers are known).",
        ("model", "part"), ("worker",),
    ),
    Metric(
        "tokenmill_canary_failures", "gauge",
        "Workers that ever answered the canary prompts otherwise than was recorded, and so never served.",
        ("model",), _DISPATCHER,
    ),
    Metric("tokenmill_releases_open", "gauge", "Releases that are not decided.", ("model",), _DISPATCHER),
    Metric(
        "tokenmill_release_rows", "gauge",
        "Of an open release, rows that were computed by the candidate, too (compared), and those of them that only it "
        "failed (failed).",
        ("model", "kind"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_agreement_ratio", "gauge",
        "Of an open release, the mean likeness of the candidate's answers to the stable version's, 0 to 1.",
        ("model",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_latency_ratio", "gauge",
        "Of an open release, how many times as long a token takes with the candidate.",
        ("model",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_drift_nats", "gauge",
        "Of an open release, the mean difference of log-probabilities on the canary prompts.",
        ("model",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_releases_ended_total", "counter",
        "Releases that this dispatcher saw decided, by verdict: promoted, rolled_back.",
        ("model", "verdict"), _DISPATCHER,
    ),
    # -- HTTP
    Metric("tokenmill_http_requests_total", "counter", "Requests over HTTP.", ("method", "route", "code"), _GATEWAY),
    Metric("tokenmill_http_requests_in_progress", "gauge", "Requests and sockets that are under way.", (), _GATEWAY),
    Metric(
        "tokenmill_answers_total", "counter",
        "Requests for an answer that have ended: answered, cached (the answer was there), failed, cancelled (its "
        "caller left).",
        ("tier", "result"), _GATEWAY,
    ),
    Metric(
        "tokenmill_answer_first_token_seconds", "histogram",
        "From a request's admission by the gateway to the first token of its stream.",
        ("tier",), _GATEWAY,
    ),
    Metric(
        "tokenmill_answer_seconds", "histogram",
        "From a request's admission by the gateway to the end of its answer.",
        ("tier",), _GATEWAY,
    ),
    Metric(
        "tokenmill_callers", "gauge",
        "Callers that this gateway has (open), and those of them that nobody has begun to answer (waiting).",
        ("state",), _GATEWAY,
    ),
    # -- ingest
    Metric(
        "tokenmill_intake_jobs_total", "counter",
        "What came in at doors: made into a job (created), known already (repeated), refused.",
        ("result",), ("intake", "gateway"),
    ),
    Metric(
        "tokenmill_dead_letters_total", "counter",
        "What could not become a job or a part of one, and was kept as a dead letter, by door.",
        ("door",), ("intake", "gateway"),
    ),
    Metric(
        "tokenmill_unforeseen_errors_total", "counter",
        "Exceptions that were never foreseen, by the part of the process that met them; each is logged with its "
        "traceback, and the part goes on.",
        ("part",), ("worker", "dispatcher", "gateway", "intake", "autoscale"),
    ),
    Metric(
        "tokenmill_build_info", "gauge",
        "Always 1; the version is the label.",
        ("version",), ("worker", "dispatcher", "gateway", "intake", "autoscale"),
    ),
)  # fmt: skip
"""All metrics; a test compares them with the table in docs/operations/metrics-and-alerts.md."""

BY_NAME: Final = {metric.name: metric for metric in METRICS}
