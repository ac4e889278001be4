"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer


def amount_of_time(given: str) -> timedelta:
    """Such as 6h, 30m or 2d."""
    from schemas.jobs.job_options import parse_amount

    try:
        return parse_amount(given.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def price(given: str) -> float:
    """A price from 0; JSON has neither infinity nor NaN."""
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{given!r} is no price; give a number from 0")
    return value


def limit_of_cost(given: str) -> float:
    """A cost above 0."""
    value = price(given)
    if not value:
        raise typer.BadParameter("a job that may cost nothing computes nothing; give more than 0")
    return value


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def num_bytes(given: str) -> int:
    """A size such as 4GB or 512MiB, in bytes."""
    match = SIZE.fullmatch(given.strip())
    if match is None:
        raise typer.BadParameter(f"{given!r} is no size; give bytes, or a number with MB, GB, MiB or GiB")
    return int(float(match.group(1)) * UNITS[(match.group(2) or "").upper()])


def speculate(given: str) -> str:
    """The method of speculative decoding."""
    from schemas.settings.settings import check_speculate

    try:
        return check_speculate(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def folder(given: str) -> Path:
    """A folder's path; an unset variable must not become the current folder."""
    if not given:
        raise typer.BadParameter("it is empty; name a folder")
    return Path(given)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="JSONL (also .gz or .zst), Parquet, Arrow or CSV: a file, a folder of files, s3://BUCKET/KEY or "
        "s3://BUCKET/PREFIX/. One request a line.",
    ),
]
SwitchAfter = Annotated[
    float,
    typer.Option(
        min=0,
        help="With several models: seconds after which one that has work makes room for another that is requested. "
        "One that has none does so at once.",
    ),
]
Models = Annotated[
    list[str],
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="What answers: 'demo', a folder, a GGUF file, s3://BUCKET/PREFIX, or a hub name (owner/name). NAME=MODEL "
        "gives it the name that the requests use. May be repeated: requests name theirs, and one is loaded at a time.",
    ),
]
Model = Annotated[
    list[str],
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="What answers: 'demo', a folder, a GGUF file, s3://BUCKET/PREFIX, or a hub name (owner/name). NAME=MODEL "
        "gives it the name that the requests use. One only.",
    ),
]
JobGiven = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job's folder, as given to 'run --output'; else the id of a job in the root that is named.",
    ),
]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")]

