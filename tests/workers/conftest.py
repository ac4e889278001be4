"""Fixtures of the tests of workers/: tokenizers trained on the fly, models of random weights, and an in-memory source
and sink."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.ledger.records import ShardReport
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.worker_client.ports import CheckpointWork, RevokedShards, ShardWork, WorkerLoad
from schemas.jobs.arrow_schemas import SHARD_FIELDS
from schemas.jobs.checkpoints import Checkpoint, CheckpointHead, FinishedRows, decode, encode
from schemas.jobs.inputs import InputFile, InputRef
from schemas.jobs.job import Job, JobSettings, Tier
from schemas.jobs.outcome import Usage
from schemas.jobs.results import ResultRow
from schemas.models import ModelPin
from schemas.requests.parsing import dump_body, parse_body
from workers.text.tokenizer import Tokenizer

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

SPECIALS = ["<pad>", "<s>", "<end>", "<turn>"]
TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('tool messages are not supported') }}{% endif %}"
    "<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "user assistant system tool\nSTOP stop ### END\n\nQ: what? A: that!",
    "naïve café 日本語 🎉🎊 Ünïcödé — “quotes”",
] * 4


def byte_level_tokenizer(template: str | None = TEMPLATE, add_bos: bool = False, corpus: Sequence[str] = CORPUS) -> Any:
    """A byte-level BPE tokenizer as GPT-2, Llama 3 and Qwen have."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(corpus, trainer)
    if add_bos:
        rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrap(rust, template)


def sentencepiece_tokenizer() -> Any:
    """A tokenizer built as Llama 2's and Gemma's: blanks are part of tokens, rare characters are bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    rust = RustTokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<pad>"))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS + byte_tokens, show_progress=False)
    rust.train_from_iterator(CORPUS[:2], trainer)
    state = json.loads(rust.to_str())
    state["added_tokens"] = state["added_tokens"][: len(SPECIALS)]  # the byte tokens are ordinary ones
    return _wrap(RustTokenizer.from_str(json.dumps(state)), TEMPLATE)


def word_piece_tokenizer() -> Any:
    """A tokenizer as BERT has: its decoder puts a blank before each word but the first."""
    rust = RustTokenizer(models.WordPiece(unk_token="<pad>"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIALS, show_progress=False)
    rust.train_from_iterator(CORPUS, trainer)
    return _wrap(rust, TEMPLATE)


def _wrap(rust: RustTokenizer, template: str | None) -> Any:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="<end>", pad_token="<pad>", extra_special_tokens=["<turn>"]
    )
    hf.chat_template = template
    return hf


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_tokenizer())


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any) -> Path:
    """A Llama of random weights with a tokenizer and chat template of its own, saved as real checkpoints are."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    tiny_models.make_tiny_model("llama", folder, vocab_size=400)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


