"""Settings for Kafka become kafka-python's arguments, and nothing of them that is secret becomes text."""

from __future__ import annotations

from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from pipeline.adapters.kafka.connection import KafkaConnection, KafkaSettingsError
from pipeline.adapters.kafka.producer import ProducerSettings
from pipeline.ingest.kafka.settings import KafkaIngestSettings

BROKERS = ("b1:9092", "b2:9092")
SECURE: dict[str, KafkaConnection] = {
    "plaintext": KafkaConnection(BROKERS),
    "tls": KafkaConnection(
        BROKERS, security_protocol="SSL", ca_file="/ca", cert_file="/c", key_file="/k", key_password="geheim"
    ),
    "plain": KafkaConnection(
        BROKERS, security_protocol="SASL_SSL", sasl_mechanism="PLAIN", username="u", password="geheim"
    ),
    "scram": KafkaConnection(
        BROKERS, security_protocol="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-512", username="u", password="geheim"
    ),
    "oauth": KafkaConnection(
        BROKERS, security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", token_provider=object()
    ),
    "kerberos": KafkaConnection(
        BROKERS, security_protocol="SASL_SSL", sasl_mechanism="GSSAPI", kerberos_domain="example.org"
    ),
}


def test_given_tls_when_it_is_set_then_the_client_gets_files_and_checks_names() -> None:
    options = SECURE["tls"].options()

    assert options["security_protocol"] == "SSL"
    assert (options["ssl_cafile"], options["ssl_certfile"], options["ssl_keyfile"]) == ("/ca", "/c", "/k")
    assert options["ssl_password"] == "geheim"
    assert options["ssl_check_hostname"] is True
    assert "sasl_mechanism" not in options


def test_given_scram_over_tls_when_it_is_set_then_the_client_gets_credentials_and_default_authorities() -> None:
    options = SECURE["plain"].options()

    assert (options["security_protocol"], options["sasl_mechanism"]) == ("SASL_SSL", "PLAIN")
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("u", "geheim")
    assert options["ssl_cafile"] is None


@pytest.mark.parametrize("name", SECURE)
def test_given_any_settings_when_they_become_arguments_then_the_client_knows_each_of_them(name: str) -> None:
    connection = SECURE[name]

    for known, options in (
        (KafkaConsumer.DEFAULT_CONFIG, KafkaIngestSettings(connection).consumer_options()),
        (KafkaProducer.DEFAULT_CONFIG, ProducerSettings(connection).options()),
        (KafkaAdminClient.DEFAULT_CONFIG, connection.admin_options()),
    ):
        assert options.keys() <= known.keys()


@pytest.mark.parametrize("name", SECURE)
def test_given_secrets_when_settings_are_shown_then_they_are_not(name: str) -> None:
    for shown in (SECURE[name], KafkaIngestSettings(SECURE[name]), ProducerSettings(SECURE[name])):
        assert "geheim" not in repr(shown)


@pytest.mark.parametrize(
    "given",
    [
        {"bootstrap_servers": ()},
        {"security_protocol": "SASL_SSL"},
        {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "username": "u"},
        {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"},
        {"username": "u", "password": "geheim"},
        {"security_protocol": "SSL", "sasl_mechanism": "PLAIN", "username": "u", "password": "geheim"},
        {"ca_file": "/ca"},
        {"security_protocol": "SSL", "key_file": "/k"},
    ],
)
def test_given_settings_that_contradict_each_other_when_they_are_made_then_they_are_refused(
    given: dict[str, Any],
) -> None:
    with pytest.raises(KafkaSettingsError) as refused:
        KafkaConnection(**({"bootstrap_servers": BROKERS} | given))

    assert "geheim" not in str(refused.value)


def test_given_kafka_ingest_when_its_consumer_is_set_up_then_it_alone_commits_and_reads_what_was_committed() -> None:
    options = KafkaIngestSettings(SECURE["plaintext"], start="stop", session_timeout_seconds=3.0).consumer_options()

    assert options["enable_auto_commit"] is False
    assert options["isolation_level"] == "read_committed"
    assert options["auto_offset_reset"] == "none"
    assert (options["session_timeout_ms"], options["heartbeat_interval_ms"]) == (3_000, 1_000)


@pytest.mark.parametrize(
    "given",
    [
        {"requests": {}, "jobs": {}},
        {"requests": {"t": "a"}, "jobs": {"t": "a"}},
        {"requests": {".hidden": "a"}},
        {"epoch": "a/b"},
        {"uri_prefixes": {"a": ("s3://bucket",)}},
        {"uri_prefixes": {"a": ("/data/",)}},
    ],
)
def test_given_invalid_ingest_settings_when_they_are_made_then_they_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(KafkaSettingsError):
        KafkaIngestSettings(SECURE["plaintext"], **given)


def test_given_the_producer_when_it_is_set_up_then_all_replicas_confirm_and_waiting_has_an_end() -> None:
    options = ProducerSettings(
        SECURE["plaintext"], idempotence=False, max_block_seconds=3, delivery_timeout_seconds=60
    ).options()

    assert options["acks"] == "all"
    assert options["enable_idempotence"] is False
    assert (options["max_block_ms"], options["delivery_timeout_ms"]) == (3_000, 60_000)
