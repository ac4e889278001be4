"""An input's URI determines how it is read; invalid URIs are refused before they get into a job's records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.inputs.open import open_pinned, pin_uri
from pipeline.inputs.pinning import WatchedInput, pin_input
from pipeline.planner import InputError
from schemas.jobs.inputs import InputFile, InputFormat, InputRef


def test_a_path_is_pinned_and_opened_as_a_local_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n")
    pinned = pin_uri(str(path))
    assert pinned == pin_input(path)
    opened = open_pinned(pinned)
    assert isinstance(opened, WatchedInput)
    assert opened.files()[0].open().read() == b"1\n"


def test_a_path_that_looks_like_a_url_further_down_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "s3:" / "in.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"1\n")
    assert pin_uri(f"{tmp_path}/s3://in.jsonl").files[0].size == 2


@pytest.mark.parametrize(
    "uri",
    [
        "https://bucket.s3.amazonaws.com/in.jsonl?X-Amz-Signature=hush-hush",
        "http://me:hush-hush@host/in.jsonl",
        "gs://bucket/in.jsonl",
        "file:///in.jsonl",
    ],
)
def test_other_schemes_are_refused_without_what_they_may_hide(uri: str) -> None:
    with pytest.raises(InputError, match="inputs come from a path or from s3://bucket/key") as caught:
        pin_uri(uri)
    assert "hush-hush" not in str(caught.value)
    assert ("presigned" in str(caught.value)) == ("?" in uri)


def test_files_of_two_kinds_of_storage_are_no_input() -> None:
    files = (InputFile(uri="/a.jsonl", size=1), InputFile(uri="s3://bucket/b.jsonl", size=1, etag='"1"'))
    with pytest.raises(InputError, match="mixes files of S3 and of this machine"):
        open_pinned(InputRef(uri="x", format=InputFormat.JSONL, files=files))


@pytest.mark.slow
def test_local_inputs_are_read_without_loading_boto3() -> None:
    script = "import sys, pipeline.jobs.planning, pipeline.inputs.open; sys.exit('boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("module", ["pipeline.adapters.s3.store", "pipeline.inputs.s3"])
@pytest.mark.slow
def test_without_boto3_one_line_says_what_to_install(module: str) -> None:
    script = f"""
import importlib, sys
from pipeline.ports import StoreError
sys.modules["boto3"] = None
try:
    importlib.import_module({module!r})
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "S3: boto3 is not installed; install it with: pip install 'tokenmill[aws]'\n"