class FakeClock:
    """A clock that advances only in sleeps."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(NOON.timestamp() + self.seconds - 1000.0, UTC)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class ListSource:
    """Shards from a list."""

    def __init__(self, shards: Iterable[ShardWork]) -> None:
        self.left = list(shards)
        self.taken: list[int] = []

    def take(self, timeout: float, tiers: Sequence[Tier] = ()) -> ShardWork | None:
        if not self.left:
            return None
        work = self.left.pop(0)
        self.taken.append(work.shard)
        return work

    def finished(self) -> bool:
        return not self.left


class MemorySink:
    """Stores what is committed, and refuses what a real sink would refuse."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.parts: dict[int, list[ResultRow]] = {}
        self.reports: dict[int, ShardReport] = {}
        self.usages: dict[int, Usage] = {}
        self.begun: list[int] = []
        self.released: list[int] = []
        self.given_up: dict[int, Exception] = {}
        self.held: list[list[int]] = []
        self.loads: list[WorkerLoad] = []
        self.closing: frozenset[str] = frozenset()
        self.committed_elsewhere: set[tuple[str, int]] = set()
        self.checkpoints: dict[int, list[Checkpoint]] = {}
        self.notes: list[tuple[int, list[int]]] = []
        self._lost = lost

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        rows = finished.rows
        expected = set(work.table["row"].to_pylist()) - work.history.finished_rows
        assert sorted(row.row for row in rows) == sorted(expected)
        self.reports[work.shard] = report
        self.usages[work.shard] = sum(finished.usages, Usage())
        if work.shard in self._lost:
            return False
        assert work.shard not in self.parts
        self.parts[work.shard] = sorted(rows, key=lambda row: row.row)
        return True

    def begin(self, work: ShardWork) -> None:
        self.begun.append(work.shard)

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None:
        """Encode and decode the checkpoint, as a real sink does."""
        standing = self.checkpoints.setdefault(work.shard, [])
        head = CheckpointHead(
            job=work.job.id, shard=work.shard, attempt_id=work.attempt_id, sequence=len(standing), final=new.final,
            generated=new.generated, exposed=new.exposed,
        )  # fmt: skip
        standing.append(decode(encode(head, new.finished, new.running)))

    def record(self, work: ShardWork, rows: Sequence[int]) -> None:
        self.notes.append((work.shard, list(rows)))

    def release(self, work: ShardWork, generated: int, busy_seconds: float) -> None:
        self.released.append(work.shard)

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None:
        self.given_up[work.shard] = error

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad) -> None:
        self.held.append([work.shard for work in shards])
        self.loads.append(load)

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        names = ((work.job.id, work.shard) for work in shards)
        return RevokedShards(
            frozenset(name for name in names if name[0] in self.closing), frozenset(self.committed_elsewhere)
        )

    @property
    def rows(self) -> dict[int, ResultRow]:
        return {row.row: row for part in self.parts.values() for row in part}


def chat(text: str = "Hello", **extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **extra}


def completion(prompt: Any = "The quick", **extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **extra}


def make_job(**settings: Any) -> Job:
    return Job(
        id="job-1",
        input=InputRef(uri="in.jsonl", format="jsonl", files=(InputFile(uri="in.jsonl", size=1),)),
        models=(ModelPin(name="tiny", source="tiny", dtype="float32"),),
        settings=JobSettings(**settings),
        created_at=NOON,
    )


def url_of(body: dict[str, Any]) -> str:
    """The endpoint that a body is for."""
    names = {
        "messages": "/v1/chat/completions", "queries": "/v1/score", "query": "/v1/rerank", "prompt": "/v1/completions",
    }  # fmt: skip
    return next((url for name, url in names.items() if name in body), "/v1/embeddings")


def make_work(bodies: Sequence[Any], *, shard: int = 1, first_row: int = 0, job: Job | None = None) -> ShardWork:
    """A shard of these bodies, as the planner writes it; an int instead of a body is a copy of the row it names,
    and a pair is a url and its body."""
    rows = []
    for row, body in enumerate(bodies, start=first_row):
        copy = isinstance(body, int)
        url, body = body if isinstance(body, tuple) else ("/v1/chat/completions" if copy else url_of(body), body)
        text = "" if copy else dump_body(parse_body(url, body)).decode()
        rows.append(
            {
                "row": row,
                "compute_row": body if copy else row,
                "custom_id": f"id-{row}",
                "url": url,
                "body": text,
                "model": "tiny" if copy else body["model"],
                "request_hash": hashlib.blake2b(text.encode(), digest_size=16).digest(),
                "prefix_group": None,
                "prefix_readers": None,
                "estimated_prompt_tokens": 10,
                "expected_tokens": 10,
            }
        )
    table = pa.Table.from_pylist(rows, schema=pa.schema(SHARD_FIELDS))
    return ShardWork(job or make_job(), shard, 1, f"attempt-{shard}", table, NOON)


def rounded(value: Any) -> Any:
    """A response to be compared with: its numbers differ in their last digits with the shape of the batch."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above, for test modules, which can't import a conftest."""
    return SimpleNamespace(
        NOON=NOON,
        TEMPLATE=TEMPLATE,
        byte_level_tokenizer=byte_level_tokenizer,
        sentencepiece_tokenizer=sentencepiece_tokenizer,
        word_piece_tokenizer=word_piece_tokenizer,
        InlineExecutor=InlineExecutor,
        FakeClock=FakeClock,
        ListSource=ListSource,
        MemorySink=MemorySink,
        chat=chat,
        parse=lambda body: parse_body(url_of(body), body),
        completion=completion,
        make_job=make_job,
        make_work=make_work,
        rounded=rounded,
    )
