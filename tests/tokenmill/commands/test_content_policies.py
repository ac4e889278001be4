"""--content-policy as a user meets it: in a run's Parquet, over HTTP, from a file of rules and from a distribution."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from pipeline.adapters.folder.store import FolderStore
from pipeline.models.catalog import Catalog
from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]

LEAD, TAIL = "we saw a ", " high up" * 12
FORBIDDEN, FINE = f"{LEAD}Falcon{TAIL}", f"{LEAD}heron{TAIL}"
RULES = "[[rule]]\nname = 'birds'\nkeywords = ['falcon']\n"


def forced(chat: Chat, custom_id: str, answer: str, **more: Any) -> dict[str, Any]:
    """A line whose answer is this text."""
    return chat(custom_id, structured_outputs={"choice": [answer]}, max_tokens=300, **more)


@pytest.fixture
def rules(folder: Path) -> str:
    """A file of rules, as an option names it."""
    (folder / "birds.toml").write_text(RULES, encoding="utf-8")
    return f"rules:{folder}/birds.toml"


@pytest.fixture
def run(model_folder: Path, chat: Chat, write_lines: Write) -> tuple[object, ...]:
    """The command of a job with a good row, a refused prompt, a refused answer and a copy of it."""
    refused = forced(chat, "answer", FORBIDDEN)
    path = write_lines(
        chat("good", "hello"),
        chat("prompt", "tell me of falcons"),
        refused,
        {**refused, "custom_id": "copy"},
        forced(chat, "fine", FINE),
    )
    return ("run", path, "--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "1")


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["custom_id"]: row for row in rows}


def test_given_rules_when_run_then_the_table_has_the_refused_rows_and_all_others(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], rules: str, results: Results
) -> None:
    assert tokenmill(*run, "-o", folder / "plain").code == 0
    ended = tokenmill(*run, "-o", folder / "out", "--content-policy", rules)

    assert ended.code == 0, ended.err
    assert "4 of 5 rows succeeded, 1 failed" in " ".join(ended.err.split())
    assert "alcon" not in ended.err
    plain, rows = by_name(results(folder / "plain")), by_name(results(folder / "out"))
    prompt = rows["prompt"]
    assert (prompt["status"], prompt["status_code"], prompt["error_code"]) == ("failed", 400, "content_filter")
    assert prompt["error_message"].startswith("line 2 of the input: the prompt is refused by content policy 'rules', ")
    assert prompt["text"] is prompt["response"] is None
    for name in ("answer", "copy"):
        row = rows[name]
        assert (row["status"], row["status_code"], row["finish_reason"]) == ("succeeded", 200, "content_filter")
        assert (row["text"], row["error_code"]) == ("", None)
        assert "alcon" not in row["response"]
        assert plain[name]["text"] == FORBIDDEN
    for name in ("good", "fine"):
        assert (rows[name]["status"], rows[name]["text"]) == ("succeeded", plain[name]["text"])
    manifest = json.loads((folder / "out/manifest.json").read_text())
    assert manifest["engine"]["content_policies"].startswith("rules (")


@pytest.mark.exhaustive
def test_given_a_policy_to_try_when_run_by_replicas_then_all_rows_pass_and_the_table_has_the_verdicts(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], rules: str, results: Results
) -> None:
    ended = tokenmill(*run, "-o", folder / "out", "--replicas", 2, "--content-policy", f"flag={rules}")
    assert ended.code == 0, ended.err
    rows = by_name(results(folder / "out"))
    assert {row["status"] for row in rows.values()} == {"succeeded"}
    found = {name: json.loads(row["content_policies"] or "{}").get("verdicts", []) for name, row in rows.items()}
    assert {name: [verdict["on"] for verdict in verdicts] for name, verdicts in found.items()} == {
        "good": [], "prompt": ["prompt"], "answer": ["answer"], "copy": ["answer"], "fine": [],
    }  # fmt: skip
    assert found["prompt"] == [{"policy": "rules", "rule": "birds", "action": "flag", "on": "prompt"}]


@pytest.mark.exhaustive
def test_given_a_job_when_its_command_comes_with_other_policies_then_it_is_another_order(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CONTENT_POLICIES", json.dumps([rules]))
    assert tokenmill(*run, "-o", folder / "out").code == 0
    assert "was done before" in tokenmill(*run, "-o", folder / "out", "--content-policy", rules).err
    (folder / "birds.toml").write_text(RULES.replace("falcon", "heron"), encoding="utf-8")
    other = tokenmill(*run, "-o", folder / "out")
    assert other.code == 1
    assert "settings.content_policies was " in other.error
    assert tokenmill(*run, "-o", folder / "out", "--fresh").code == 0


def test_given_a_changed_policy_when_refused_rows_are_tried_again_then_it_judges_them(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], rules: str, results: Results
) -> None:
    assert tokenmill(*run, "-o", folder / "out", "--content-policy", rules).code == 0
    retry = ("jobs", "retry", folder / "out", "--threads", 1)
    assert "no row" in tokenmill(*retry, "-o", folder / "none").error
    ended = tokenmill(*retry, "-o", folder / "again", "--include-invalid", "--content-policy", rules)
    assert ended.code == 0, ended.err
    assert [row["error_code"] for row in results(folder / "again")] == ["content_filter"]
    ended = tokenmill(*retry, "-o", folder / "free", "--include-invalid")
    assert [(row["custom_id"], row["status"]) for row in results(folder / "free")] == [("prompt", "succeeded")]


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("rules:birds.toml", "birds.toml: rule 'birds': regexes[1]: missing ): (; correct it (RE2's syntax: neither"),
        ("rules", "content policy rules needs a file; name it, as in rules:policy.toml"),
        ("sparrows", "content policy 'sparrows' is not installed (known: guard, rules); correct the name, or"),
    ],
)
def test_given_a_policy_that_can_t_be_used_when_run_then_nothing_is_begun(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], policy: str, said: str
) -> None:
    (folder / "birds.toml").write_text("[[rule]]\nname = 'birds'\nregexes = ['a', '(']\n", encoding="utf-8")
    ended = tokenmill(*run, "-o", folder / "out", "--content-policy", policy)
    assert ended.code == 1
    assert said in ended.error
    assert not (folder / "out").exists()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with a policy that is installed in a folder of its own."""
    folder = tmp_path / "site"
    about = folder / "quietly-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: quietly\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tokenmill.content_policies]\nquiet = quietly:Quiet\n")
    (folder / "quietly.py").write_text(
        "from workers.policies.policy import ALLOWED, Answer, PolicyVerdict, Prompt\n\n\n"
        "class Quiet:\n"
        "    window = 1\n\n"
        "    def __init__(self, argument: str | None) -> None:\n"
        "        self.mark = argument or '!'\n"
        "        self.fingerprint = f'1 {self.mark}'\n\n"
        "    def before(self, prompt: Prompt) -> PolicyVerdict:\n"
        "        shouts = any(self.mark in text for text in prompt.texts)\n"
        "        return PolicyVerdict('refuse', 'shouts') if shouts else ALLOWED\n\n"
        "    def after(self, answer: Answer) -> PolicyVerdict:\n"
        "        if 'Falcon' in answer.text:\n"
        "            raise RuntimeError(answer.text)\n"
        "        return ALLOWED\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_given_a_policy_of_an_installed_distribution_when_run_then_it_judges(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results, installed: Path
) -> None:
    path = write_lines(chat("a", "hello"), chat("b", "hello#"), chat("c", "hello!"), forced(chat, "d", FORBIDDEN))
    run = ("run", path, "--model", f"tiny={model_folder}", "--threads", "1")

    ended = tokenmill(*run, "-o", folder / "out", "--content-policy", "quiet:#")

    assert ended.code == 0, ended.err
    rows = by_name(results(folder / "out"))
    assert [rows[name]["status"] for name in "abc"] == ["succeeded", "failed", "succeeded"]
    assert "policy 'quiet', rule 'shouts'" in rows["b"]["error_message"]
    assert (rows["d"]["status_code"], rows["d"]["error_code"]) == (500, "engine_error")
    assert "content policy 'quiet' could not judge the answer (RuntimeError)" in rows["d"]["error_message"]
    assert "quietly.py:" in ended.err, "the log says where it failed"
    assert "alcon" not in ended.err
    assert "known: guard, quiet, rules" in tokenmill(*run, "-o", folder / "no", "--content-policy", "none").error


