"""From a body to a request on the lane: checked as a row of a job is, and by what the caller may ask for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.gateway.batches.requests import EXTENSION
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError, bad_request, unavailable
from pipeline.gateway.inference.response_cache import AnswerCache, cache_key
from pipeline.gateway.limits.rate_limits import AdmittedRequest, RateLimiter
from pipeline.ingest.validation import first_mistake
from pipeline.models.catalog import Catalog
from pipeline.planner.tokens import DEFAULT_TOKENS_PER_BYTE
from pipeline.ports import World
from pipeline.tracing import current_traceparent
from schemas.jobs.job import Tier
from schemas.models import CatalogEntry
from schemas.requests.bodies import Body
from schemas.requests.errors import STATUS_CODES, RowError
from schemas.requests.limits import Limits
from schemas.requests.requests import CHAT_URL, CompletionBody, GenerationBody, dump_body, parse_body
from schemas.workers.lane import EndEvent, LaneRequest

_BELIEVED: Final = 5.0
_MOST_NAMES: Final = 1_000


class Extension(BaseModel):
    """What a request may say under `tokenmill`.

    Attributes:
        tier: how urgent.
        timeout: seconds after which it is given up.
        resume: seconds for which a stream that was cut off may be gone on with; without, it is cancelled at once.
        cache: an answer that was given to the same request may be given again; None: as the settings say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: Tier = Tier.INTERACTIVE
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    resume: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    cache: bool | None = None


class StreamOptions(BaseModel):
    """OpenAI's. `include_obfuscation` can only be off: nothing is obfuscated."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """What callers may ask for; seconds.

    Attributes:
        longest: a request is given up after this long, or earlier if it says so.
        longest_resume: for which a stream may be gone on with.
        default_model: of bodies that name none.
        caps: the largest max_tokens of each tier.  default_max_tokens: of requests that name none.
    """

    longest: float = 600.0
    longest_resume: float = 60.0
    default_model: str | None = None
    caps: Mapping[Tier, int] = field(default_factory=dict)
    default_max_tokens: int = 4_096
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request, and how its answer is wanted.

    Attributes:
        model: as the body names it.  stream: token by token.  include_usage: at the end of the stream.
        resume: seconds for which the stream is kept for a reader that was cut off.
        ticket: what was taken for it of the caller's limits.
        cache_key: of its answer; None: it is neither looked for nor kept.
        policies: the fingerprint of the content policies that are to judge it, as far as is known.
    """

    request: LaneRequest
    model: str
    stream: bool = False
    include_usage: bool = False
    resume: float = 0.0
    ticket: AdmittedRequest | None = None
    cache_key: str | None = None
    policies: str | None = None


