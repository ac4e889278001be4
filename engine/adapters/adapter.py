"""A PEFT LoRA adapter on disk: checked against its model when it is opened, read when it is used.

An adapter adds factor * B A x to the product W x of a module (Hu et al. 2021, LoRA, section 4.1). Modules that a
decoder multiplies together (q, k and v) get one A, their rows stacked, and one B in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.adapters.settings import CONFIG_FILE, MAX_RANK, LoraSettings, read_settings
from engine.adapters.targets import Product, Target, find_targets
from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.head_order import qkv_order

WEIGHTS_FILE = "adapter_model.safetensors"

_PEFT_PREFIX = "base_model.model."
_LAYERS = ("model.", "", "language_model.model.", "model.language_model.")
"""Prefixes of a decoder's layers, as transformers names them in models of text and of text and images."""

_HASHED_AT_ONCE = 1 << 20


class LowRank(NamedTuple):
    """What an adapter adds to one product: B A x.

    Attributes:
        a: float32 [rank, in_features].
        b: float32 [out_features, rank], the factor included; rows in the order in which the decoder has them.
    """

    a: Tensor
    b: Tensor


class AdapterPart(NamedTuple):
    """A module of an adapter.

    Attributes:
        target: its place in a product.
        factor: of B A.
        a, b: names of its tensors.
        a_columns, b_rows: of these, that are read.
    """

    target: Target
    factor: float
    rank: int
    a: str
    b: str
    a_columns: slice = slice(None)
    b_rows: slice = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that fits its model.

    Attributes:
        name: that requests choose it by.
        folder: of its files.
        digest: 16 bytes, of its files.
        parts: of each product of a layer that it changes.
        decoder: whose products they are.
        weights: of its file.
    """

    name: str
    folder: Path
    digest: bytes
    parts: Mapping[tuple[int, Product], tuple[AdapterPart, ...]]
    decoder: DecoderSpec
    weights: SafetensorsCheckpoint

    def rank(self, layer: int, product: Product) -> int:
        """Return the rank of its change of a product, of all modules together; 0: it changes nothing."""
        return sum(part.rank for part in self.parts.get((layer, product), ()))

    def max_rank(self, product: Product) -> int:
        """Return the largest rank of its changes of a product; 0: it changes none."""
        return max((self.rank(*at) for at in self.parts if at[1] == product), default=0)

    @property
    def num_elements(self) -> int:
        """Of all its matrices."""
        parts = (part for parts in self.parts.values() for part in parts)
        return sum(part.rank * (part.target.rows + part.target.columns) for part in parts)

    def read(self, layer: int, product: Product) -> LowRank | None:
        """Read its change of a product; None: it changes nothing.

        Raises:
            CorruptWeights: the file can't be read any more.
        """
        parts = self.parts.get((layer, product))
        if not parts:
            return None
        a = torch.empty(sum(part.rank for part in parts), parts[0].target.columns)
        b = torch.zeros(self._rows(product, layer), len(a))
        at = 0
        for part in parts:
            ranks = slice(at, at + part.rank)
            of_a, of_b = self.matrices(part)
            a[ranks] = of_a
            rows = slice(part.target.first, part.target.first + part.target.rows)
            b[rows, ranks] = of_b * part.factor
            at += part.rank
        order = qkv_order(self.decoder, layer) if product == "qkv" else None
        return LowRank(a, b if order is None else b[order])

    def matrices(self, part: AdapterPart) -> tuple[Tensor, Tensor]:
        """Read A [rank, columns] and B [rows, rank] of a part, both float32, without the factor."""
        # mapped when it was opened: a file put in its place is not read
        a, b = self.weights.floats(part.a), self.weights.floats(part.b)
        return a[:, part.a_columns].float(), b[part.b_rows].float()

    def _rows(self, product: Product, layer: int) -> int:
        spec = self.decoder
        if product == "qkv":
            return sum(spec.qkv_rows.values())
        return sum(spec.gate_up_rows(spec.intermediate_size).values()) if product == "gate_up" else spec.hidden_size


def open_adapter(name: str, folder: Path, decoder: DecoderSpec) -> Adapter:
    """Open an adapter and check it against the model, without reading its weights but for their digest.

    Raises:
        ModelNotFound: there is none.  UnsupportedModel: it does more than is supported; names it.
        CorruptWeights: its files can't be read, contradict each other, or are of another model.
    """
    settings = read_settings(folder)
    file = check_weights_file(folder)
    weights = SafetensorsCheckpoint(folder, WEIGHTS_FILE)
    targets = find_targets(decoder)
    if len(weights.names) > 2 * len(targets):
        raise CorruptWeights(f"{file} holds {len(weights.names)} tensors, more than the model has modules for")
    stored: dict[str, dict[str, str]] = {}
    for tensor in weights.names:
        module, matrix = _parse(file, tensor)
        stored.setdefault(module, {})[matrix] = tensor
    if not stored:
        raise CorruptWeights(f"{file} holds no tensors")
    parts: dict[tuple[int, Product], list[AdapterPart]] = {}
    for module, matrices in stored.items():
        part = _check(file, module, matrices, weights, settings, targets)
        beside = parts.setdefault((part.target.layer, part.target.product), [])
        if any(part.target.first == other.target.first for other in beside):
            raise CorruptWeights(f"{file} changes the module {module} twice")
        beside.append(part)
    ordered = {key: tuple(sorted(found, key=lambda part: part.target.first)) for key, found in parts.items()}
    return Adapter(name, folder, digest_adapter(folder), ordered, decoder, weights)


def check_weights_file(folder: Path) -> Path:
    """Return the file of an adapter's weights. Raises `ModelNotFound` if there is none, or none in safetensors."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = ": its weights are pickled, which can run code; convert them to safetensors" if pickled else ""
        raise ModelNotFound(f"{folder} has no {WEIGHTS_FILE}{hint}")
    return file


