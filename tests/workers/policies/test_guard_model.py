"""The policy of a guard model: its file, its questions and answers, and a server that fails in every way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schemas.requests.errors import RowError, RowErrorCode
from tests.waiting import wait_for
from tests.workers.policies.scripted_guard import DIGEST, ScriptedGuard, serving_guard
from workers.policies.guard_admission import FAILURES_UNTIL_DOWN, RETRY_SECONDS, CircuitBreaker
from workers.policies.guard_file import GuardFileError, read_guard_file
from workers.policies.guard_model import GuardModel, _label_of
from workers.policies.loader import load_policies
from workers.policies.policy import ALLOWED, Answer, JudgedText, PolicyVerdict, Prompt

ABOUT = JudgedText("job-1/7", "default", "small", "/v1/chat/completions")
LABELS = """
[[label]]
name = "safe"

[[label]]
name = "unsafe"
action = "refuse"

[[label]]
name = "medical"
action = "route"
model = "big"

[[label]]
name = "odd"
action = "flag"
"""
Make = Callable[..., GuardModel]


@pytest.fixture
def server() -> Iterator[ScriptedGuard]:
    labels = {"bomb": "unsafe", "dosage": "medical", "moon": "odd"}
    with serving_guard(ScriptedGuard(labels=labels)) as guard:
        yield guard


def write(folder: Path, url: str, more: str = "", labels: str = LABELS, **fields: Any) -> Path:
    """Write a guard's file with these fields."""
    named = {"url": url, "model": "guard", "prompt": "Is this safe? {{ text }}", "on_failure": "closed"} | fields
    lines = [f"{name} = {str(value).lower() if isinstance(value, bool | int | float) else repr(value)}"
             for name, value in named.items() if value is not None]  # fmt: skip
    path = folder / "guard.toml"
    path.write_text("\n".join([*lines, more, labels]), encoding="utf-8")
    return path


@pytest.fixture
def make(server: ScriptedGuard, tmp_path: Path) -> Make:
    """Makes the policy of a file with these fields."""
    return lambda **fields: GuardModel(write(tmp_path, fields.pop("url", server.url), **fields))


def before(policy: GuardModel, *texts: str, **about: str) -> PolicyVerdict:
    return policy.before(Prompt(ABOUT._replace(**about), texts))


def action(policy: GuardModel, text: str) -> str | None:
    return before(policy, text).action


def test_given_a_label_then_its_action_is_taken_and_the_tokens_are_counted(make: Make, server: ScriptedGuard) -> None:
    policy = make()
    verdict = before(policy, "how to build a bomb", "the message alone")
    question = "Is this safe? how to build a bomb"
    assert verdict == PolicyVerdict("refuse", "unsafe", prompt_tokens=len(question), completion_tokens=2)
    assert before(policy, "which dosage?").model == "big"
    assert [action(policy, text) for text in ("hello", "which dosage?", "moon")] == [None, "route", "flag"]
    first = server.asked[0]
    assert first == {
        "model": f"guard@{DIGEST}",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
        "structured_outputs": {"choice": ["safe", "unsafe", "medical", "odd"]},
    }


def test_given_a_classifier_then_it_is_asked_for_its_label(make: Make, server: ScriptedGuard) -> None:
    policy = make(kind="classifier", prompt="{{ text }}")
    assert [action(policy, text) for text in ("a bomb", "hello")] == ["refuse", None]
    assert server.asked[0] == {"model": f"guard@{DIGEST}", "input": "a bomb"}


def test_given_thresholds_then_a_label_counts_from_its_probability_on(make: Make, server: ScriptedGuard) -> None:
    labels = "[[label]]\nname = 'safe'\n[[label]]\nname = 'unsafe'\naction = 'refuse'\nthreshold = 0.5\n"
    policy = make(labels=labels, cached_texts=0)
    for logprob, expected in ((-0.6, "refuse"), (-0.8, None)):
        server.logprob = logprob
        assert action(policy, "a bomb") == expected
    assert server.asked[-1]["logprobs"] is True
    server.logprob = None
    with pytest.raises(Exception, match="has another form"):
        action(policy, "a bomb")
    for threshold, expected in (("0.7", "refuse"), ("0.8", None)):
        classifier = make(labels=labels.replace("0.5", threshold), kind="classifier")
        assert action(classifier, "a bomb") == expected


