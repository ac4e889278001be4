"""Another action for all verdicts of a policy, as the operator chose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from workers.policies.policy import Answer, ContentPolicy, PolicyVerdict, Prompt


class ActingPolicy:
    """A policy (a `ContentPolicy`) whose verdicts have another action.

    Args:
        action: `flag`: all that the policy would refuse or route passes and is flagged. `route`: the prompts that it
            would refuse or flag are sent to `model`; answers are as the policy says.
    """

    def __init__(self, policy: ContentPolicy, action: Literal["flag", "route"], model: str = "") -> None:
        self._policy = policy
        self._action = action
        self._model = model
        self.fingerprint = f"{action}\0{model}\0{policy.fingerprint}"
        self.window = 0 if action == "flag" else policy.window
        self.concurrency: int = getattr(policy, "concurrency", 1)
        self.retry_seconds: float = getattr(policy, "retry_seconds", 0.0)
        self.is_available: Callable[[], bool] = getattr(policy, "is_available", lambda: True)

    def before(self, prompt: Prompt) -> PolicyVerdict:
        """See `ContentPolicy`."""
        return self._changed(self._policy.before(prompt))

    def after(self, answer: Answer) -> PolicyVerdict:
        """See `ContentPolicy`."""
        verdict = self._policy.after(answer)
        return self._changed(verdict) if self._action == "flag" else verdict

    def _changed(self, verdict: PolicyVerdict) -> PolicyVerdict:
        if not isinstance(verdict, PolicyVerdict) or verdict.action is None or verdict.failed:
            return verdict
        return replace(verdict, action=self._action, model=self._model)