class InferenceRequestBuilder:
    """Reads bodies. Threads may share one.

    Args:
        rates: what callers may ask for in a minute, and at once; None: there is no limit.
        cache: of answers; None: nothing is kept.
    """

    def __init__(
        self,
        world: World,
        settings: InferenceSettings | None = None,
        rates: RateLimiter | None = None,
        cache: AnswerCache | None = None,
    ) -> None:
        self.cache = cache
        self._world = world
        self._rates = rates
        self._settings = settings or InferenceSettings()
        self._catalog = Catalog(world.store)
        self._models: dict[str, tuple[float, CatalogEntry]] = {}  # name -> until when it is believed
        self._lock = threading.Lock()

    @property
    def default_model(self) -> str | None:
        """Of bodies that name none."""
        return self._settings.default_model

    def read(self, caller: Caller, url: str, body: Mapping[str, Any]) -> InferenceRequest:
        """What the body asks for; raises `ApiError`. Where there are limits it counts from now on, until `ended`."""
        plain = dict(body)
        extension = self._extension(plain.pop(EXTENSION, None))
        stream, include_usage = _streaming(plain)
        if plain.get("model") is None and self._settings.default_model is not None:
            plain["model"] = self._settings.default_model
        try:
            checked = parse_body(url, plain, self._settings.limits)
            dumped = orjson.loads(dump_body(checked))
        except RowError as error:
            raise ApiError(STATUS_CODES[error.code], error.code.value, error.message, param=error.param) from None
        except ValueError:
            raise bad_request("the body holds half a character (a lone surrogate); send text") from None
        if isinstance(checked, GenerationBody):
            self._check_tokens(caller, extension.tier, url, checked, dumped)
        if stream and not isinstance(checked, GenerationBody):
            raise bad_request("there is no stream of embeddings; remove stream", "stream")
        if stream and isinstance(checked, CompletionBody) and checked.echo:
            raise bad_request("echo is not supported in a stream; remove one of them", "echo", "unsupported_parameter")
        seconds = self._settings.longest if extension.timeout is None else extension.timeout
        entry = self._entry(checked.model)
        request = LaneRequest(
            id=f"http-{self._world.random.token(16).hex()}",
            model=entry.pin.key,
            url=url,
            body=dumped,
            tier=extension.tier,
            tenant=caller.tenant,
            deadline=self._world.clock.now() + timedelta(seconds=seconds),
            traceparent=current_traceparent(),
        )
        key = self._cache_key(extension, checked, request, entry.policies)
        resume = extension.resume if stream else 0.0
        ticket = None
        if self._rates is not None:
            rows = checked.n if isinstance(checked, GenerationBody) else 1
            ticket = self._rates.admit(caller, request.id, self._most_tokens(checked, dumped), seconds, rows)
        return InferenceRequest(request, checked.model, stream, include_usage, resume, ticket, key, entry.policies)

    def _cache_key(self, extension: Extension, body: Body, request: LaneRequest, policies: str | None) -> str | None:
        """Under which the answer is kept; None: it isn't. Raises `ApiError` where that is asked for, and can't be."""
        if extension.cache and self.cache is None:
            raise bad_request("no answers are kept here; remove cache", f"{EXTENSION}.cache")
        wanted = self.cache is not None and self.cache.settings.always if extension.cache is None else extension.cache
        if not wanted:
            return None
        if isinstance(body, GenerationBody) and not body.deterministic:
            if extension.cache:
                message = f"{EXTENSION}.cache needs temperature 0 or a seed: otherwise each answer is another"
                raise bad_request(message, f"{EXTENSION}.cache")
            return None
        return cache_key(request, self._settings.default_max_tokens, policies)

    def find(self, asked: InferenceRequest) -> dict[str, Any] | None:
        """The answer that the same request had, if it is to be had; may wait for a server."""
        if self.cache is None or asked.cache_key is None:
            return None
        return self.cache.find(asked.request.tenant, asked.cache_key)

    def keep(self, asked: InferenceRequest, event: EndEvent) -> None:
        """The answer, for the same request's next time; may wait for a server. Not where a worker answered whose
        policies are other ones than the catalog says: those that come next might refuse it."""
        if self.cache is not None and asked.cache_key is not None and event.policies == asked.policies:
            self.cache.keep(asked.request.tenant, asked.cache_key, event.response)

    def ended(self, asked: InferenceRequest, used: int | None) -> None:
        """The request is over, after so many tokens (None: nobody knows); may wait for a server."""
        if self._rates is not None and asked.ticket is not None:
            self._rates.release(asked.ticket, used)

    def _most_tokens(self, body: Body, dumped: dict[str, Any]) -> int:
        """Of prompt and answer, as far as can be known without the model's tokenizer."""
        prompt = max(1, round(len(orjson.dumps(dumped)) * DEFAULT_TOKENS_PER_BYTE))
        if not isinstance(body, GenerationBody):
            return prompt
        named = dumped.get("max_completion_tokens", dumped.get("max_tokens"))
        return prompt + body.n * (self._settings.default_max_tokens if named is None else named)

    def _extension(self, given: Any) -> Extension:
        try:
            found = Extension() if given is None else Extension.model_validate_json(orjson.dumps(given), strict=True)
        except ValidationError as error:
            raise bad_request(f"{EXTENSION}.{first_mistake(error)}", EXTENSION) from None
        if found.timeout is not None and found.timeout > self._settings.longest:
            message = f"{EXTENSION}.timeout is {found.timeout:g}, but at most {self._settings.longest:g} s are allowed"
            raise bad_request(message, f"{EXTENSION}.timeout")
        if found.resume > self._settings.longest_resume:
            message = f"{EXTENSION}.resume is {found.resume:g}, but at most {self._settings.longest_resume:g} s are"
            raise bad_request(f"{message} allowed", f"{EXTENSION}.resume")
        return found

    def _check_tokens(self, caller: Caller, tier: Tier, url: str, body: GenerationBody, dumped: dict[str, Any]) -> None:
        """Refuses what is above the cap of the tier or the key. A request that names no number gets the key's."""
        limit = body.output_limit
        caps = [cap for cap in (self._settings.caps.get(tier), caller.max_tokens) if cap is not None]
        if limit is None:
            if caller.max_tokens is not None and caller.max_tokens < self._settings.default_max_tokens:
                dumped["max_tokens"] = caller.max_tokens
            return
        if caps and limit > min(caps):
            name = "max_completion_tokens" if "max_completion_tokens" in dumped and url == CHAT_URL else "max_tokens"
            of = "this API key" if min(caps) == caller.max_tokens else f"the {tier} tier"
            raise bad_request(f"{name} is {limit}, but {of} allows at most {min(caps)}; lower it", name)

    def _entry(self, name: str) -> CatalogEntry:
        """The model as the catalog has it; raises `ApiError`."""
        now = self._world.clock.monotonic()
        known = self._models.get(name)
        if known is not None and now < known[0]:
            return known[1]
        entry = self._catalog.find(name)
        if entry is None:
            names = [other.pin.name for other in self._catalog.entries()]
            if not names:
                raise unavailable("no model is served here yet; ask again when a worker is up", "no_model", seconds=10)
            message = f"model {name[:80]!r} is not served here ({', '.join(names)})"
            raise ApiError(404, "model_not_found", message, param="model")
        with self._lock:
            if len(self._models) >= _MOST_NAMES:
                self._models.clear()
            self._models[name] = now + _BELIEVED, entry
        return entry


def _streaming(plain: dict[str, Any]) -> tuple[bool, bool]:
    """Takes `stream` and `stream_options` out of the body; raises `ApiError`."""
    stream, options = plain.pop("stream", None), plain.pop("stream_options", None)
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("stream must be true or false", "stream")
    if options is None:
        return bool(stream), False
    if not stream:
        raise bad_request("stream_options needs stream; set stream to true", "stream_options")
    try:
        chosen = StreamOptions.model_validate(options)
    except ValidationError as error:
        raise bad_request(f"stream_options.{first_mistake(error)}", "stream_options") from None
    if chosen.include_obfuscation:
        message = "stream_options.include_obfuscation is not supported: nothing is obfuscated; remove it"
        raise bad_request(message, "stream_options.include_obfuscation", "unsupported_parameter")
    return True, bool(chosen.include_usage)