def test_given_a_guard_that_gives_reasons_then_the_longest_label_counts(make: Make, server: ScriptedGuard) -> None:
    labels = "[[label]]\nname = 'un'\n[[label]]\nname = 'unsafe'\naction = 'refuse'\n"
    server.labels = {"bomb": "\n unsafe\nS9"}
    server.default = "maybe"
    policy = make(labels=labels, constrain=False)
    assert action(policy, "bomb") == "refuse"
    assert "structured_outputs" not in server.asked[0]
    with pytest.raises(Exception, match="none of its labels"):
        action(policy, "hello")


def test_given_the_same_text_again_then_the_guard_is_not_asked_again_and_it_costs_nothing(
    make: Make, server: ScriptedGuard
) -> None:
    policy = make(cached_texts=2)
    verdicts = [before(policy, text) for text in ("a bomb", "hello", "a bomb", "b", "hello")]
    assert len(server.asked) == 4, "hello was forgotten for b"
    assert (verdicts[2].action, verdicts[2].prompt_tokens) == ("refuse", 0)
    assert verdicts[0].prompt_tokens > 0


def test_given_anothers_text_then_the_guard_is_asked_again(make: Make, server: ScriptedGuard) -> None:
    policy = make()
    for tenant in ("a", "b", "a"):
        policy.before(Prompt(ABOUT._replace(tenant=tenant), ("a bomb",)))
    assert len(server.asked) == 2, "the time of an answer tells nobody what another has sent"


def test_given_texts_to_embed_then_each_is_judged_and_the_severest_counts(make: Make, server: ScriptedGuard) -> None:
    policy = make()
    verdict = before(policy, "moon", "hello", "dosage", "hello", url="/v1/embeddings")
    assert (verdict.action, len(server.asked)) == ("route", 3)
    assert verdict.prompt_tokens == sum(len(body["messages"][0]["content"]) for body in server.asked)


def test_given_the_guards_own_requests_then_they_are_not_judged(make: Make, server: ScriptedGuard) -> None:
    policy = make()
    for name in ("guard", f"guard@{DIGEST}"):
        assert before(policy, "a bomb", model=name) == ALLOWED
    assert server.asked == []


def test_given_a_side_then_only_its_texts_are_judged(make: Make, server: ScriptedGuard) -> None:
    labels = "[[label]]\nname = 'safe'\n[[label]]\nname = 'unsafe'\naction = '{}'\n"
    prompts = make()
    assert (prompts.after(Answer(ABOUT, "a bomb")), prompts.window, prompts.concurrency) == (ALLOWED, 0, 8)
    answers = make(apply="answer", labels=labels.format("refuse"), concurrency=3)
    assert (before(answers, "a bomb"), answers.window, answers.concurrency) == (ALLOWED, None, 3)
    assert answers.after(Answer(ABOUT, "a bomb")).action == "refuse"
    assert answers.after(Answer(ABOUT, "")) == ALLOWED
    assert make(apply="answer", labels=labels.format("flag"), on_failure="open").window == 0
    assert make(apply="answer", labels=labels.format("flag")).window is None, "it might fail"
    assert len(server.asked) == 1


def limit_time(policy: GuardModel, seconds: float) -> None:
    """Limit the time of each text, but not that of the policy's start, which a busy machine may need."""
    policy._file = policy._file.model_copy(update={"timeout_seconds": seconds})


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("Nothing here is fine", None), ("None", None), ("No", "No"), ("No: it is fine", "No"), ("Yes.", "Yes"),
        ("Yes-man", "Yes"), (" No\n", "No"), ("", None), ("Nope", "Nope"),
    ],
)  # fmt: skip
def test_an_answer_begins_with_a_label_as_a_word(answer: str, label: str | None) -> None:
    assert _label_of(answer, ["Yes", "No", "Nope"]) == label


def test_an_answer_without_text_is_no_label(make: Make, server: ScriptedGuard) -> None:
    labels = '[[label]]\nname = "No"\n[[label]]\nname = "Yes"\naction = "refuse"\n'
    policy = make(labels=labels)
    server.raw = b'{"choices": [{"message": {"content": null}}]}'
    assert fail(policy) == "GuardAnswerInvalid"