Engine = Literal["auto", "tokenmill", "vllm", "transformers"]
GenerationConfig = Literal["auto", "ignore"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantize = Literal["none", "dense", "int8", "int8-weight-only", "int4", "fp8"]
KvDType = Literal["auto", "int8", "fp8"]
Tier = Literal["standard", "bulk"]
OnInvalid = Literal["row", "job"]
PromptSide = Literal["left", "right", "newline"]

# How an engine runs: `run`, `serve` and `worker` share all of it.

EngineOption = Annotated[
    Engine | None,
    typer.Option(
        "--engine",
        help="What computes the model. auto: tokenmill's own kernels where they know it, else vLLM where it is "
        "installed, else transformers' code. [default: TOKENMILL_ENGINE, or auto]",
    ),
]
EngineOptionValues = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        metavar="NAME=VALUE",
        help="An option of vLLM's own, such as tensor_parallel_size=2; JSON where it is no plain value. May be "
        "repeated.",
    ),
]
DTypeOption = Annotated[
    DType,
    typer.Option(
        help="Of weights and arithmetic. auto: bfloat16 where the device has it, else float32 (on CUDA float16)."
    ),
]
QuantizeOption = Annotated[
    Quantize,
    typer.Option(
        help="Weights at load. none: as the checkpoint has them, quantized or not; dense: dequantized to --dtype; "
        "int8: activations too, row by row, where that is faster; int8-weight-only: smaller, nearer to the model; int4 "
        "and fp8: weights only, rounded to nearest. int4 costs quality: 27 and 46 % more perplexity on the two small "
        "models measured. Prefer int8, or a GPTQ or AWQ checkpoint with none."
    ),
]
KvDTypeOption = Annotated[
    KvDType,
    typer.Option(help="Of the KV cache. int8 on a CPU, fp8 on a GPU: half of bfloat16's bytes. auto: as --dtype."),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        parser=speculate,
        metavar="METHOD",
        help="Draft the next tokens and verify them all in one step; no answer changes. ngram: what followed the "
        "same tokens before; draft:MODEL: by a smaller model with the same tokenizer; eagle3:HEAD: by an EAGLE-3 head "
        "that was trained for the model; auto: ngram where it pays, in a job that is long enough to show that; off. "
        "Default: TOKENMILL_SPECULATE, else auto.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=ADAPTER",
        help="A LoRA adapter of the model, as PEFT saves it: a folder, s3://BUCKET/PREFIX, or a hub name. "
        "Requests choose it by NAME instead of the model's name. "
        "May be repeated: rows with different adapters are computed together.",
    ),
]
AdapterColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --prompt and --adapter: the column that names the adapter of each row; null means the model alone. "
        "Without it the only adapter answers all rows.",
    ),
]
MaxLoras = Annotated[
    int,
    typer.Option(min=1, help="Maximum adapters that are loaded at a time; rows with others wait."),
]
MergeAdapter = Annotated[
    bool,
    typer.Option(
        "--merge-adapter",
        help="Add the only --adapter to the weights as they are loaded. Its requests then cost what the model's do, "
        "and nothing answers by the model's own name. The weights must be dense (--quantize dense).",
    ),
]
GenerationConfigOption = Annotated[
    GenerationConfig | None,
    typer.Option(
        "--generation-config",
        help="Sampling parameters of requests that don't set them. auto: those in the model's generation_config.json "
        "or GGUF file; ignore: OpenAI's. [default: TOKENMILL_GENERATION_CONFIG, or auto]",
    ),
]
ContentPolicies = Annotated[
    list[str] | None,
    typer.Option(
        "--content-policy",
        metavar="[flag=|route@MODEL=]NAME[:ARGUMENT]",
        help="Have this policy judge prompts and answers: rules:FILE.toml (keywords and regexes), guard:FILE.toml (a "
        "served model), or the name of one that is installed. flag= before it lets texts pass that it would refuse, "
        "and flags them; route@MODEL= sends prompts to MODEL. May be repeated. Default: TOKENMILL_CONTENT_POLICIES, "
        "else none.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="GPUs that share a model which is too large for one, or too slow: each computes a part of every layer. On "
        "a CPU N processes, which is slower than one.",
    ),
]
PipelineParallel = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Stages that a model is divided into, of --tensor-parallel GPUs each: a stage computes some layers, and "
        "sends its results to the next one. On a CPU N processes, which is slower than one.",
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --pipeline-parallel: parts of a step that stages compute at the same time. Default: as many as pay.",
    ),
]
ExpertParallel = Annotated[
    bool,
    typer.Option(
        "--expert-parallel",
        help="With --tensor-parallel, for a mixture of experts: each process holds whole experts, not a part of each.",
    ),
]
Replicas = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Engines that divide the work, each a process with a whole model, on GPUs of its own (as many as "
        "--tensor-parallel times --pipeline-parallel) or with its share of the processor's threads.",
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute. auto: on a CUDA device where there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that compute. Default: one a core.")]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A chat template (jinja) in place of the model's own: a file, or qwen3_reranker."
    ),
]
ScoreTokens = Annotated[
    str | None,
    typer.Option(
        metavar="NO,YES",
        help="The tokens that mean no and yes to a reranker that generates (Qwen3-Reranker: no,yes), for /v1/score and "
        "/v1/rerank. Default: as its files say.",
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        metavar="FORM",
        help="How the model marks its thought: think, gpt_oss, mistral, seed_oss, gemma4, kimi, granite, or none. "
        "Default: as its chat template shows.",
    ),
]
ThinkingTokenBudget = Annotated[
    int | None,
    typer.Option(min=0, help="Most tokens of a thought, for requests without thinking_token_budget. Default: any."),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sequences computed at once. Default: 128; on a GPU chosen by its memory and the model, to 4,096."
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens computed in a step. Default: 2,048; on a GPU chosen likewise, to 16,384."),
]
KvCacheMemory = Annotated[
    int | None,
    typer.Option(
        parser=num_bytes,
        metavar="SIZE",
        help="Most memory for the KV cache of an engine, such as 4GB. Default: half of what is free; on CUDA what "
        "weights and the largest step leave of TOKENMILL_GPU__MEMORY_UTILIZATION.",
    ),
]
KvOffloadingSize = Annotated[
    int | None,
    typer.Option(
        parser=num_bytes,
        metavar="SIZE",
        help="Host memory, such as 20GB, for blocks that the KV cache of an engine on a GPU has no room for, those of "
        "preempted requests included: they are loaded again instead of computed. With --kv-cache-dir, blocks are "
        "looked up here first. Default: none.",
    ),
]
KvCacheDir = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="A folder for the KV cache of prompts that several requests begin with, such as a system prompt: later "
        "processes load it instead of computing it. Who may write to it can change answers. Default: none.",
    ),
]
KvCacheDirSize = Annotated[
    int | None,
    typer.Option(
        parser=num_bytes,
        metavar="SIZE",
        help="Most bytes of blocks in --kv-cache-dir; those that were not used for longest are removed. Default: 10GB.",
    ),
]

# What `run` and `jobs retry` share.

