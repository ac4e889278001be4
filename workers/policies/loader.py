"""Loads content policies by their names: tokenmill's own, and those of installed distributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final, Literal

from workers.errors import WorkerError
from workers.policies import guard_model
from workers.policies import rules as content_rules
from workers.policies.acting import ActingPolicy
from workers.policies.policy import NO_POLICIES, Policies

GROUP: Final = "tokenmill.content_policies"
"""Entry point group. Each entry is a callable that takes the argument after the colon, or None, and returns a
`ContentPolicy`."""

BUILT_IN: Final[Mapping[str, Callable[[str | None], Any]]] = {"rules": content_rules.load, "guard": guard_model.load}


class PolicyError(WorkerError):
    """Raised when a chosen content policy can't be used."""


def load_policies(chosen: Sequence[str]) -> Policies:
    """Load the policies with these names, each NAME or NAME:ARGUMENT, perhaps behind `flag=` or `route@MODEL=`.

    Raises:
        PolicyError: there is no such policy, or it can't be loaded.
        RulesError: a file of rules can't be used.  GuardFileError: a guard model's file, or its server, can't be used.
    """
    return Policies(tuple(_load(one) for one in chosen), tuple(chosen)) if chosen else NO_POLICIES


def _load(given: str) -> tuple[str, Any]:
    action, model, chosen = _split(given)
    name, policy = _load_plain(chosen)
    return name, policy if action is None else ActingPolicy(policy, action, model)


def _split(given: str) -> tuple[Literal["flag", "route"] | None, str, str]:
    """The action of all of a policy's verdicts, the model of a `route`, and the policy. No action: the policy's own."""
    head, equals, chosen = given.partition("=")
    if equals and head == "flag":
        return "flag", "", chosen
    if equals and head.startswith("route@"):
        model = head.removeprefix("route@")
        if not model:
            raise PolicyError(f"content policy {given!r} names no model; write route@MODEL=NAME")
        return "route", model, chosen
    return None, "", given


def _load_plain(chosen: str) -> tuple[str, Any]:
    name, colon, argument = chosen.partition(":")
    try:
        make = BUILT_IN.get(name) or _installed(name)
        policy = make(argument if colon else None)
        window, fingerprint = policy.window, policy.fingerprint
        is_policy = callable(policy.before) and callable(policy.after) and isinstance(fingerprint, str)
        if not (is_policy and (window is None or (type(window) is int and window >= 0))):
            raise TypeError("it is no ContentPolicy: fingerprint must be text, window characters from 0 or None")
    except WorkerError:
        raise
    except Exception as error:
        raise PolicyError(f"content policy {name!r} can't be loaded: {type(error).__name__}: {error}") from error
    return name, policy


def _installed(name: str) -> Callable[[str | None], Any]:
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        known = ", ".join(sorted({*BUILT_IN, *entry_points(group=GROUP).names}))
        raise PolicyError(f"content policy {name!r} is not installed (known: {known}); correct the name, or install it")
    if len(found) > 1:
        makers = ", ".join(sorted(point.dist.name if point.dist else point.value for point in found))
        raise PolicyError(f"content policy {name!r} is installed twice ({makers}); remove one of them")
    factory: Callable[[str | None], Any] = found[0].load()
    return factory