def fail(policy: GuardModel, text: str = "hello", **about: str) -> str:
    """The failure of a policy that fails closed."""
    with pytest.raises(Exception, match="guard") as failed:
        before(policy, text, **about)
    return type(failed.value).__name__


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ({"hang": True}, "GuardTimeout"),
        ({"drips": "body"}, "GuardTimeout"),
        ({"drips": "headers"}, "GuardTimeout"),
        ({"status": 503}, "GuardUnavailable"),
        ({"status": 429}, "GuardUnavailable"),
        ({"status": 400}, "GuardRejected"),
        ({"raw": b"{"}, "GuardAnswerInvalid"),
        ({"raw": b"[]"}, "GuardAnswerInvalid"),
        ({"raw": b"{}"}, "GuardAnswerInvalid"),
        ({"raw": b'{"choices": [{"message": {"content": null}}], "usage": 3}'}, "GuardAnswerInvalid"),
        ({"raw": b" " * (5 << 20)}, "GuardAnswerInvalid"),
    ],
)
@pytest.mark.slow
def test_given_a_server_that_fails_then_the_text_passes_with_a_flag_or_fails_as_the_file_says(
    make: Make, server: ScriptedGuard, script: dict[str, Any], kind: str
) -> None:
    policies = {how: make(on_failure=how) for how in ("open", "closed")}
    if kind == "GuardTimeout":
        for policy in policies.values():
            limit_time(policy, 0.2)
    for name, value in script.items():
        setattr(server, name, value)
    assert before(policies["open"], "hello") == PolicyVerdict("flag", f"not judged ({kind})", failed=True)
    assert fail(policies["closed"]) == kind
    server.released.set()


def test_given_a_stopped_server_then_all_texts_fail_at_once_and_pass_again_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.policies.guard_admission.RETRY_SECONDS", 0.0)
    with serving_guard() as server:
        policy = GuardModel(write(tmp_path, server.url, cached_texts=0))
        assert action(policy, "hello") is None
        port = int(server.url.rpartition(":")[2])
    assert {fail(policy) for _ in range(5)} == {"GuardUnavailable"}
    with serving_guard(port=port):
        assert action(policy, "hello") is None


def test_given_a_server_that_hangs_then_it_is_left_alone_after_a_few_texts(make: Make, server: ScriptedGuard) -> None:
    policy = make(concurrency=2)
    limit_time(policy, 0.1)
    server.hang = True
    kinds = [fail(policy) for _ in range(FAILURES_UNTIL_DOWN + 20)]
    assert kinds[:FAILURES_UNTIL_DOWN] == ["GuardTimeout"] * FAILURES_UNTIL_DOWN
    assert "GuardUnavailable" in kinds
    assert len(server.asked) < len(kinds)


def test_given_a_tenants_texts_that_take_too_long_then_only_its_own_texts_fail_at_once(
    make: Make, server: ScriptedGuard
) -> None:
    policy = make(concurrency=2)
    limit_time(policy, 0.1)
    server.slow = "long"
    kinds = [fail(policy, f"long {number}", tenant="a") for number in range(FAILURES_UNTIL_DOWN + 20)]
    assert "GuardUnavailable" in kinds
    limit_time(policy, 60)
    assert action(policy, "a bomb") == "refuse", "another tenant's text is judged"


@pytest.mark.slow
def test_given_a_guard_that_answers_again_then_texts_that_failed_meanwhile_are_asked_about_at_once(
    make: Make, server: ScriptedGuard
) -> None:
    policy = make()
    assert policy.is_available()
    limit_time(policy, 0.1)
    server.hang = True
    kinds = [fail(policy, f"text {number}") for number in range(FAILURES_UNTIL_DOWN)]
    assert (kinds, policy.is_available()) == (["GuardTimeout"] * FAILURES_UNTIL_DOWN, False)
    assert fail(policy) == "GuardUnavailable"
    server.hang = False
    limit_time(policy, 60)
    assert policy.is_available()
    assert action(policy, "a bomb") == "refuse"


def test_given_a_guard_that_can_not_judge_a_text_then_it_is_available(make: Make, server: ScriptedGuard) -> None:
    policy = make()
    found = {}
    for server.status in (200, 400, 404, 429, 503):
        found[server.status] = policy.is_available()
        policy._server._breaker.record(True, 0.0)  # else it would be left alone
    assert found == {200: True, 400: True, 404: False, 429: False, 503: False}


