"""The choice of a model: the first rule whose conditions hold, for one request or for a batch of rows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final, Protocol

from pipeline.routing.complexity import complexity
from pipeline.routing.language import language_of
from pipeline.routing.loads import NO_LOADS, Loads
from pipeline.routing.requests import RoutedRequest
from schemas.virtual_models import Conditions, LabelCondition, VirtualModel, is_within

MAX_CLASSIFIED_CHARS: Final = 8_192
"""Characters of the last user message that a classification model gets: the first ones."""

MAX_TEXTS: Final = 64
"""Texts that a classification model is asked about at once, within one time-out."""

_Label = tuple[str, float]
NO_LABEL: Final[_Label] = ("", 0.0)


class Classifier(Protocol):
    """Asks served classification models for labels."""

    def classify(
        self, model: str, texts: Sequence[str], timeout_seconds: float, tenant: str
    ) -> list[tuple[str, float]] | None:
        """The label of each text and its probability; None: no answer in time, or an error. At most `MAX_TEXTS`."""
        ...


class RouteCounts:
    """Counts chosen models, and failures of classification models. Threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[str] = Counter()

    def record(self, virtual: str, models: Sequence[str]) -> None:
        """Count requests by the model that was chosen."""
        with self._lock:
            self._chosen.update((virtual, model) for model in models)

    def record_failures(self, classifier: str, requests: int) -> None:
        """Count requests that got the default because this model gave them no label."""
        with self._lock:
            self._failures[classifier] += requests

    def chosen(self) -> dict[tuple[str, str], int]:
        """(virtual model, chosen model) -> requests."""
        with self._lock:
            return dict(self._chosen)

    def failures(self) -> dict[str, int]:
        """Classification model -> requests without a label."""
        with self._lock:
            return dict(self._failures)


class RuleRouter:
    """Applies the rules of virtual models. Thread-safe.

    Args:
        loads: reads the loads of the models' workers.
        classifier: None: there is none, and conditions on labels count as failures.
        counts: counts the choices.
    """

    def __init__(
        self,
        loads: Callable[[], Loads] = lambda: NO_LOADS,
        classifier: Classifier | None = None,
        counts: RouteCounts | None = None,
    ) -> None:
        self.loads = loads
        self._classifier = classifier
        self.counts = counts or RouteCounts()

    def choose(self, virtual: VirtualModel, keys: Mapping[str, str], requests: Sequence[RoutedRequest]) -> list[str]:
        """The name of the model that answers each of the requests.

        A label that a classification model doesn't give in time makes the last rule apply, and is counted.

        Args:
            keys: `ModelPin.key` of the rules' models, by name.
        """
        chosen = [virtual.rules[-1].model] * len(requests)
        facts = [_RequestFacts(request) for request in requests]
        labels = _Labels(self)
        open_ = list(range(len(requests)))
        depends = any(rule.when is not None and rule.when.depends_on_load for rule in virtual.rules)
        loads = self.loads() if depends else NO_LOADS
        for rule in virtual.rules:
            if rule.when is None or not open_:
                break
            when, key = rule.when, keys.get(rule.model)
            if not _holds_for_model(when, loads, key):
                continue
            matched = [at for at in open_ if _holds(when, facts[at])]
            unlabelled: set[int] = set()  # they keep the default
            if when.label is not None and matched:
                found = labels.of(when.label, [requests[at] for at in matched])
                unlabelled = {at for at, label in zip(matched, found, strict=True) if label is None}
                matched = [at for at, label in zip(matched, found, strict=True) if when.label.accepts(label)]
            for at in matched:
                chosen[at] = rule.model
            decided = unlabelled.union(matched)
            open_ = [at for at in open_ if at not in decided]
        self.counts.record(virtual.name, chosen)
        return chosen

    def classify(self, model: str, texts: Sequence[str], timeout_seconds: float, tenant: str) -> list[_Label] | None:
        """See `Classifier`. Failures are counted."""
        found = None if self._classifier is None else self._classifier.classify(model, texts, timeout_seconds, tenant)
        if found is None:
            self.counts.record_failures(model, len(texts))
        return found


class _RequestFacts:
    """A request with what several rules may ask for, computed once."""

    def __init__(self, request: RoutedRequest) -> None:
        self.request = request

    @cached_property
    def language(self) -> str | None:
        return language_of(self.request.last_text)

    @cached_property
    def complexity(self) -> int:
        return complexity(self.request)


class _Labels:
    """The labels of the texts of one `choose`: several rules may ask for those of one model."""

    def __init__(self, router: RuleRouter) -> None:
        self._router = router
        self._known: dict[tuple[str, str], _Label | None] = {}

    def of(self, asked: LabelCondition, requests: Sequence[RoutedRequest]) -> list[_Label | None]:
        """The labels of these requests, which are of one tenant; None: the model gave none. A request without text has
        `NO_LABEL`."""
        texts = [request.last_text[:MAX_CLASSIFIED_CHARS] for request in requests]
        new = [text for text in dict.fromkeys(texts) if text and (asked.model, text) not in self._known]
        while new:
            some, new = new[:MAX_TEXTS], new[MAX_TEXTS:]
            found = self._router.classify(asked.model, some, asked.timeout_seconds, requests[0].tenant)
            self._known.update(
                ((asked.model, text), label)
                for text, label in zip(some, found if found is not None else [None] * len(some), strict=True)
            )
            if found is None:  # the others would wait for it, too
                self._router.counts.record_failures(asked.model, len(new))
                self._known.update(((asked.model, text), None) for text in new)
                break
        return [self._known[asked.model, text] if text else NO_LABEL for text in texts]


def _holds_for_model(when: Conditions, loads: Loads, key: str | None) -> bool:
    """Whether the conditions on the rule's model hold. What isn't known doesn't hold."""
    if not when.depends_on_load:
        return True
    load = None if key is None else loads.get(key)
    if load is None:
        return False
    bounds = (
        (load.waiting_requests, when.max_waiting_requests),
        (load.waiting_tokens, when.max_waiting_tokens),
        (load.price_per_million_tokens, when.max_price_per_million_tokens),
    )
    return all(most is None or (value is not None and value <= most) for value, most in bounds)


def _holds(when: Conditions, facts: _RequestFacts) -> bool:
    """Whether the conditions on the request hold, without that on its label. The cheap ones come first."""
    request = facts.request
    return (
        (when.tiers is None or request.tier in when.tiers)
        and (when.tenants is None or request.tenant in when.tenants)
        and (when.hours is None or is_within(when.hours, request.at))
        and (when.prompt_tokens is None or request.prompt_tokens in when.prompt_tokens)
        and (when.tools is None or request.has_tools is when.tools)
        and (when.response_schema is None or request.has_schema is when.response_schema)
        and (when.languages is None or facts.language in when.languages)
        and (when.complexity is None or facts.complexity in when.complexity)
    )
