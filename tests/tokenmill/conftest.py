"""A tiny served model, and the command line as a function: arguments in, output and exit code out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import structlog
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tokenmill.command_processes import Processes
from tokenmill.cli import main
from tokenmill.processes import runtime

TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any) -> Path:
    """A Llama of random weights with a trained tokenizer and a chat template, saved as real checkpoints are."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    tiny_models.make_tiny_model("llama", folder, vocab_size=300)
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<s>", "<end>", "<turn>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(["a message from the user to the assistant and back again"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="<end>", pad_token="<pad>", extra_special_tokens=["<turn>"]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any, model_folder: Path) -> Path:
    """The same for vLLM, whose CPU kernels want heads of 32 numbers at least."""
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    tiny_models.make_tiny_model("llama", folder, vocab_size=300, hidden_size=64, head_dim=32)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, folder / name)
    return folder


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The error line; there must be exactly one, and nothing after it."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        assert "Traceback" not in self.err
        return lines[0]

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session", autouse=True)
def heap_of_the_tests_is_not_frozen() -> Iterator[None]:
    """A command collects garbage before its work begins: of a process of many tests that takes longer than the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model cache of its own and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENMILL_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def tokenmill(folder: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., CommandResult]]:
    """The command line, in this process."""

    def call(*arguments: object) -> CommandResult:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return CommandResult(code, out, err)

    yield call
    structlog.reset_defaults()  # the command's logs go to this test's stderr, which is closed after it


@pytest.fixture
def processes(folder: Path) -> Iterator[Processes]:
    """Starts processes in the test's folder, and ends them."""
    made = Processes(folder)
    yield made
    made.close()


@pytest.fixture(scope="session")
def chat() -> Callable[..., dict[str, Any]]:
    """Makes a chat request for the model called "tiny"."""

    def chat(custom_id: str, text: str = "hello", **body: Any) -> dict[str, Any]:
        message = {"role": "user", "content": text}
        return {
            "custom_id": custom_id,
            "method": "POST",
            "url": CHAT,
            "body": {"model": "tiny", "messages": [message], "max_tokens": 6, "temperature": 0, **body},
        }

    return chat


@pytest.fixture
def write_lines(folder: Path) -> Callable[..., Path]:
    """Writes requests.jsonl; text and bytes go in as they are."""

    def write(*lines: dict[str, Any] | str | bytes, name: str = "requests.jsonl") -> Path:
        path = folder / name
        with path.open("wb") as file:
            for line in lines:
                data = json.dumps(line) if isinstance(line, dict) else line
                file.write((data.encode() if isinstance(data, str) else data) + b"\n")
        return path

    return write


@pytest.fixture
def results() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads a job's results, in input order."""

    def read(out: Path) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(out / "results").sort_by("row").to_pylist()
        return rows

    return read