@pytest.mark.parametrize("status", [408, 500, 504])
def test_given_errors_that_a_text_may_cause_then_another_tenants_texts_are_judged(
    make: Make, server: ScriptedGuard, status: int
) -> None:
    policy = make()
    server.status = status
    for number in range(FAILURES_UNTIL_DOWN + 1):
        fail(policy, f"text {number}", tenant="a")
    server.status = 200
    assert action(policy, "a bomb") == "refuse"


def test_given_a_server_that_reports_that_it_can_not_answer_then_it_is_left_alone_for_all_tenants(
    make: Make, server: ScriptedGuard
) -> None:
    policy = make()
    server.status = 503
    for number in range(FAILURES_UNTIL_DOWN):
        fail(policy, f"text {number}", tenant="a")
    assert fail(policy, tenant="b") == "GuardUnavailable"
    assert len(server.asked) == FAILURES_UNTIL_DOWN


def test_given_a_tenant_that_holds_the_connections_then_one_is_left_to_another(
    make: Make, server: ScriptedGuard
) -> None:
    policy = make(concurrency=3, timeout_seconds=60)
    assert {action(policy, "hello"), before(policy, "hello", tenant="b").action} == {None}
    server.slow = "long"
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(before, policy, f"long {number}", tenant="b") for number in range(4)]
        wait_for(lambda: len(server.asked) >= 4, "the guard is not asked")
        assert action(policy, "a bomb") == "refuse"
        assert len(server.asked) == 5, "two of four slow texts, and three others"
        server.released.set()
        assert [one.result().action for one in slow] == [None] * 4


def test_given_failures_then_the_breaker_admits_one_call_in_a_while_until_one_is_answered() -> None:
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(FAILURES_UNTIL_DOWN):
        assert breaker.admits()
        breaker.record(False, now[0])
    assert not breaker.admits()
    now[0] += RETRY_SECONDS
    assert [breaker.admits() for _ in range(3)] == [True, False, False]
    breaker.record(True, now[0])
    for _ in range(FAILURES_UNTIL_DOWN):
        breaker.record(False, now[0] - 1)  # it was sent before the answer came
    assert [breaker.admits() for _ in range(3)] == [True] * 3


def test_given_many_texts_then_no_more_are_asked_about_at_a_time_than_allowed(
    make: Make, server: ScriptedGuard
) -> None:
    server.together = 3
    policy = make(concurrency=3, timeout_seconds=60)
    with ThreadPoolExecutor(9) as pool:
        verdicts = list(pool.map(lambda number: action(policy, f"text {number}"), range(30)))
    assert (verdicts, server.most, len(server.asked)) == ([None] * 30, 3, 30)


def test_given_another_file_or_other_weights_then_the_fingerprint_is_another(make: Make, server: ScriptedGuard) -> None:
    prints = [make().fingerprint, make().fingerprint, make(max_tokens=3).fingerprint]
    server.models[0]["tokenmill"]["digest"] = f"sha256:{'cd' * 32}"
    prints.append(make().fingerprint)
    server.models[0] = {"id": "guard", "created": 5, "root": "x"}  # another OpenAI-compatible server
    prints.append(make().fingerprint)
    server.models[0]["created"] = 6
    prints.append(make().fingerprint)
    assert prints[0] == prints[1]
    assert prints[4] == prints[5]
    assert len(set(prints)) == 4
    action(make(), "hello")
    assert server.asked[-1]["model"] == "guard"


def test_given_a_version_then_the_server_is_not_needed_at_the_start(tmp_path: Path) -> None:
    policy = GuardModel(write(tmp_path, "http://127.0.0.1:9", model=f"guard@{DIGEST}", on_failure="open"))
    assert before(policy, "hello").failed