def digest_adapter(folder: Path) -> bytes:
    """Return 16 bytes that identify an adapter's files.

    Raises:
        ModelNotFound: one of them is missing, or can't be read.
    """
    digest = blake2b(digest_size=16, person=b"lora adapter")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        try:
            digest.update(b"%d:" % path.stat().st_size)
            with path.open("rb") as file:
                while piece := file.read(_HASHED_AT_ONCE):
                    digest.update(piece)
        except OSError as error:
            raise ModelNotFound(f"{path} of an adapter can't be read: {error.strerror}") from error
    return digest.digest()


def _parse(file: Path, tensor: str) -> tuple[str, str]:
    """Return the module of a tensor, without PEFT's prefix, and "A" or "B"."""
    for matrix in ("A", "B"):
        if tensor.startswith(_PEFT_PREFIX) and tensor.endswith(ending := f".lora_{matrix}.weight"):
            return tensor[len(_PEFT_PREFIX) : -len(ending)], matrix
    kinds = {"lora_embedding": "an embedding", "lora_magnitude": "DoRA", "modules_to_save": "a whole module"}
    kind = next((said for part, said in kinds.items() if part in tensor), "neither lora_A nor lora_B of a module")
    raise UnsupportedModel(f"{file}: tensor {tensor[:200]!r} is {kind}, which is not supported")


def _check(
    file: Path, module: str, matrices: Mapping[str, str], weights: SafetensorsCheckpoint, settings: LoraSettings,
    targets: Mapping[str, Target],
) -> AdapterPart:  # fmt: skip
    """Check a module's tensors against its settings and the model."""
    target = find_target(module, targets)
    if target is None:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in targets}))
        raise UnsupportedModel(
            f"{file}: the module {module[:200]!r} can't have an adapter here; those of this model's layers can: {known}"
        )
    if not settings.names(module):
        raise CorruptWeights(f"{file} holds the module {module}, which target_modules of {CONFIG_FILE} doesn't name")
    if len(matrices) != 2:
        missing = "B" if "A" in matrices else "A"
        raise CorruptWeights(f"{file}: lora_{missing} of {module} is missing")
    a, b = matrices["A"], matrices["B"]
    rank = settings.rank_of(module)
    for tensor, shape in ((a, (rank, target.columns)), (b, (target.rows, rank))):
        if (found := weights.shape(tensor)) != shape:
            raise CorruptWeights(
                f"{file}: tensor {tensor} has shape {list(found)}, but rank {rank} and the model ask for {list(shape)}"
            )
        weights.check_float(tensor)
    assert 1 <= rank <= MAX_RANK
    return AdapterPart(target, settings.factor(module), rank, a, b)


def find_target(module: str, targets: Mapping[str, Target]) -> Target | None:
    """Return the target of a module by its full name in a checkpoint; None: it is none."""
    for prefix in _LAYERS:
        if module.startswith(prefix) and (target := targets.get(module[len(prefix) :])) is not None:
            return target
    return None
