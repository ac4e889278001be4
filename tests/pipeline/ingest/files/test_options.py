"""Options of a dropped file's job, by each source alone, together, and in conflict."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pipeline.ingest.files.options import InboxEntryKind, announces_sidecar, format_of, kind_of, options_of, sidecars_of
from pipeline.ingest.intake import IntakeRefused
from schemas.jobs.inputs import InputFormat
from schemas.jobs.job import OnInvalid, Tier
from schemas.jobs.job_options import JobOptions
from schemas.requests.truncation import TruncatePrompt

URI = "s3://b/incoming/a.jsonl"


def refusal(name: str, metadata: dict[str, str], *sidecars: bytes) -> IntakeRefused:
    with pytest.raises(IntakeRefused) as caught:
        options_of(name, metadata, [(f"sidecar {at}", data) for at, data in enumerate(sidecars)], location=URI)
    return caught.value


def test_given_metadata_with_and_without_prefix_then_both_are_options_and_other_programs_names_are_left_alone() -> None:
    metadata = {
        "tokenmill-model": "tiny", "deadline": "6h", "tokenmill-max-output-tokens": "50", "seed": "-3",
        "tokenmill-output-expires-after": "30d", "tokenmill-truncate-prompt": "left",
        "On-Invalid": "job", "tokenmill-metadata": '{"team": "search"}', "s3cmd-attrs": "x", "mtime": "1",
    }  # fmt: skip
    assert options_of("bulk/a.jsonl", metadata, [], location=URI) == JobOptions(
        model="tiny",
        tier=Tier.BULK,
        deadline=timedelta(hours=6),
        max_output_tokens=50,
        output_expires_after=timedelta(days=30),
        truncate_prompt=TruncatePrompt.LEFT,
        seed=-3,
        on_invalid=OnInvalid.JOB,
        metadata={"team": "search"},
    )


def test_given_nothing_said_then_the_settings_decide() -> None:
    assert options_of("a.jsonl", {}, [], location=URI) == JobOptions()
    assert options_of("a.jsonl", {}, [("x", b'{"model": null}')], location=URI) == JobOptions()


def test_given_the_same_said_twice_then_it_counts_once() -> None:
    found = options_of(
        "bulk/a.jsonl", {"tier": "bulk", "seed": "1"}, [("x", b'{"tier": "bulk", "seed": 1}')], location=URI
    )
    assert found == JobOptions(tier=Tier.BULK, seed=1)


def test_given_options_that_need_each_other_in_two_sources_then_both_count() -> None:
    found = options_of("a.jsonl", {"tokenmill-refuse-late": "true"}, [("x", b'{"deadline": "6h"}')], location=URI)
    assert found == JobOptions(refuse_late=True, deadline=timedelta(hours=6))


@pytest.mark.parametrize(
    ("name", "metadata", "sidecars", "code", "says"),
    [
        (
            "bulk/a.jsonl",
            {"tier": "standard"},
            [],
            "conflicting_options",
            "'bulk' by its folder, but 'standard' by its",
        ),
        (
            "a.jsonl",
            {"seed": "1"},
            [b'{"seed": 2}'],
            "conflicting_options",
            "seed is 1 by its metadata, but 2 by sidecar",
        ),
        ("a.jsonl", {}, [b'{"seed": 1}', b'{"seed": 2}'], "conflicting_options", "sidecar 0"),
        ("a.jsonl", {"tokenmill-tenant": "other"}, [], "unknown_option", "tokenmill-tenant is no option"),
        ("a.jsonl", {}, [b'{"tenant": "other"}'], "unknown_option", "tenant, given by sidecar 0, is no option"),
        ("a.jsonl", {"tier": "interactive"}, [], "invalid_option", "standard or bulk"),
        ("a.jsonl", {"deadline": "soon"}, [], "invalid_option", "deadline"),
        ("a.jsonl", {}, [b'{"output_expires_after": 3600}'], "invalid_option", "text, such as 30d"),
        ("a.jsonl", {"output-expires-after": "never"}, [], "invalid_option", "no amount of time"),
        ("a.jsonl", {"tokenmill-metadata": "x"}, [], "invalid_option", "not JSON"),
        ("a.jsonl", {"tokenmill-refuse-late": "true"}, [b'{"seed": 1}'], "invalid_option", "needs a deadline"),
        ("a.jsonl", {}, [b"x" * (1 << 20) + b"x"], "invalid_option", "larger"),
    ],
)
def test_given_options_that_cannot_be_used_then_the_reason_says_which_and_where(
    name: str, metadata: dict[str, str], sidecars: list[bytes], code: str, says: str
) -> None:
    refused = refusal(name, metadata, *sidecars)
    assert refused.code == code
    assert says in str(refused)
    assert "\n" not in str(refused)


def test_kinds_of_names() -> None:
    assert (
        kind_of("a.jsonl")
        is kind_of("bulk/a.parquet")
        is kind_of("a.csv")
        is kind_of("_a.jsonl")
        is InboxEntryKind.INPUT
    )
    assert kind_of("a.job.json") is kind_of("bulk/a.jsonl.job.json") is InboxEntryKind.SIDECAR
    for name in (
        "",
        "bulk/",
        ".a.jsonl",
        "a.jsonl.TMP",
        "a.part",
        "a.job.json.tmp",
        "_SUCCESS",
        "_notes.txt.gz",
        ".x/a.jsonl",
        "_x/a.jsonl",
    ):
        assert kind_of(name) is InboxEntryKind.PASSED_OVER, name


def test_formats_and_sidecars_by_name() -> None:
    assert format_of("a.NDJSON") is InputFormat.JSONL
    assert format_of("standard/a.parquet") is InputFormat.PARQUET
    assert format_of("a.jsonl.GZ") is format_of("bulk/a.ndjson.zst") is InputFormat.JSONL
    assert format_of("a.csv") is format_of("a.csv.zst") is InputFormat.CSV
    assert format_of("a.arrow") is format_of("a.feather") is InputFormat.ARROW
    with pytest.raises(IntakeRefused, match=r"only \.jsonl and \.csv are read compressed"):
        format_of("a.parquet.gz")
    assert sidecars_of("bulk/a.b.jsonl") == ("bulk/a.b.job.json", "bulk/a.b.jsonl.job.json")
    assert sidecars_of("a.jsonl.gz") == ("a.job.json", "a.jsonl.gz.job.json")
    with pytest.raises(IntakeRefused, match=r"interactive/a\.jsonl: lies in a folder that is no tier"):
        format_of("interactive/a.jsonl")


def test_a_sidecar_is_announced_by_yes_and_not_by_no() -> None:
    assert announces_sidecar({"tokenmill-sidecar": "true"}, URI)
    assert announces_sidecar({"Sidecar": "1"}, URI)
    assert not announces_sidecar({"sidecar": "no", "x": "true"}, URI)
    with pytest.raises(IntakeRefused, match="give true or false"):
        announces_sidecar({"tokenmill-sidecar": "perhaps"}, URI)