def test_given_a_key_then_it_is_sent(tmp_path: Path, server: ScriptedGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, server.url, api_key_env="GUARD_KEY")
    with pytest.raises(GuardFileError, match="GUARD_KEY holds no key; set it in the environment"):
        GuardModel(path)
    monkeypatch.setenv("GUARD_KEY", "sk-1")
    assert action(GuardModel(path), "hello") is None


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"url": "ftp://host"}, "the file url: must be http"),
        ({"url": "http://u:p@host"}, "carries credentials; name the key's environment variable"),
        ({"prompt": "{{ text"}, "the file prompt: is no template: TemplateSyntaxError"),
        ({"prompt": "{{ other }}"}, "UndefinedError"),
        ({"prompt": "{{ text.__class__.__mro__ }}"}, "the file prompt: is no template: SecurityError"),
        ({"prompt": "Is it safe?"}, "doesn't show the text"),
        ({"on_failure": "maybe"}, "the file on_failure: Input should be 'open' or 'closed'"),
        ({"on_failure": None}, "the file on_failure: is missing; add it"),
        ({"on_failure": "open", "retry_seconds": 5}, "retry_seconds is for on_failure = 'closed'"),
        ({"apply": "both"}, "is for prompts; set apply = 'prompt'"),
        ({"kind": "classifier", "max_tokens": 3}, "max_tokens is for chats; remove it"),
        ({"temperature": 3}, "the file temperature: is not known; there are url, model,"),
        ({"labels": ""}, "the file label: is missing"),
        ({"labels": "[[label]]\nname = 'a'\n"}, "no label has an action"),
        ({"labels": "[[label]]\nname = 'a'\naction = 'route'\n"}, "label 1: must have action = 'route' together"),
        ({"labels": "[[label]]\nname = 'a'\nthreshold = 0.5\n"}, "label 1: has a threshold, which is for labels with"),
        ({"labels": "[[label]]\nname = 'a'\n[[label]]\nname = 'a'\naction = 'flag'"}, "two labels are called 'a'"),
        ({"labels": "[[label]]\nname = 'a'\nkind = 'x'"}, "label 1 kind: is not known; there are name, action,"),
        ({"more": "[["}, "is no TOML"),
        ({"model": "other"}, "model 'other' is not served at http://127.0.0.1:"),
    ],
)
def test_given_a_file_that_can_not_be_used_then_nothing_starts(make: Make, fields: dict[str, Any], what: str) -> None:
    with pytest.raises(GuardFileError) as wrong:
        make(**fields)
    assert "guard.toml: " in str(wrong.value)
    assert what in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_given_no_server_or_no_file_at_the_start_then_the_message_has_the_fix(tmp_path: Path) -> None:
    path = write(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(GuardFileError, match=r"can't be asked for its models: the guard can't be .*start it, or"):
        load_policies([f"guard:{path}"])
    with pytest.raises(GuardFileError, match=r"needs a file; name it, as in guard:guard.toml"):
        load_policies(["guard"])
    with pytest.raises(GuardFileError, match=r"none.toml: can't be read"):
        load_policies([f"guard:{tmp_path}/none.toml"])


def test_given_a_guard_that_fails_closed_then_the_row_fails_and_counts(tmp_path: Path, server: ScriptedGuard) -> None:
    policies = load_policies([f"guard:{write(tmp_path, server.url)}"])
    judge = policies.guard(ABOUT)
    assert judge is not None
    judge.check_prompt(["the moon"])
    assert (judge.report.verdicts[0].policy, judge.report.completion_tokens) == ("guard", 2)
    server.status = 500
    with pytest.raises(
        RowError, match=r"content policy 'guard' could not judge the prompt \(GuardUnavailable\)"
    ) as failed:
        judge.check_prompt(["hello"])
    assert failed.value.code is RowErrorCode.ENGINE_ERROR
    assert policies.counts is not None
    counts = policies.counts.read()["guard"]
    assert (counts.texts, counts.failures) == ({"flag": 1}, 1)
    assert (counts.prompt_tokens, counts.completion_tokens) == (len("Is this safe? the moon"), 2)


def test_given_the_example_in_the_docs_then_it_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/content-policy.md").read_text(encoding="utf-8")
    example = next(block for block in page.split("```toml\n") if block.startswith("url = "))
    path = tmp_path / "guard.toml"
    path.write_text(example.split("```")[0].replace("\n# ", "\n"), encoding="utf-8")  # with the optional fields
    file, _ = read_guard_file(path)
    assert (file.api_key_env, file.constrain, file.cached_texts) == ("GUARD_KEY", False, 10_000)
    assert [(label.action, label.threshold) for label in file.label] == [("pass", 0.0), ("refuse", 0.8)]
