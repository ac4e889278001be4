"""Builds lane requests from HTTP bodies: validates them like the rows of a job, and applies the caller's limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.gateway.batches.requests import EXTENSION
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError, bad_request, unavailable
from pipeline.gateway.inference.response_cache import ResponseCache
from pipeline.gateway.inference.service_tier import take_service_tier
from pipeline.gateway.limits.admission import AdmittedRequest, RateLimiter
from pipeline.ingest.validation import first_mistake
from pipeline.lane.dialects import lane_url, rewrite_response, translate_event
from pipeline.models.open_releases import OpenRelease, OpenReleases
from pipeline.models.virtual_models import ModelResolver
from pipeline.overload.controller import OverloadController
from pipeline.planner.tokens import DEFAULT_TOKENS_PER_BYTE
from pipeline.ports import World
from pipeline.routing.requests import RoutedRequest, estimate_prompt_tokens
from pipeline.tracing import current_traceparent
from schemas.jobs.job import Tier
from schemas.models import CatalogEntry
from schemas.requests.dialects.anthropic.body import MESSAGES_URL
from schemas.requests.dialects.registry import DIALECTS
from schemas.requests.errors import STATUS_CODES, RowError
from schemas.requests.limits import Limits
from schemas.requests.parsing import Body, ChatBody, CompletionBody, GenerationBody, dump_body, parse_body
from schemas.requests.policy_report import extension_of
from schemas.requests.request_key import AnswerContext, request_key
from schemas.requests.sampling_defaults import answer_limit, fill_in
from schemas.requests.scoring import ClassifyBody
from schemas.requests.tokenizing import (
    COUNT_TOKENS_URL,
    TOKENIZER_URLS,
    DetokenizeBody,
    TokenizeBody,
    counted_chat,
    parse_tokenizing,
)
from schemas.settings.overload import StepName
from schemas.virtual_models import VirtualModel
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest

LIMITS: Final = ("max_tokens", "max_completion_tokens")
"""Fields that limit an answer's tokens."""

DEGRADED: Final = "x-tokenmill-degraded"
"""The response header with the steps of degradation that changed a request."""


class Extension(BaseModel):
    """The fields of a request under `tokenmill`.

    Attributes:
        tier: the request's priority tier; None: that of `service_tier`, else interactive.
        timeout: seconds after which the request is cancelled.
        resume: seconds for which an interrupted stream can be resumed; 0: it is cancelled when the client disconnects.
        cache: use the answer store; None: the default of the settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: Tier | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    resume: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    cache: bool | None = None


class StreamOptions(BaseModel):
    """OpenAI's stream options. `include_obfuscation` must be false or null: streams aren't obfuscated."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """Bounds and defaults of interactive requests.

    Attributes:
        max_timeout_seconds: the bound and the default of a request's `timeout`, in seconds.
        max_resume_seconds: the bound of `resume`, in seconds.
        default_model: of bodies without a model.
        caps: the largest max_tokens of each tier.  default_max_tokens: of requests without one.
    """

    max_timeout_seconds: float = 600.0
    max_resume_seconds: float = 60.0
    default_model: str | None = None
    caps: Mapping[Tier, int] = field(default_factory=dict)
    default_max_tokens: int = 4_096
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A lane request with the options of its HTTP response. The lane request of a dialect is a chat.

    Attributes:
        url: of the HTTP request.  body: its checked body; a dialect's is the chat's.
        model: as the body names it.  served_by: the name of the model that answers it, in the catalog.
        stream: the response is a stream.  include_usage: at the end of the stream.
        resume: seconds for which an interrupted stream can be resumed.
        ticket: the rate-limit tokens and slots that the request holds.
        cache_key: of its response; None: the answer store isn't used.
        policies: the fingerprint of the content policies that the catalog names for the model.
        service_tier: the response's, if the body sets one.
        degraded: steps of degradation that changed the request.
        canary: the release whose candidate answers; None: the served version does.
    """

    request: LaneRequest
    url: str
    body: Body | TokenizeBody | DetokenizeBody
    model: str
    served_by: str
    stream: bool = False
    include_usage: bool = False
    resume: float = 0.0
    ticket: AdmittedRequest | None = None
    cache_key: bytes | None = None
    policies: str | None = None
    service_tier: str | None = None
    degraded: tuple[StepName, ...] = ()
    canary: OpenRelease | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        limits = {} if self.ticket is None else self.ticket.headers
        return limits | ({DEGRADED: ", ".join(self.degraded)} if self.degraded else {})

    def version(self, name: str, attempt: int) -> str:
        """The name of the model that answered with this attempt; NAME@DIGEST where that is a version on trial."""
        is_candidate = self.canary is not None and attempt == 1 and name == self.served_by
        digest = self.canary.release.candidate.pin.digest if self.canary is not None and is_candidate else None
        return name if digest is None else f"{name}@{digest}"

    @property
    def added_fields(self) -> dict[str, Any]:
        """Fields of the response, and of a stream's chunks, that the worker does not write."""
        is_echoed = self.service_tier is not None and isinstance(self.body, GenerationBody)
        return {"service_tier": self.service_tier} if is_echoed else {}

    def rewrite(self, response: dict[str, Any]) -> dict[str, Any]:
        """The complete response in the format of the request's url, with the model's name from the request unless a
        content policy sent it to another model."""
        plain = response | {"model": self.model} if response.get("model") == self.served_by else response
        return rewrite_response(self.url, self.body, plain) | extension_of(response) | self.added_fields

    def translate(self, event: ErrorEvent) -> ErrorEvent:
        """The worker's error, with the names of the request's own parameters."""
        return translate_event(self.url, event)


