"""What policies do with a text: refuse it, send the prompt to another model, or flag it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.policy_report import ContentVerdict, PolicyAction
from schemas.workers.metrics import PolicyMetrics
from workers.policies.counts import counted_since
from workers.policies.loader import PolicyError, load_policies
from workers.policies.policy import (
    ALLOWED,
    Answer,
    ContentPolicy,
    JudgedText,
    Policies,
    PolicyGuard,
    PolicyVerdict,
    Prompt,
    PromptRouted,
)
from workers.policies.rules import RulesError
from workers.policies.stream_filter import GrowingAnswer

ABOUT = JudgedText("job-1/7", "default", "small", "/v1/chat/completions")
RULES = """
[[rule]]
name = "odd"
action = "flag"
keywords = ["odd"]

[[rule]]
name = "medical"
action = "route"
model = "big"
keywords = ["dosage"]

[[rule]]
name = "secret"
keywords = ["secret"]
"""


@pytest.fixture
def rules(tmp_path: Path) -> Callable[..., Policies]:
    """Loads a file of rules with this text."""

    def rules(text: str = RULES, before: str = "") -> Policies:
        path = tmp_path / "policy.toml"
        path.write_text(text, encoding="utf-8")
        return load_policies([f"{before}rules:{path}"])

    return rules


def guard(policies: Policies, serves: Callable[[str], bool] | None = None) -> PolicyGuard:
    found = policies.guard(ABOUT, serves)
    assert found is not None
    return found


def verdict(rule: str, action: PolicyAction, model: str | None = None, policy: str = "rules") -> ContentVerdict:
    return ContentVerdict(policy, rule, action, "prompt", model)


def test_given_a_rule_that_flags_then_texts_pass_with_a_verdict_and_streams_are_not_delayed(
    rules: Callable[..., Policies],
) -> None:
    judge = guard(rules("[[rule]]\nname = 'odd'\naction = 'flag'\nkeywords = ['odd']\n"))
    with capture_logs() as logs:
        judge.check_prompt(["an odd prompt"])
        growing = GrowingAnswer(judge)
        for _ in range(3):
            growing.push("an odd answer ")
        assert not judge.refuses("an odd answer")
    assert (growing.cleared, growing.refused) == (len("an odd answer ") * 3, False)
    report = judge.report
    assert [(one.on, one.action) for one in report.verdicts] == [("prompt", "flag"), ("answer", "flag")]
    assert report.fields == {
        "verdicts": [{"policy": "rules", "rule": "odd", "action": "flag", "on": on} for on in ("prompt", "answer")],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0},
    }
    assert [log["event"] for log in logs] == ["content flagged"] * 2


def test_given_several_rules_then_the_severest_counts_wherever_it_stands(rules: Callable[..., Policies]) -> None:
    policies = rules()
    with pytest.raises(RowError, match="rule 'secret'; change the prompt") as refused:
        guard(policies).check_prompt(["odd", "dosage", "secret"])
    assert refused.value.code is RowErrorCode.CONTENT_FILTER
    judge = guard(policies)
    with pytest.raises(PromptRouted, match="rule 'medical' routes the prompt to model 'big', and rows") as routed:
        judge.check_prompt(["an odd dosage"])
    assert (routed.value.policy, routed.value.model) == ("rules", "big")
    assert routed.value.code is RowErrorCode.CONTENT_FILTER
    assert routed.value.report.verdicts == judge.report.verdicts == (verdict("medical", "route", "big"),)
    assert not judge.refuses("the dosage"), "it applies to prompts"


def test_given_a_prompt_at_the_model_that_it_is_routed_to_then_it_passes_with_the_verdict(
    rules: Callable[..., Policies],
) -> None:
    judge = guard(rules(), {"big", "alias"}.__contains__)
    judge.check_prompt(["dosage"])
    assert judge.report.verdicts == (verdict("medical", "route", "big"),)


def test_given_a_later_policy_that_refuses_then_an_earlier_route_does_not_count(rules: Callable[..., Policies]) -> None:
    (routes,) = rules().named

    class Refusing:
        fingerprint = "1"
        window = 0

        def before(self, prompt: Prompt) -> PolicyVerdict:
            return PolicyVerdict("refuse", "no")

        def after(self, answer: Answer) -> PolicyVerdict:
            return ALLOWED

    with pytest.raises(RowError, match="refused by content policy 'mine'") as refused:
        guard(Policies((routes, ("mine", Refusing())))).check_prompt(["dosage"])
    assert not isinstance(refused.value, PromptRouted)


class Verdicts:
    """A policy that gives one verdict to all."""

    fingerprint = "1"
    window = 4

    def __init__(self, verdict: PolicyVerdict) -> None:
        self._verdict = verdict

    def before(self, prompt: Prompt) -> PolicyVerdict:
        return self._verdict

    def after(self, answer: Answer) -> PolicyVerdict:
        return self._verdict


def of(policy: ContentPolicy) -> PolicyGuard:
    return guard(Policies((("mine", policy),)))


def test_given_a_policy_that_routes_an_answer_then_it_is_refused() -> None:
    judge = of(Verdicts(PolicyVerdict("route", "r", "big")))
    assert judge.refuses("x")
    assert judge.report.verdicts == (ContentVerdict("mine", "r", "refuse", "answer"),)


@pytest.mark.parametrize(
    "verdict",
    [PolicyVerdict("route", "r"), PolicyVerdict("drop", "r"), PolicyVerdict("route", "r", "m" * 1_001)],  # type: ignore[arg-type]
)
def test_given_a_verdict_that_can_not_be_followed_then_the_text_is_not_judged(verdict: PolicyVerdict) -> None:
    with pytest.raises(RowError, match="could not judge the prompt"):
        of(Verdicts(verdict)).check_prompt(["x"])


def test_given_flag_before_a_policy_then_what_it_would_refuse_passes(rules: Callable[..., Policies]) -> None:
    plain, flagging = rules(), rules(before="flag=")
    judge = guard(flagging)
    assert judge.window == 0
    assert guard(plain).window > 0
    judge.check_prompt(["a secret dosage"])
    assert not judge.refuses("a secret")
    assert [(one.rule, one.action, one.model) for one in judge.report.verdicts] == [("secret", "flag", None)] * 2
    assert flagging.fingerprint != plain.fingerprint
    assert flagging.chosen[0].startswith("flag=rules:")
    assert load_policies(flagging.chosen).fingerprint == flagging.fingerprint, "as another process loads them"


def test_given_route_before_a_policy_then_prompts_that_it_would_refuse_are_routed(
    rules: Callable[..., Policies],
) -> None:
    judge = guard(rules(before="route@team/large@v2="))
    with pytest.raises(PromptRouted) as routed:
        judge.check_prompt(["secret"])
    assert routed.value.model == "team/large@v2"
    assert judge.refuses("a secret")
    with pytest.raises(PolicyError, match="names no model; write route@MODEL=NAME"):
        load_policies(["route@=rules:x"])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("action = 'route'", "must have action = 'route' together with model"),
        ("model = 'big'", "must have action = 'route' together with model"),
        ("action = 'route'\nmodel = 'big'\napply = 'both'", "is for prompts; set apply = 'prompt'"),
        ("action = 'flag'\nwindow = 3", "has a window, which is for regexes that refuse answers"),
    ],
)
def test_given_a_rule_that_can_not_act_then_the_file_is_refused(
    rules: Callable[..., Policies], text: str, what: str
) -> None:
    with pytest.raises(RulesError, match=what):
        rules(f"[[rule]]\nname = 'r'\nregexes = ['x']\n{text}\n")


def test_given_judged_texts_then_they_are_counted_by_action_and_failures_apart(rules: Callable[..., Policies]) -> None:
    policies = rules()
    assert policies.counts is not None
    before = policies.counts.read()
    guard(policies).check_prompt(["fine"])
    for text in ("odd", "odd"):
        guard(policies).check_prompt([text])
    with pytest.raises(PromptRouted):
        guard(policies).check_prompt(["dosage"])
    middle = policies.counts.read()
    assert guard(policies).refuses("secret")
    assert counted_since(before, middle) == {"rules": PolicyMetrics(texts={"pass": 1, "flag": 2, "route": 1})}
    assert counted_since(middle, policies.counts.read())["rules"].texts["refuse"] == 1
    failing = Policies((("mine", Verdicts(PolicyVerdict("route", "r"))),))
    with pytest.raises(RowError):
        guard(failing).check_prompt(["x"])
    assert failing.counts is not None
    assert failing.counts.read() == {"mine": PolicyMetrics(failures=1)}
