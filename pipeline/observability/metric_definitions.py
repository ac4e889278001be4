"""The definitions of all metrics: name, kind, help and labels.

Label values are fixed words (tier, status, kind, …), names of models that workers serve, their GPUs, and a bounded
number of tenants, never a job or user input, so their number is bounded. Counters start with their process, so they are
summed over processes; gauges of the whole installation have the same value in each process that reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

WORKER: Final = "worker"
"""The label of the worker, where one process reports several."""

OTHER: Final = "other"
"""Label value for models that no worker has ever served: users may submit any name; and for tenants beyond
`metrics.max_tenants`."""


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
_GPU: Final = ("model", "device", "uuid")

METRICS: Final = (
    # -- workers, since they began to serve their models
    Metric(
        "tokenmill_requests_total", "counter",
        "Requests that have ended at a worker: rows of jobs without their copies, and interactive requests; by status.",
        ("model", "tier", "status"),
    ),
    Metric(
        "tokenmill_tokens_total", "counter",
        "Tokens of requests that have ended at a worker, by kind: prompt, cached (of the prompt, not computed "
        "again), completion, drafted (by speculation), accepted (drafts that the model confirmed).",
        ("model", "tier", "kind"),
    ),
    Metric(
        "tokenmill_engine_tokens_total", "counter",
        "Tokens that an engine has processed, by kind: prompt (computed), cached (found in the prefix cache instead), "
        "generated, recomputed (after a preemption), drafted, accepted.",
        ("model", "kind"),
    ),
    Metric(
        "tokenmill_prefix_queried_tokens_total", "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        ("model",),
    ),
    Metric(
        "tokenmill_prefix_hit_tokens_total", "counter", "Prompt tokens that were found in the prefix cache.", ("model",)
    ),
    Metric(
        "tokenmill_time_to_first_token_seconds", "histogram",
        "Time from a request's arrival in a worker's engine to its first token.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_inter_token_seconds", "histogram",
        "Time between two tokens of an answer; accepted draft tokens of one step count as one.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_request_seconds", "histogram",
        "Time from a request's arrival in a worker's engine to its end; answered requests only.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_worker_seconds_total", "counter",
        "Time since a worker began to serve its model, busy or idle: the billed time. Its busy time is the sum of "
        "tokenmill_step_seconds.",
        ("model",),
    ),
    Metric("tokenmill_step_seconds", "histogram", "Duration of an engine's step.", ("model",)),
    Metric(
        "tokenmill_step_rows_total", "counter",
        "Rows of all of an engine's steps; divided by the number of steps: the batch size.",
        ("model",),
    ),
    Metric(
        "tokenmill_step_tokens_total", "counter",
        "Positions that an engine's steps computed: prompts, answers, drafts.",
        ("model",),
    ),
    Metric("tokenmill_running_requests", "gauge", "Requests in a worker's running batch.", ("model", "tier")),
    Metric(
        "tokenmill_waiting_requests", "gauge",
        "Requests that a worker holds outside its running batch.",
        ("model", "tier"),
    ),
    Metric(
        "tokenmill_lane_requests", "gauge",
        "Interactive requests that a worker holds: in its engine (open), or before it (waiting).",
        ("model", "state"),
    ),
    Metric(
        "tokenmill_lane_stolen_requests_total", "counter",
        "Interactive requests that were addressed to another worker and that this one took, because they had waited "
        "too long or their worker was lost.",
        ("model",),
    ),
    Metric(
        "tokenmill_judged_texts_total", "counter",
        "Prompts and answers that a content policy judged, by what it did: pass, flag, route or refuse.",
        ("model", "policy", "action"),
    ),
    Metric(
        "tokenmill_content_policy_failures_total", "counter",
        "Texts that a content policy could not judge: refused, unless a guard model's file says that they pass.",
        ("model", "policy"),
    ),
    Metric(
        "tokenmill_guard_tokens_total", "counter",
        "Tokens of the guard model that judges for a content policy, by kind: prompt, completion.",
        ("model", "policy", "kind"),
    ),
    Metric(
        "tokenmill_adapter_requests_total", "counter",
        "Requests and rows that an adapter of the model answered, by status: succeeded, failed.",
        ("model", "adapter", "status"),
    ),
    Metric(
        "tokenmill_adapter_tokens_total", "counter",
        "Tokens of an adapter's answered requests and rows, by kind: prompt, cached, completion.",
        ("model", "adapter", "kind"),
    ),
    Metric(
        "tokenmill_adapter_weights_bytes", "gauge", "Weights of an adapter that requests have named, as stored.",
        ("model", "adapter"),
    ),
    Metric("tokenmill_kv_blocks", "gauge", "Blocks of a worker's KV cache.", ("model",)),
    Metric("tokenmill_kv_blocks_used", "gauge", "Blocks of the KV cache that running requests hold.", ("model",)),
    Metric(
        "tokenmill_kv_tier_hits_total", "counter",
        "Blocks that were loaded from second tiers of the prefix cache, by medium: host (memory), disk.",
        ("model", "medium"),
    ),
    Metric(
        "tokenmill_kv_tier_rejected_blocks_total", "counter",
        "Blocks in --kv-cache-dir that were damaged or not what their name says; they were computed instead.",
        ("model",),
    ),
    Metric(
        "tokenmill_kv_tier_bytes_total", "counter",
        "Bytes of blocks in second tiers of the prefix cache, by medium (host, disk) and direction (read, written).",
        ("model", "medium", "direction"),
    ),
    Metric(
        "tokenmill_kv_tier_off", "gauge",
        "1 after --kv-cache-dir could not be used (full, or read-only) and was switched off; else 0.",
        ("model",),
    ),
    Metric(
        "tokenmill_handovers_total", "counter",
        "Requests between prefill and decode workers, by outcome: sent, received with the blocks of their prompts; "
        "completed by the prefill worker because that is faster or no decode worker lives (stayed), or because it had "
        "no memory for the blocks (refused).",
        ("model", "outcome"),
    ),
    Metric(
        "tokenmill_kv_transfer_bytes_total", "counter",
        "Bytes of KV blocks that a worker sent and received, and of received ones that requests used (the rest was "
        "dropped: TOKENMILL_KV_TRANSFER__MAX_BYTES), by direction.",
        ("model", "direction"),
    ),
    Metric(
        "tokenmill_kv_transfers_failed_total", "counter",
        "Transfers of KV blocks that were not completed, by reason: expired (no worker fetched them), broken (they "
        "ended early at this worker). What is missing is computed.",
        ("model", "reason"),
    ),
    Metric(
        "tokenmill_kv_fetch_seconds_total", "counter", "Seconds of fetching KV blocks, summed over all transfers.",
        ("model",),
    ),
    Metric(
        "tokenmill_expert_load", "gauge",
        "Rows of the busiest expert of a mixture, or of the busiest rank with --expert-parallel, over those of the "
        "mean one, in the last seconds: 1 is even.",
        ("model", "holder"),
    ),
    Metric(
        "tokenmill_preemptions_total", "counter",
        "Rows that were preempted to free blocks, and recomputed.",
        ("model",),
    ),
    Metric(
        "tokenmill_slo_weight", "gauge",
        "Weight of a term of the objective that the SLO controller minimizes: ttft, itl, utilisation, drops.",
        ("model", "term"),
    ),
    Metric(
        "tokenmill_slo_term", "gauge",
        "Current value of a term: TTFT and ITL as multiples of their targets, the share of steps from "
        "which batch work was held back, the share of requests that missed their deadline.",
        ("model", "term"),
    ),
    Metric("tokenmill_slo_objective", "gauge", "Weighted sum of the terms.", ("model",)),
    Metric(
        "tokenmill_slo_batch_ratio", "gauge",
        "Share of batch work among the tokens of steps that also compute interactive requests.",
        ("model",),
    ),
    Metric(
        "tokenmill_slo_batch_tokens", "gauge",
        "Tokens of batch work that a step may hold while interactive answers (streams) or prompts (prompts) are "
        "computed.",
        ("model", "alongside"),
    ),
    Metric(
        "tokenmill_slo_missed_total", "counter",
        "Missed targets: of first tokens (ttft), of tokens (itl), of requests that ran out of time (deadline).",
        ("model", "target"),
    ),
    Metric(
        "tokenmill_experiment_arm", "gauge",
        "1 for the arm of an open experiment whose weights the worker has now, 0 for the others.",
        ("model", "experiment", "arm"),
    ),
    Metric(
        "tokenmill_experiment_events_total", "counter",
        "Counts of an open experiment's measured slices: first_tokens, late_first_tokens, later_tokens, late_tokens, "
        "steps and throttled_steps with interactive requests; drops: those that timed out; tokens: of all requests.",
        ("model", "experiment", "arm", "event"),
    ),
    Metric(
        "tokenmill_experiment_seconds_total", "counter",
        "Duration of the slices that tokenmill_experiment_events_total counts.",
        ("model", "experiment", "arm"),
    ),
    Metric(
        "tokenmill_speculation_gained_tokens", "gauge",
        "Tokens that speculation gained over plain decoding in the same time: an estimate from measured steps, "
        "negative where speculation costs more than it gains.",
        ("model",),
    ),
    Metric(
        "tokenmill_speculation_compared_seconds_total", "counter",
        "Time of the steps that tokenmill_speculation_gained_tokens is estimated over.",
        ("model",),
    ),
    Metric("tokenmill_gpu_memory_bytes", "gauge", "Memory of a worker's GPU or MIG instance.", _GPU),
    Metric(
        "tokenmill_gpu_memory_used_bytes", "gauge",
        "Memory of the GPU or MIG instance that all processes and the driver hold.",
        _GPU,
    ),
    Metric(
        "tokenmill_gpu_utilization_ratio", "gauge",
        "Share of the last second or less in which a kernel ran on the GPU, however much of it the kernel used; not of "
        "MIG instances.",
        _GPU,
    ),
    Metric("tokenmill_gpu_power_watts", "gauge", "Power that the GPU draws; not of MIG instances.", _GPU),
    Metric("tokenmill_gpu_power_limit_watts", "gauge", "Enforced limit of that power.", _GPU),
    Metric("tokenmill_gpu_temperature_celsius", "gauge", "Temperature of the GPU's chip.", _GPU),
    Metric("tokenmill_gpu_sm_clock_hertz", "gauge", "Current clock of the GPU's multiprocessors.", _GPU),
    Metric(
        "tokenmill_gpu_throttled", "gauge",
        "1 while the GPU's clocks are lowered for this reason, else 0: sw_power_cap (usual under full load), "
        "hw_slowdown, sync_boost, sw_thermal_slowdown, hw_thermal_slowdown, hw_power_brake_slowdown.",
        (*_GPU, "reason"),
    ),
    Metric(
        "tokenmill_store_outage", "gauge",
        "1 while a worker waits for a store that can't be reached or is full, else 0.",
        ("model",),
    ),
    # -- the installation
    Metric(
        "tokenmill_workers", "gauge",
        "Live workers, by the model that they have loaded.",
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
        "tokenmill_is_leader", "gauge",
        "1 while this dispatcher holds the lease, else 0.",
        (), _DISPATCHER,
    ),
    Metric("tokenmill_jobs", "gauge", "Open jobs.", ("tier", "status"), _INSTALLATION),
    Metric(
        "tokenmill_jobs_needing_attention", "gauge",
        "Open jobs that are stalled, or were a moment ago, because their stored objects can't be read or contradict "
        "each other. Each is retried at least every five minutes.",
        (), _DISPATCHER,
    ),
    Metric(
        "tokenmill_shards", "gauge",
        "Shards without results: waiting, on a queue (queued), at a worker (held).",
        ("tier", "state"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_oldest_waiting_seconds", "gauge",
        "Age of the oldest job that has a shard waiting for a worker.",
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
    Metric("tokenmill_job_seconds", "histogram", "Time from a job's creation to its end.", ("tier",), _DISPATCHER),
    Metric(
        "tokenmill_cost_total", "counter",
        "Cost of jobs that have ended, as their manifests have it, by model or adapter; only where a price per hour is "
        "configured, in its currency.",
        ("model", "tier"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_desired_workers", "gauge", "Workers that a pool should have, by the last decision.",
        ("pool",), ("autoscale",),
    ),
    # -- releases
    Metric(
        "tokenmill_warmup_seconds", "gauge",
        "Time that a worker's model took to become ready, by part: load, warm_up (real steps), canary (prompts with "
        "recorded answers).",
        ("model", "part"), ("worker",),
    ),
    Metric(
        "tokenmill_canary_failures", "gauge",
        "Workers whose answers to the canary prompts differed from the recorded ones, and which therefore did "
        "not serve.",
        ("model",), _DISPATCHER,
    ),
    Metric("tokenmill_releases_open", "gauge", "Undecided releases.", ("model",), _DISPATCHER),
    Metric(
        "tokenmill_release_rows", "gauge",
        "Rows of an open release that the candidate computed as well (compared), and those that only the candidate "
        "failed (failed).",
        ("model", "kind"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_agreement_ratio", "gauge",
        "Mean similarity of the candidate's answers to the stable version's in an open release, 0 to 1.",
        ("model",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_latency_ratio", "gauge",
        "Time per token of the candidate in an open release, as a multiple of the stable version's.",
        ("model",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_drift_nats", "gauge",
        "Mean difference of log-probabilities on the canary prompts in an open release.",
        ("model",), _DISPATCHER,
    ),
    Metric(
        "tokenmill_releases_ended_total", "counter",
        "Releases that ended while this dispatcher ran, by verdict: promoted, rolled_back.",
        ("model", "verdict"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_compared_requests", "gauge",
        "Callers' requests that both versions of an open release answered, by who answered the caller (mirror: the "
        "stable version, canary: the candidate); kind: compared, failed by the candidate only, lost by its workers.",
        ("model", "traffic", "kind"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_requests_ratio", "gauge",
        "The candidate's answers to callers' requests in an open release: agreement with the stable version's (0 to "
        "1); TTFT, ITL and length as multiples of the stable version's.",
        ("model", "traffic", "what"), _DISPATCHER,
    ),
    Metric(
        "tokenmill_release_requests_total", "counter",
        "Requests during releases: compared with their copies; copies that were dropped; sent to a candidate for a "
        "caller (canary); answered by the stable version instead (fell_back).",
        ("kind",), _GATEWAY,
    ),
    # -- the answer store
    Metric(
        "tokenmill_stored_answer_lookups_total", "counter",
        "Lookups in the answer store for rows of jobs (job) and requests (http): hit, miss, damaged (a stored file "
        "that can't be read; its answers are computed).",
        ("source", "result"), _INSTALLATION,
    ),
    Metric(
        "tokenmill_stored_answer_bytes_total", "counter",
        "Bytes written to the answer store: keys of jobs' answers (job), answers of requests and their keys (http).",
        ("source",), _INSTALLATION,
    ),
    # -- HTTP
    Metric("tokenmill_http_requests_total", "counter", "HTTP requests.", ("method", "route", "code"), _GATEWAY),
    Metric("tokenmill_http_requests_in_progress", "gauge", "HTTP requests and WebSockets in progress.", (), _GATEWAY),
    Metric(
        "tokenmill_answers_total", "counter",
        "Inference requests that have ended: answered, cached (from the answer store), failed, cancelled (the client "
        "disconnected).",
        ("tier", "result"), _GATEWAY,
    ),
    Metric(
        "tokenmill_answer_first_token_seconds", "histogram",
        "Time from a request's admission by the gateway to the first token of its stream.",
        ("tier",), _GATEWAY,
    ),
    Metric(
        "tokenmill_answer_seconds", "histogram",
        "Time from a request's admission by the gateway to the end of its answer.",
        ("tier",), _GATEWAY,
    ),
    Metric(
        "tokenmill_answer_latency_total", "counter",
        "Chats and completions by whether they kept the latency promise of their tier (lane.slo), as their callers saw "
        "it: in_time, late_first_token, late_tokens (the mean time between tokens), refused (too many waited), failed. "
        "Tenants beyond metrics.max_tenants are other.",
        ("tier", "tenant", "latency"), _GATEWAY,
    ),
    Metric(
        "tokenmill_inference_requests", "gauge",
        "Inference requests that this gateway holds (open), and those without a first token (waiting).",
        ("state",), _GATEWAY,
    ),
    Metric(
        "tokenmill_lane_routed_requests_total", "counter",
        "Inference requests by the queue that they were sent to: that of their prefix's worker (prefix), of another "
        "one because that one had its share (bound), of any worker (general), or of any decode worker (decode).",
        ("route",), _GATEWAY,
    ),
    Metric(
        "tokenmill_virtual_model_requests_total", "counter",
        "Interactive requests to virtual models, by the model that their rules chose (served_by).",
        ("model", "served_by"), _GATEWAY,
    ),
    Metric(
        "tokenmill_routing_label_failures_total", "counter",
        "Requests and rows that got the last rule's model, because this classification model gave them no label in "
        "time.",
        ("model",), ("dispatcher", "gateway"),
    ),
    Metric(
        "tokenmill_shed_requests_total", "counter",
        "Requests that this gateway refused because they would have been late, or because bulk work is paused.",
        ("model", "tier"), _GATEWAY,
    ),
    Metric(
        "tokenmill_forecast_wait_seconds", "gauge",
        "Forecast wait of a further interactive request for a row of a worker's batch, by this gateway.",
        ("model",), _GATEWAY,
    ),
    Metric(
        "tokenmill_degradation_step_active", "gauge",
        "Whether a step of degradation is active at this gateway (1) or not (0).",
        ("model", "step"), _GATEWAY,
    ),
    # -- ingest
    Metric(
        "tokenmill_intake_jobs_total", "counter",
        "Submissions at ingest sources: made into a job (created), known already (repeated), refused.",
        ("result",), ("intake", "gateway"),
    ),
    Metric(
        "tokenmill_dead_letters_total", "counter",
        "Input that could not become a job or a request, stored as dead letters, by ingest source.",
        ("source",), ("intake", "gateway"),
    ),
    Metric(
        "tokenmill_unexpected_errors_total", "counter",
        "Unexpected exceptions, by the part of the process that raised them; each is logged with its traceback, "
        "and the part continues.",
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
