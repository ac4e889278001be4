"""Connection settings of a Kafka cluster: the same for consumer, producer and admin client; secrets never reach
logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pipeline.ports import ComponentStopped

PASSWORD_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
Security = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI", "AWS_MSK_IAM"]


class KafkaSettingsError(ComponentStopped):
    """Raised when settings for Kafka contradict each other or lack something."""


@dataclass(frozen=True, slots=True)
class KafkaConnection:
    """Times in seconds; files in PEM.

    Attributes:
        bootstrap_servers: "host:port" of some brokers.
        username, password: for PLAIN and SCRAM.
        token_provider: for OAUTHBEARER, an object of kafka-python's `AbstractTokenProvider`.
        kerberos_service, kerberos_domain: for GSSAPI.
        ca_file: trusted authorities; None: the system's.
        cert_file, key_file, key_password: the client's own certificate.
        connect_timeout: of the first connection.
        request_timeout: of one request.
    """

    bootstrap_servers: tuple[str, ...]
    client_id: str = "tokenmill"
    security_protocol: Security = "PLAINTEXT"
    sasl_mechanism: Mechanism | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token_provider: Any = field(default=None, repr=False)
    kerberos_service: str = "kafka"
    kerberos_domain: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: str | None = field(default=None, repr=False)
    check_hostname: bool = True
    ciphers: str | None = None
    connect_timeout: float = 30.0
    request_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.bootstrap_servers:
            raise KafkaSettingsError("kafka: bootstrap_servers names no broker; give at least one host:port")
        sasl = self.security_protocol.startswith("SASL")
        if sasl and self.sasl_mechanism is None:
            raise KafkaSettingsError(
                f"kafka: security_protocol is {self.security_protocol}, but sasl_mechanism is missing; set it"
            )
        if not sasl and (self.sasl_mechanism or self.username or self.password):
            raise KafkaSettingsError(
                f"kafka: credentials are set, but security_protocol is {self.security_protocol}, which sends none; use "
                "SASL_SSL"
            )
        if self.sasl_mechanism in PASSWORD_MECHANISMS and not (self.username and self.password):
            raise KafkaSettingsError(
                f"kafka: sasl_mechanism {self.sasl_mechanism} needs username and password; set both"
            )
        if self.sasl_mechanism == "OAUTHBEARER" and self.token_provider is None:
            raise KafkaSettingsError("kafka: sasl_mechanism OAUTHBEARER needs a token provider; set it")
        if not self._is_encrypted and any((self.ca_file, self.cert_file, self.key_file, self.ciphers)):
            raise KafkaSettingsError(
                f"kafka: TLS files are set, but security_protocol is {self.security_protocol}, which ignores them; use "
                "SSL or SASL_SSL"
            )
        if self.key_file and not self.cert_file:
            raise KafkaSettingsError("kafka: key_file is set without cert_file; set both")

    @property
    def _is_encrypted(self) -> bool:
        return self.security_protocol.endswith("SSL")

    def options(self) -> dict[str, Any]:
        """The arguments that kafka-python's clients have in common."""
        options: dict[str, Any] = {
            "bootstrap_servers": list(self.bootstrap_servers),
            "client_id": self.client_id,
            "security_protocol": self.security_protocol,
            "request_timeout_ms": int(self.request_timeout * 1000),
            "bootstrap_timeout_ms": int(self.connect_timeout * 1000),
        }
        if self.sasl_mechanism is not None:
            options["sasl_mechanism"] = self.sasl_mechanism
        if self.sasl_mechanism in PASSWORD_MECHANISMS:
            options |= {"sasl_plain_username": self.username, "sasl_plain_password": self.password}
        if self.sasl_mechanism == "OAUTHBEARER":
            options["sasl_oauth_token_provider"] = self.token_provider
        if self.sasl_mechanism == "GSSAPI":
            options |= {
                "sasl_kerberos_service_name": self.kerberos_service,
                "sasl_kerberos_domain_name": self.kerberos_domain,
            }
        if self._is_encrypted:
            options |= {
                "ssl_check_hostname": self.check_hostname,
                "ssl_cafile": self.ca_file,
                "ssl_certfile": self.cert_file,
                "ssl_keyfile": self.key_file,
                "ssl_password": self.key_password,
                "ssl_ciphers": self.ciphers,
            }
        return options

    def admin_options(self) -> dict[str, Any]:
        """Arguments of its admin client, which takes no ciphers."""
        return {name: value for name, value in self.options().items() if name != "ssl_ciphers"}
