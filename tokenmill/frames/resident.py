"""A model that stays loaded between calls of `tokenmill.map`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from tokenmill.errors import InvalidCall

if TYPE_CHECKING:
    from schemas.jobs.plan import PlanSegment
    from schemas.models import ModelPin
    from tokenmill.frames.options import EngineKeywords
    from tokenmill.local.run_plan import LoadAny, RunPlan
    from workers.model.loaded_model import LoadedModel


def load_model(model: str, **options: Unpack[EngineKeywords]) -> ResidentModel:
    """A model for several calls of `tokenmill.map` and its siblings, in place of its name there.

    The weights are loaded by the first call, and stay until `close` or the end of the `with` block; so do the blocks of
    the prefix cache. The KV cache has the size that a server gives it, as the rows of later calls are not known. Calls
    take turns: it computes one at a time.

    Args:
        model: as `map` takes it.
        **options: the engine's options, as `map` takes them, but for `replicas`.

    Raises:
        InvalidCall: an option can't be used.

    Example:
        >>> with tm.load_model("demo", dtype="bfloat16") as model:  # doctest: +SKIP
        ...     good = tm.map(frame, prompt="Is this review good? {{ review }}", model=model)
        ...     spam = tm.map(frame, prompt="Is this review spam? {{ review }}", model=model)
    """
    from tokenmill.frames.options import EngineKeywords, Sampling, check_options

    for name in options:
        if name in Sampling.__annotations__:
            raise InvalidCall(f"{name}: is a sampling parameter; give it to map")
    engine = check_options(options, EngineKeywords)
    name_and_options(model, engine)
    if engine.get("replicas", 1) != 1:
        raise InvalidCall("replicas: must be 1 for a model that stays loaded; give replicas to map, with its name")
    return ResidentModel(model, engine)


class ResidentModel:
    """A model that stays loaded until it is closed; made by `load_model`.

    Attributes:
        name: as given.  options: of the engine, checked.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, options
        self._turn = threading.Lock()
        self._of: tuple[object, ...] | None = None  # the pin's key, the replaced chat template, adapters' digests
        self._loaded: LoadedModel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the model's memory. A later call loads it again."""
        with self._turn:
            self._release()

    @contextmanager
    def turn(self) -> Iterator[LoadAny]:
        """The exclusive use of the model by one job, which loads it if need be. A job that fails or is stopped may
        leave rows in the engine, so the model is released then."""
        with self._turn:
            try:
                yield self._load
            except BaseException:
                self._release()
                raise

    def _load(self, plan: RunPlan, pin: ModelPin, _: list[PlanSegment] | None) -> LoadedModel:
        """The model of this pin. It is loaded anew if its weights, adapters or chat template changed."""
        from engine.adapters.adapter import digest_adapter
        from tokenmill.local.run_plan import load_model

        wanted = pin.key, plan.chat, *(digest_adapter(Path(folder)) for _, folder in plan.engine.adapters)
        if self._loaded is None or self._of != wanted:
            self._release()
            self._loaded, self._of = load_model(plan, pin, None), wanted
        return self._loaded

    def _release(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()


Model = str | ResidentModel


def load_in_turn(model: Model) -> AbstractContextManager[LoadAny | None]:
    """The use of a model by one job; None: the job loads its own."""
    return model.turn() if isinstance(model, ResidentModel) else nullcontext()


def name_and_options(model: Model, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The model's name, and the engine's options of a call in this process. Raises `InvalidCall`."""
    if "concurrency" in options:
        raise InvalidCall("concurrency: is of Ray datasets; on one machine give replicas")
    if not isinstance(model, ResidentModel):
        return model, options
    if options:
        raise InvalidCall(f"{next(iter(options))}: the model is loaded already; give it to load_model")
    return model.name, model.options
