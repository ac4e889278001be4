"""Models in a bucket: taken whole, as they are there now, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.servers.moto import MotoServer
from tests.waiting import HANG_SECONDS
from tokenmill.config.engine_options import engine_options
from tokenmill.errors import ModelError, UserError
from tokenmill.models import s3 as bucket_models
from tokenmill.models.sources import ModelSource, cached, pull, purpose
from tokenmill.settings import read_settings

WEIGHTS = bytes(range(256)) * 400
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "1_Pooling/config.json": b'{"pooling": 1}'}


class Weights(NamedTuple):
    """A bucket with a model in the folder `tiny`."""

    client: Any
    bucket: str
    url: str

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=name, Body=data)


@pytest.fixture
def weights(s3_server: MotoServer, unique_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.setenv("TOKENMILL_S3__ENDPOINT", s3_server.endpoint)
    monkeypatch.setattr(bucket_models, "PIECE_BYTES", 10_000)  # so that a file has many
    bucket = s3_server.make_bucket(unique_name()[-40:])
    made = Weights(s3_server.client(), bucket, f"s3://{bucket}/models/tiny")
    for name, data in FILES.items():
        made.put(f"models/tiny/{name}", data)
    return made


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_given_an_adapter_in_a_bucket_when_it_is_named_then_its_files_are_in_the_cache(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_MODEL_CACHE", str(tmp_path))
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
    url = f"s3://{weights.bucket}/adapters/legal"
    for name, data in (files | {"adapter_model.bin": b"pickle", "checkpoint-1/adapter_config.json": b"old"}).items():
        weights.put(f"adapters/legal/{name}", data)
    options = engine_options(read_settings(), adapter=[f"legal={url}"])
    ((name, folder),) = options.adapters
    assert (name, files_in(Path(folder))) == ("legal", files)
    assert [(source.name, purpose(source)) for source in cached(tmp_path)] == [(url, "adapter")]
    with pytest.raises(UserError, match=r"--adapter a=s3://.*/nowhere: there is no adapter_config.json"):
        engine_options(read_settings(), adapter=[f"a=s3://{weights.bucket}/nowhere"])


def ignore_message(_message: str) -> None:
    """For tests that ignore the messages."""


def test_given_a_model_in_a_bucket_when_it_is_pulled_then_its_files_are_in_the_cache(
    weights: Weights, tmp_path: Path
) -> None:
    weights.put("models/tiny/modeling.py", b"raise SystemExit")
    weights.put("models/tiny/pytorch_model.bin", b"pickle")
    weights.put("models/tiny-other/config.json", b"other")

    source = pull(weights.url, tmp_path, ignore_message)

    assert files_in(source.path) == FILES  # neither code nor pickles, and nothing of a folder that begins alike
    assert source.size == sum(len(data) for data in FILES.values())
    assert cached(tmp_path) == [source]


@pytest.mark.slow
def test_given_a_pulled_model_when_it_is_pulled_again_then_nothing_is_fetched(weights: Weights, tmp_path: Path) -> None:
    said: list[str] = []
    first = pull(weights.url, tmp_path, said.append)
    again = pull(weights.url + "/", tmp_path, said.append)
    assert again.path == first.path
    assert len(said) == 1


@pytest.mark.slow
def test_given_another_state_in_the_bucket_when_it_is_pulled_then_it_has_another_revision(
    weights: Weights, tmp_path: Path
) -> None:
    first = pull(weights.url, tmp_path, ignore_message)
    weights.put("models/tiny/model.safetensors", WEIGHTS[::-1])

    second = pull(weights.url, tmp_path, ignore_message)

    assert second.revision != first.revision
    assert files_in(second.path)["model.safetensors"] == WEIGHTS[::-1]
    assert files_in(first.path) == FILES  # a process that runs with it still has it


def test_given_a_model_that_changes_while_it_is_pulled_then_nothing_of_it_is_stored(
    weights: Weights, tmp_path: Path
) -> None:
    def change(_said: str) -> None:
        weights.put("models/tiny/model.safetensors", WEIGHTS[::-1])

    with pytest.raises(ModelError, match=r"model\.safetensors was changed"):
        pull(weights.url, tmp_path, change)
    assert files_in(tmp_path) == {}


@pytest.mark.slow
def test_given_two_pulls_at_once_when_both_end_then_both_have_the_model(weights: Weights, tmp_path: Path) -> None:
    together = threading.Barrier(2)
    found: list[ModelSource] = []
    pulls = [
        threading.Thread(
            target=lambda: found.append(pull(weights.url, tmp_path, lambda _: bool(together.wait(HANG_SECONDS))))
        )
        for _ in range(2)
    ]
    for one in pulls:
        one.start()
    for one in pulls:
        one.join()
    assert [files_in(source.path) for source in found] == [FILES, FILES]
    assert list(tmp_path.rglob(".pull-*")) == []


@pytest.mark.slow
def test_given_one_gguf_file_when_it_is_pulled_then_its_path_is_given(weights: Weights, tmp_path: Path) -> None:
    weights.put("models/one.gguf", b"GGUF" + WEIGHTS)
    weights.put("models/one.gguf.json", b"{}")
    source = pull(f"s3://{weights.bucket}/models/one.gguf", tmp_path, ignore_message)
    assert source.path.name == "one.gguf"
    assert source.path.read_bytes() == b"GGUF" + WEIGHTS
    assert [one.path for one in cached(tmp_path)] == [source.path]


@pytest.mark.parametrize("name", ["../../evil.json", "a/../../../evil.json", "/evil.json"])
@pytest.mark.slow
def test_given_a_name_that_leads_out_of_the_folder_when_it_is_pulled_then_it_is_refused(
    weights: Weights, tmp_path: Path, name: str
) -> None:
    weights.put(f"models/tiny/{name}", b"evil")
    cache = tmp_path / "deep" / "cache"
    with pytest.raises(ModelError, match="can't be a file's"):
        pull(weights.url, cache, ignore_message)
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("below", ["nothing", "models/none.gguf"])
@pytest.mark.slow
def test_given_no_model_there_when_it_is_pulled_then_it_is_an_error(
    weights: Weights, tmp_path: Path, below: str
) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        pull(f"s3://{weights.bucket}/{below}", tmp_path, ignore_message)


def test_given_no_bucket_when_a_model_is_pulled_then_the_error_has_a_remedy(weights: Weights, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such bucket; create it or correct the URL"):
        pull(f"s3://{weights.bucket}-not/models", tmp_path, ignore_message)


@pytest.mark.slow
def test_given_too_small_a_disk_when_a_model_is_pulled_then_it_is_refused_before(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int = 1_000

    monkeypatch.setattr(bucket_models.shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(ModelError, match="of room"):
        pull(weights.url, tmp_path, ignore_message)