OutputTo = Annotated[
    Path,
    typer.Option("--output", "-o", parser=folder, metavar="OUT", help="The job's folder. Results are in OUT/results."),
]
Deadline = Annotated[
    timedelta | None,
    typer.Option(
        parser=amount_of_time,
        metavar="TIME",
        help="Such as 6h, 30m or 2d, from when the job is made: rows without an answer by then expire.",
    ),
]
MaxOutputTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Refuse requests that ask for more, and give no more to those that don't say."),
]
TruncatePrompt = Annotated[
    PromptSide | None,
    typer.Option(
        help="Cut prompts that are too long for the model: drop the beginning (left), the end (right), or the end from "
        "the last newline on (newline); of a chat, right and newline cut the last user message. Default: refuse them."
    ),
]
Then = Annotated[
    list[str] | None,
    typer.Option(
        "--then",
        metavar="MODEL",
        help="The next model of a cascade, as NAME=MODEL: it answers the rows that --accept does not accept. May be "
        "repeated, the smallest model first. Rows that a content policy routes go on, too.",
    ),
]
Accept = Annotated[
    Path | None,
    typer.Option("--accept", metavar="FILE", help="Of a cascade: which answers are final, as TOML (or .json)."),
]
Agreement = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Of a cascade: choose the least mean log-probability so that this share of all answers are those of the "
        "next model, by a sample that it answers.",
    ),
]
SampleRows = Annotated[
    int | None, typer.Option("--sample", min=20, max=10_000, metavar="ROWS", help="Rows of that sample. Default: 200.")
]

# Of `run` over a table.

TablePrompt = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="FILE",
        help="INPUT is a table (Parquet, CSV or JSONL: a path or a glob, also on s3://), and this a Jinja template "
        "over its columns: the user's message of each row. OUT/table.parquet is the table with columns of answers. In "
        "place of a file it may be the text, with {{ or {%, such as 'Is this good? {{ review }}'.",
    ),
]
TableSystem = Annotated[
    str | None,
    typer.Option("--system", metavar="FILE", help="With --prompt: the system message, likewise a file or a text."),
]
OutputSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="With --prompt: the JSON schema that answers must have, a file or its text. Its type is the column's; "
        'texts to choose from are {"enum": ["good", "bad"]}.',
    ),
]
OutputColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --prompt: the column of answers, and the beginning of the other new columns' names. "
        "[default: answer]",
    ),
]
MaxTries = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100,
        help="Judge answers by the form that their requests ask for, or --output-schema, and ask a row again whose "
        "answer is cut off or doesn't fit, at most so often in all. Without it answers are taken as they are.",
    ),
]
SamplingValues = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        metavar="NAME=VALUE",
        help="With --prompt: a sampling parameter, such as temperature=0 or max_tokens=50; JSON where it is no plain "
        "value. May be repeated.",
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="With --prompt: print the estimate of tokens, time and cost, and compute nothing."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget the job in OUT, and start anew.")]
Reuse = Annotated[
    Path | None,
    typer.Option(
        help="The folder of a former run, or a Parquet file of its results: rows of which it has an answer to an equal "
        "request take that, and are not computed."
    ),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        parser=price, metavar="PRICE", help="Of this machine: what jobs cost, and limits of that, are reckoned by it."
    ),
]

LogForm = Annotated[
    Literal["text", "json"] | None,
    typer.Option(
        "--log-format",
        help="How this process's log is written: key=value for people, or a JSON document a line. "
        "Default: TOKENMILL_LOG_FORMAT, else text.",
    ),
]

MaxCost = Annotated[
    float | None,
    typer.Option(
        parser=limit_of_cost,
        metavar="COST",
        help="What the job may cost. No shard is begun that should pass that, and the work stops some seconds after it "
        "is reached. A first shard of some 4,000 tokens goes ahead of all others and shows what they cost, so that is "
        "what the smallest limit costs. Rows without an answer say so.",
    ),
]

WorkerRole = Annotated[
    Literal["both", "prefill", "decode"],
    typer.Option(
        "--role",
        help="What to compute of interactive requests. prefill: their prompts; decode: the answers, with the KV blocks "
        "that prefill workers send (TOKENMILL_KV_TRANSFER__HOST); both: whole requests. Shards are computed whole in "
        "any role.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65_535,
        help="Serve this process's Prometheus metrics there, without a key; 0: any free port. "
        "Default: TOKENMILL_METRICS__PORT, else none.",
    ),
]
GatewayUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The gateway that has the job, http(s)://HOST:PORT, in place of a folder or a root. A key, if it needs "
        "one, is read from TOKENMILL_API_KEY, else OPENAI_API_KEY.",
    ),
]
RootUrl = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="ROOT",
        help="The folder or s3://BUCKET/PREFIX that holds all jobs. Default: TOKENMILL_ROOT.",
    ),
]