class InferenceRequestBuilder:
    """Builds inference requests from bodies. Thread-safe.

    Args:
        rates: the rate limiter; None: no limits.
        cache: finds and stores responses; None: none are stored.
        resolver: finds the models of requests; None: one that knows nothing about the workers' load.
        overload: has the steps of degradation; None: there are none.
        releases: whose candidates answer some callers; None: there are none.
    """

    def __init__(
        self,
        world: World,
        settings: InferenceSettings | None = None,
        rates: RateLimiter | None = None,
        cache: ResponseCache | None = None,
        resolver: ModelResolver | None = None,
        overload: OverloadController | None = None,
        releases: OpenReleases | None = None,
    ) -> None:
        self.cache = cache
        self._overload = overload
        self._world = world
        self._rates = rates
        self._releases = releases
        self._settings = settings or InferenceSettings()
        self._resolver = resolver or ModelResolver(world.store, world.clock)

    @property
    def default_model(self) -> str | None:
        """The model of bodies that name none."""
        return self._settings.default_model

    def read(self, caller: Caller, url: str, body: Mapping[str, Any]) -> InferenceRequest:
        """Build and admit the request that a body describes; raises `ApiError`. It counts against the caller's limits
        until `release`."""
        if url in TOKENIZER_URLS:
            return self._read_tokenizing(caller, url, body)
        plain = self._with_model(body)
        extension = self._extension(plain.pop(EXTENSION, None))
        tier, service_tier = take_service_tier(url, plain, extension.tier)
        stream, include_usage = _streaming(url, plain)
        if include_usage and url in DIALECTS:
            message = "stream_options.include_usage is not supported: this stream always ends with its usage; remove it"
            raise bad_request(message, "stream_options.include_usage", "unsupported_parameter")
        with _refusals():
            checked = parse_body(url, plain, self._settings.limits)
            dumped = orjson.loads(dump_body(checked))
        entry, degraded = self._route_small(self._entry(checked, caller, tier))
        canary = self._canary(caller, entry, checked)
        if canary is not None:
            entry = canary.release.candidate
        defaults = entry.pin.sampling_defaults
        if (filled := fill_in(checked, defaults)) is not checked:
            checked, dumped = filled, orjson.loads(dump_body(filled))
        default_max_tokens = answer_limit(defaults, self._settings.default_max_tokens)
        if isinstance(checked, GenerationBody):
            self._check_tokens(caller, tier, url, checked, dumped, default_max_tokens)
            degraded += self._cap_tokens(entry.pin.loaded_name, checked, dumped, default_max_tokens)
        if stream and not isinstance(checked, GenerationBody):
            raise bad_request(f"there is no stream of {url}; remove stream", "stream")
        if stream and isinstance(checked, CompletionBody) and checked.echo:
            raise bad_request("echo is not supported in a stream; remove one of them", "echo", "unsupported_parameter")
        if stream and isinstance(checked, GenerationBody) and checked.prompt_logprobs is not None:
            message = "prompt_logprobs is not supported in a stream; remove one of them"
            raise bad_request(message, "prompt_logprobs", "unsupported_parameter")
        seconds = self._settings.max_timeout_seconds if extension.timeout is None else extension.timeout
        request = self._lane_request(caller, entry, lane_url(url), dumped, seconds, tier)
        key = self._cache_key(extension, checked, request, default_max_tokens)
        resume = extension.resume if stream else 0.0
        ticket = None
        if self._rates is not None:
            most = self._max_tokens(checked, dumped, default_max_tokens)
            ticket = self._rates.admit(caller, request.id, most, seconds, *_rows(checked))
        return InferenceRequest(
            request,
            url,
            checked,
            checked.model,
            entry.pin.name,
            stream,
            include_usage,
            resume,
            ticket,
            key,
            entry.policies,
            service_tier,
            degraded,
            canary,
        )

    def _read_tokenizing(self, caller: Caller, url: str, body: Mapping[str, Any]) -> InferenceRequest:
        """Build and admit a request for a worker's tokenizer. Its prompt counts as one that is computed."""
        plain = self._with_model(body)
        checked: ChatBody | TokenizeBody | DetokenizeBody
        with _refusals():
            if url == COUNT_TOKENS_URL:
                checked, dumped = counted_chat(plain, self._settings.limits)
            else:
                checked, _ = parse_tokenizing(url, plain, self._settings.limits)
                dumped = orjson.loads(checked.model_dump_json(exclude_defaults=True))
        seconds = self._settings.max_timeout_seconds
        entry = self._entry(checked, caller, Tier.INTERACTIVE)
        request = self._lane_request(caller, entry, url, dumped, seconds)
        ticket = None
        if self._rates is not None:
            ticket = self._rates.admit(caller, request.id, self._max_tokens(checked, dumped, 0), seconds)
        return InferenceRequest(request, url, checked, checked.model, entry.pin.name, ticket=ticket)

    def _with_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the body, with the default model if it names none."""
        default = self._settings.default_model
        return {**body, "model": default} if body.get("model") is None and default is not None else dict(body)

    def _lane_request(
        self,
        caller: Caller,
        entry: CatalogEntry,
        url: str,
        body: dict[str, Any],
        seconds: float,
        tier: Tier = Tier.INTERACTIVE,
    ) -> LaneRequest:
        return LaneRequest(
            id=f"http-{self._world.random.token(16).hex()}",
            model=entry.pin.key,
            url=url,
            body=body | {"model": entry.pin.name},  # which workers and content policies know
            tier=tier,
            tenant=caller.tenant,
            deadline=self._world.clock.now() + timedelta(seconds=seconds),
            traceparent=current_traceparent(),
        )

    def _cache_key(
        self, extension: Extension, body: Body, request: LaneRequest, default_max_tokens: int
    ) -> bytes | None:
        """The key of the response in the answer store; None: the store isn't used. Raises `ApiError` for a request that
        demands caching but can't be cached."""
        if extension.cache and self.cache is None:
            raise bad_request("responses aren't cached here; remove cache", f"{EXTENSION}.cache")
        if self.cache is None or not self.cache.options.includes(extension.cache):
            return None
        if isinstance(body, GenerationBody) and not body.is_deterministic:
            if extension.cache:
                message = f"{EXTENSION}.cache needs temperature 0 or a seed: otherwise each answer is another"
                raise bad_request(message, f"{EXTENSION}.cache")
            return None
        # They may have been lowered.
        limits: dict[str, Any] = {name: request.body[name] for name in LIMITS if name in request.body}
        sent = body.model_copy(update=limits) if limits else body
        return request_key(request.url, sent, AnswerContext(request.model, default_max_tokens))

    def find_cached(self, inference: InferenceRequest) -> dict[str, Any] | None:
        """The stored response of the same request; None: there is none. May block on the store."""
        if self.cache is None or inference.cache_key is None:
            return None
        found = self.cache.find(inference.request.tenant, inference.policies, inference.cache_key)
        return None if found is None or "model" not in found else found | {"model": inference.served_by}

    def add_to_cache(self, inference: InferenceRequest, event: EndEvent) -> None:
        """Store the response soon. It isn't stored when the worker's content policies differ from those in the catalog:
        the catalog's might refuse it."""
        if self.cache is not None and inference.cache_key is not None and event.policies == inference.policies:
            request = inference.request
            self.cache.add(request.tenant, event.policies, inference.cache_key, event.response, request.id)

    def release(self, inference: InferenceRequest, used: int | None) -> None:
        """Release the rate-limit tokens and slots of a finished request; may block on Redis. `used`: tokens; None:
        unknown."""
        if self._rates is not None and inference.ticket is not None:
            self._rates.release(inference.ticket, used)

    def _max_tokens(
        self, body: Body | TokenizeBody | DetokenizeBody, dumped: dict[str, Any], default_max_tokens: int
    ) -> int:
        """An estimated upper bound of the tokens of prompt and output, without the model's tokenizer."""
        if isinstance(body, DetokenizeBody):
            return len(body.tokens)
        prompt = max(1, round(len(orjson.dumps(dumped)) * DEFAULT_TOKENS_PER_BYTE))
        if not isinstance(body, GenerationBody):
            return prompt
        named = dumped.get("max_completion_tokens", dumped.get("max_tokens"))
        return prompt + body.n * body.num_prompts * (default_max_tokens if named is None else named)

    def _extension(self, given: Any) -> Extension:
        try:
            found = Extension() if given is None else Extension.model_validate_json(orjson.dumps(given), strict=True)
        except ValidationError as error:
            raise bad_request(f"{EXTENSION}.{first_mistake(error)}", EXTENSION) from None
        if found.timeout is not None and found.timeout > self._settings.max_timeout_seconds:
            longest = self._settings.max_timeout_seconds
            message = f"{EXTENSION}.timeout is {found.timeout:g}, but at most {longest:g} s are allowed"
            raise bad_request(message, f"{EXTENSION}.timeout")
        if found.resume > self._settings.max_resume_seconds:
            message = f"{EXTENSION}.resume is {found.resume:g}, but at most {self._settings.max_resume_seconds:g} s are"
            raise bad_request(f"{message} allowed", f"{EXTENSION}.resume")
        return found

    def _check_tokens(
        self,
        caller: Caller,
        tier: Tier,
        url: str,
        body: GenerationBody,
        dumped: dict[str, Any],
        default_max_tokens: int,
    ) -> None:
        """Refuse a request above the cap of the tier or the key. A request without max_tokens gets the key's cap."""
        limit = body.output_limit
        caps = [cap for cap in (self._settings.caps.get(tier), caller.max_tokens) if cap is not None]
        if limit is None:
            if caller.max_tokens is not None and caller.max_tokens < default_max_tokens:
                dumped["max_tokens"] = caller.max_tokens
            return
        if caps and limit > min(caps):
            name = "max_completion_tokens" if "max_completion_tokens" in dumped else "max_tokens"
            name = name if (dialect := DIALECTS.get(url)) is None else dialect.rename(name)
            of = "this API key" if min(caps) == caller.max_tokens else f"the {tier} tier"
            raise bad_request(f"{name} is {limit}, but {of} allows at most {min(caps)}; lower it", name)

    def _canary(self, caller: Caller, entry: CatalogEntry, body: Body) -> OpenRelease | None:
        """The release whose candidate answers this caller. The same version answers all requests of one user or
        conversation, where the body names one, else those of one API key."""
        if self._releases is None:
            return None
        named = (getattr(body, name, None) for name in ("user", "safety_identifier", "prompt_cache_key"))
        who = next(filter(None, named), None) or caller.key or self._world.random.token(16).hex()
        return self._releases.canary_of(entry, f"{caller.tenant}\0{who}")

    def _route_small(self, entry: CatalogEntry) -> tuple[CatalogEntry, tuple[StepName, ...]]:
        """The model that answers, and the step of degradation if that one has replaced it by a smaller one."""
        small = None if self._overload is None else self._overload.small_model(entry.pin.name)
        found = None if small is None else self._resolver.find(small)
        return (found, ("route_small",)) if isinstance(found, CatalogEntry) else (entry, ())

    def _cap_tokens(
        self, model: str, body: GenerationBody, dumped: dict[str, Any], default_max_tokens: int
    ) -> tuple[StepName, ...]:
        """Limit the answer's tokens, but not below min_tokens, while that step of degradation is active; returns the
        step if it shortens the answer."""
        cap = None if self._overload is None else self._overload.max_tokens(model)
        name = "max_completion_tokens" if "max_completion_tokens" in dumped else "max_tokens"
        if cap is None or dumped.get(name, default_max_tokens) <= (cap := max(cap, body.min_tokens)):
            return ()
        dumped[name] = cap
        return ("cap_max_tokens",)

    def _entry(self, body: Body | TokenizeBody | DetokenizeBody, caller: Caller, tier: Tier) -> CatalogEntry:
        """The catalog entry of the model that answers the request; raises `ApiError`."""
        name = body.model
        found = self._resolver.find(name)
        if isinstance(found, VirtualModel):
            if isinstance(body, TokenizeBody | DetokenizeBody):
                message = f"model {name[:80]!r} stands for several with different tokens; name one of them"
                raise bad_request(message, "model")
            tokens, now = estimate_prompt_tokens(body), self._world.clock.now()
            return self._resolver.choose(found, RoutedRequest(body, tokens, caller.tenant, tier, now))
        if found is None:
            missing = self._resolver.why_missing(name)
            if missing is None:
                raise unavailable("no model is served here yet; ask again when a worker is up", "no_model", seconds=10)
            raise ApiError(404, "model_not_found", missing, param="model")
        return found


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise the errors of a body's validation as `ApiError`."""
    try:
        yield
    except RowError as error:
        raise ApiError(STATUS_CODES[error.code], error.code.value, error.message, param=error.param) from None
    except ValueError:
        raise bad_request("the body holds half a character (a lone surrogate); send text") from None


def _rows(body: Body) -> tuple[int, str]:
    """The request's rows in the engine, for `running_rows`, and the field that multiplies them: its answers, or the
    prompts that choices continue. Pooled texts count as one: they are computed at once. So do a prompt's choices, of
    which those of one token are read from the prompt's last position."""
    if isinstance(body, GenerationBody):
        return body.n * body.num_prompts, "n" if body.n > 1 else "prompt"
    return (max(1, len(body.input)), "input") if isinstance(body, ClassifyBody) and body.choices else (1, "n")


def _streaming(url: str, plain: dict[str, Any]) -> tuple[bool, bool]:
    """Remove `stream` and `stream_options` from the body; returns `stream` and `include_usage`. Raises `ApiError`."""
    stream = plain.pop("stream", None)
    options = None if url == MESSAGES_URL else plain.pop("stream_options", None)  # the parser refuses it there
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
