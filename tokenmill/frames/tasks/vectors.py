"""`tokenmill.embed`: a text to an embedding model, and its vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.prompts import RowText
from tokenmill.frames.tasks.task import ORIGIN, USAGE, FormerAnswer, Task

if TYPE_CHECKING:
    from schemas.requests.parsing import Body

SUFFIXES = ("", "_error", *USAGE, *ORIGIN)


def vector_task(text: RowText, dimensions: int | None, prompt_name: str | None) -> Task:
    """The task of embedding a text."""
    from schemas.requests.parsing import EMBEDDINGS_URL

    given = {"dimensions": dimensions, "prompt_name": prompt_name}
    body = {name: value for name, value in given.items() if value is not None}
    return Task(
        EMBEDDINGS_URL, {"text": text}, lambda texts: {"input": texts["text"]}, body, SUFFIXES, ("embedding",),
        _answers, lambda results: VectorAnswers(_size_of(results) if dimensions is None else dimensions),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VectorAnswers:
    """Vectors of one size, float32; see `Answers`. `size` None: unknown, as there is no vector."""

    size: int | None
    former: tuple[str, ...] = ("",)

    def columns(self, results: pa.Table, errors: list[str | None]) -> dict[str, pa.Array]:
        """The vectors as a fixed-size list [rows, size]; as a list of any size if that is unknown."""
        vectors = results["embedding"].cast(pa.list_(pa.float32(), -1 if self.size is None else self.size))
        return {"": vectors.combine_chunks() if vectors.num_chunks else pa.array([], vectors.type)}

    def former_answer(self, cells: Mapping[str, Any]) -> FormerAnswer | None:
        """The vector, if it has the size."""
        try:
            vector = np.asarray(cells[""], dtype=np.float32)
        except (TypeError, ValueError):
            return None
        if vector.shape != (self.size,) or not np.isfinite(vector).all():
            return None
        data = [{"object": "embedding", "index": 0, "embedding": vector.tolist()}]
        return FormerAnswer({"object": "list", "data": data}, embedding=vector.tolist())


def _size_of(results: pa.Table) -> int | None:
    """The size of the first vector."""
    vectors = results["embedding"].drop_null()
    return len(vectors[0]) if len(vectors) else None


def _answers(path: Path, body: Body) -> VectorAnswers:
    from engine.models.encoders.settings import embedding_settings
    from engine.models.load import describe_shape
    from schemas.requests.parsing import EmbeddingBody

    assert isinstance(body, EmbeddingBody)
    settings = embedding_settings(path)
    if settings is None:
        raise InvalidCall(
            f"model: {path} publishes no pooling settings (modules.json), so it makes no embeddings; choose a model "
            "made for them, such as sentence-transformers/all-MiniLM-L6-v2"
        )
    if body.prompt_name is not None and body.prompt_name not in settings.prompts:
        known = ", ".join(sorted(settings.prompts)) or "none"
        raise InvalidCall(f"prompt_name: is {body.prompt_name!r}, but the model's prompts are {known}")
    size = settings.size(describe_shape(path)[0].hidden_size)
    wanted = size if body.dimensions is None else body.dimensions
    cuts = settings.dimensions
    if wanted > size or (cuts is not None and wanted not in (*cuts, size)):
        known = f"have {size} numbers" if cuts is None else f"can be cut to {', '.join(map(str, cuts))}"
        raise InvalidCall(f"dimensions: is {wanted}, but the model's vectors {known}")
    return VectorAnswers(wanted)