@pytest.mark.exhaustive
def test_serve_ends_streams_and_withholds_answers_for_the_official_client(
    processes: Processes, model_folder: Path, chat: Chat, rules: str
) -> None:
    served = processes.start(
        "-m", "tokenmill", "serve", "--data", "data", "--port", 0, "--model", f"tiny={model_folder}", "--dtype",
        "float32", "--threads", 1, TOKENMILL_CONTENT_POLICIES=json.dumps([rules]),
    )  # fmt: skip
    client = OpenAI(base_url=f"{processes.url(served)}/v1", timeout=HANG_SECONDS, api_key="none", max_retries=0)

    def body(answer: str, **more: Any) -> Any:
        made = forced(chat, "x", answer)["body"]
        return made | {"extra_body": {"structured_outputs": made.pop("structured_outputs"), **more}}

    for text, reason in ((FORBIDDEN, "content_filter"), (FINE, "stop")):
        chunks = list(client.chat.completions.create(**body(text), stream=True, logprobs=True))
        text_of_stream = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == reason
        assert text_of_stream == FINE if text == FINE else LEAD.startswith(text_of_stream)
        for _ in range(2):  # the second time it may come from the cache
            whole = client.chat.completions.create(**body(text, tokenmill={"cache": True}))
            assert whole.choices[0].finish_reason == reason
            assert whole.choices[0].message.content == (FINE if text == FINE else None)
            assert whole.usage is not None
            assert whole.usage.completion_tokens > 0
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**chat("x", "of falcons")["body"], stream=stream)
        assert (refused.value.code, refused.value.type) == ("content_filter", "invalid_request_error")
    assert client.chat.completions.create(**chat("x", "of herons")["body"]).choices
    store = FolderStore(processes.folder / "data", read_only=True)
    assert [entry.policies is not None for entry in Catalog(store).entries()] == [True]
    process = processes.running[served]
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 0
    said = processes.log(served).read_text()
    assert "content refused" in said
    assert "alcon" not in said.replace(str(processes.folder), "")
