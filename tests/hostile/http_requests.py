"""Attacks by single HTTP requests and by floods of them, which no model computes."""

from __future__ import annotations

import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from tests.hostile.attack import Answer, Attack, Expected, Target, tally
from tests.hostile.client import CHAT, chat, create_batch, dial, flood, form_of, line, request, rest_of, send, upload

HEAD: Final = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
SLOW_SECONDS: Final = 45.0


def bad_request(message: str, code: str = ".*", status: str = "4..") -> tuple[Expected, ...]:
    return (Expected("http", status, code, message),)


def _raw(target: Target, data: bytes, seconds: float = 30.0) -> Answer:
    """What is answered to these bytes."""
    try:
        with dial(target) as connection:
            connection.sendall(data)
            return rest_of(connection, seconds)
    except OSError as error:
        return Answer("closed", "connection", message=str(error))


def _keyed(target: Target, key: str = "bad") -> str:
    return f"Authorization: Bearer {target.keys[key]}\r\n"


def traversal(target: Target) -> list[Answer]:
    names = (
        "..%2f..%2fkeys",
        "../../keys",
        "%2e%2e/%2e%2e/etc/passwd",
        "a%00b",
        "a" * 5_000,
        "..",
        "%ff%fe",
        "..%5c..%5cx",
    )
    kinds = ("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/batches/{}/results", "/v1/models/{}")
    return tally(request(target, "GET", kind.format(name)) for kind in kinds for name in names)


def two_authorizations(target: Target) -> list[Answer]:
    """A proxy may have used the other one."""
    pairs = (("bad", "good"), ("bad", "none"), ("none", "bad"))
    keys = {**target.keys, "none": "tm-none"}
    heads = ("".join(f"Authorization: Bearer {keys[name]}\r\n" for name in pair) for pair in pairs)
    return tally(
        _raw(target, f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{head}\r\n".encode())
        for head in heads
    )


def unknown_keys(target: Target) -> list[Answer]:
    """2,000 keys of the right form that were never made."""
    made = (f"tm-{secrets.token_hex(8)}-{secrets.token_hex(32)}" for _ in range(2_000))
    return flood((partial(request, target, "GET", "/v1/models", key=key) for key in made), 16)


def gzip_body(target: Target) -> list[Answer]:
    import gzip  # noqa: PLC0415

    packed = gzip.compress(b'{"model": "demo", "x": "' + b"a" * (64 << 20) + b'"}')
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    return [request(target, "POST", CHAT, packed, headers=headers)]


def smuggled(target: Target) -> list[Answer]:
    """A length and chunks at once; two lengths; a negative one."""
    ends = (
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}{}{}",
        "Content-Length: -1\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFFFFFFFF\r\n",
        "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    )
    return tally(_raw(target, (HEAD + _keyed(target) + end).encode()) for end in ends)


def slowloris(target: Target) -> list[Answer]:
    """200 connections that send a header now and then."""
    with ThreadPoolExecutor(200) as pool:
        return tally(pool.map(lambda _: _drip(target, b"GET /v1/models HTTP/1.1\r\n", b"X: a\r\n"), range(200)))


def slow_bodies(target: Target) -> list[Answer]:
    """50 requests whose bodies come byte by byte."""
    head = (HEAD + _keyed(target) + "Content-Length: 5000000\r\n\r\n{").encode()
    with ThreadPoolExecutor(50) as pool:
        return tally(pool.map(lambda _: _drip(target, head, b" "), range(50)))


def endless_uploads(target: Target) -> list[Answer]:
    """As many uploads as are taken at once, none of which ends; another tenant's is taken meanwhile."""
    form, headers = form_of(b"x", "endless.jsonl")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {headers['Content-Type']}\r\n"
        f"{_keyed(target)}Content-Length: 1000000000\r\n\r\n"
    ).encode() + form[:-30]
    with ThreadPoolExecutor(17) as pool:
        slow = [pool.submit(_drip, target, head, b"x") for _ in range(16)]
        time.sleep(3.0)
        other = upload(target, line("a"), "other.jsonl", key="other")[1]
        found = tally([future.result() for future in slow])
    return [*found, Answer("check", "taken" if other.status == "200" else "not taken", other.code, other.message)]


def absurd_parameters(target: Target) -> list[Answer]:
    given: tuple[dict[str, object], ...] = (
        {"max_tokens": 10**12}, {"n": 100_000}, {"stop": [str(n) for n in range(1_000)]}, {"top_logprobs": 1_000},
        {"temperature": -1}, {"logit_bias": {str(n): 1 for n in range(9_000)}, "x": 1}, {"seed": 10**100},
        {"tokenmill": {"timeout": 1e308}}, {"chat_template": "{{ x }}"}, {"model": "/etc/passwd"}, {"model": "s3://a/b"},
        {"messages": [{"role": "user", "content": ["x"] * 9_000}]}, {"messages": []},
    )  # fmt: skip
    return tally(request(target, "POST", CHAT, chat("x") | more) for more in given)


def json_bombs(target: Target) -> list[Answer]:
    bodies = (
        b"[" * 100_000, b'{"a":' * 30_000, b'{"model": "demo", "messages": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"model": "demo", "x": [' + b"0," * 4_000_000 + b"0]}", b'{"model": "\xff\xfe"}', b"null", b"\0" * 1_000,
        b'{"model": "demo", "seed": ' + b"9" * 100_000 + b"}", b'"' + b"a" * (11 << 20) + b'"',
    )  # fmt: skip
    headers = {"Content-Type": "application/json"}
    return tally(request(target, "POST", CHAT, body, headers=headers) for body in bodies)


def idempotency_reuse(target: Target) -> list[Answer]:
    """One Idempotency-Key for two files; another tenant's same key is its own."""
    key = secrets.token_hex(8)
    given = (("bad", line("a")), ("bad", line("b")), ("other", line("c")))
    return tally(upload(target, data, "i.jsonl", key=whose, **{"Idempotency-Key": key})[1] for whose, data in given)


def others_objects(target: Target) -> list[Answer]:
    """Another tenant's file, by every route that names one."""
    file, _ = upload(target, line("mine"), "mine.jsonl", key="other")
    if file is None:
        return [Answer("check", "no file of the other tenant")]
    answers = [request(target, method, f"/v1/files/{file}{end}")
               for method, end in (("GET", ""), ("GET", "/content"), ("DELETE", ""))]  # fmt: skip
    return tally([*answers, create_batch(target, file)[1]])


def metrics(target: Target) -> list[Answer]:
    return [request(target, "GET", "/metrics")]


def status_of_others(target: Target) -> list[Answer]:
    """Whether the answer of /v1/status to a tenant changes with the tokens of another."""

    def shown() -> str | None:
        import json  # noqa: PLC0415

        status, data = send(target, "GET", "/v1/status")
        return json.dumps([worker.get("metrics") for worker in json.loads(data)["workers"]]) if status == 200 else None

    first = shown()
    usage = [request(target, "POST", CHAT, chat("status of others " * 20, 7), key="other") for _ in range(3)]
    time.sleep(8.0)
    if any(answer.status != "200" for answer in usage):
        return usage
    then = shown()
    if first is None or then is None:
        return [Answer("check", "no status", message="/v1/status did not answer, so that nothing was compared")]
    leaked = first != then or "usage" in first
    return [
        Answer("check", "leaked" if leaked else "not leaked", message="token counts of other tenants, in /v1/status")
    ]


def webhook_targets(target: Target) -> list[Answer]:
    """The attacker's webhooks name this machine and the metadata address: nothing may connect here."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", target.webhook_port))
        server.listen()
        server.settimeout(12.0)
        file, answer = upload(target, b"not a request\n", "webhook.jsonl")
        if file is None:
            return [answer]
        batch, answer = create_batch(target, file)
        if batch is None:
            return [answer]
        try:
            server.accept()[0].close()
        except TimeoutError:
            return [Answer("check", "no connection")]
    return [Answer("check", "connected", message="the gateway connected to a webhook on its own machine")]


def webhook_by_request(target: Target) -> list[Answer]:
    """A batch that names where to send its events: only settings may."""
    file, answer = upload(target, line("a"), "webhook.jsonl")
    if file is None:
        return [answer]
    urls = ("http://127.0.0.1:80/", "http://169.254.169.254/latest/meta-data")
    return tally(create_batch(target, file, tokenmill={"webhook": url})[1] for url in urls)


def quota_of_files(target: Target) -> list[Answer]:
    """One-line files until one is refused."""
    answers = []
    for number in range(400):
        answers.append(upload(target, line(str(number)), f"{number}.jsonl", key="limited")[1])
        if answers[-1].status != "200":
            break
    return tally(answers)


def quota_of_bytes(target: Target) -> list[Answer]:
    """Files of 8 MiB until one is refused."""
    data, answers = line("a") + b" " * (8 << 20) + b"\n", []
    for number in range(40):
        answers.append(upload(target, data, f"large-{number}.jsonl", key="limited")[1])
        if answers[-1].status != "200":
            break
    return tally(answers)


def _drip(target: Target, head: bytes, more: bytes) -> Answer:
    """Sends `more` each half second until it is answered or hung up on."""
    until = time.monotonic() + SLOW_SECONDS
    try:
        with dial(target) as connection:
            connection.sendall(head)
            while time.monotonic() < until:
                connection.settimeout(0.5)
                try:
                    connection.sendall(more)
                    if connection.recv(1, socket.MSG_PEEK) == b"":
                        return Answer("closed", "connection")
                    return rest_of(connection, 10.0)
                except TimeoutError:
                    continue
    except OSError as error:
        return Answer("closed", "connection", message=str(error))
    return Answer("timeout", "still open", message=f"after {SLOW_SECONDS:.0f} s")


CLOSED: Final = Expected("closed", "connection")
QUOTA: Final = (
    Expected("http", "200"), Expected("http", "4..|507", message=r"quota|limit|stor|files|bytes", required=True),
)  # fmt: skip

TABLE: Final = (
    Attack("http: traversal in ids", traversal, bad_request("no |not|nothing|id", status="404|400"), quick=True),
    Attack("http: two Authorization headers", two_authorizations, bad_request("authorization|credential", ".*", "400")),
    Attack("http: 2,000 unknown keys", unknown_keys, bad_request("key", "invalid_api_key", "401|429")),
    Attack("http: gzip body", gzip_body, bad_request("json|encod|gzip|byte"), quick=True),
    Attack("http: smuggling", smuggled, (*bad_request("", status="400"), CLOSED)),
    Attack("http: slowloris, 200 connections", slowloris, (*bad_request("", status="408|400"), CLOSED)),
    Attack("http: 50 bodies byte by byte", slow_bodies, (*bad_request("slow|came|second", status="408"), CLOSED)),
    Attack(
        "http: uploads that never end", endless_uploads,
        (Expected("http", "408", message="slow|came|second"), Expected("http", "503|429", "too_many_uploads"), CLOSED,
         Expected("check", "taken", required=True)),
    ),
    Attack("http: absurd parameters", absurd_parameters, bad_request(".")),
    Attack("http: JSON bombs", json_bombs, bad_request(".")),
    Attack(
        "http: Idempotency-Key reused", idempotency_reuse,
        (Expected("http", "200", required=True), Expected("http", "409", "idempotency_key_reused", required=True)),
        quick=True,
    ),
    Attack("http: another tenant's objects", others_objects, bad_request("file", status="404"), quick=True),
    Attack("http: /metrics", metrics, bad_request("scope|metrics", status="403")),
    Attack("http: /v1/status of others", status_of_others, (Expected("check", "not leaked"),)),
    Attack("http: webhooks to this machine", webhook_targets, (Expected("check", "no connection"),)),
    Attack("http: webhook in a request", webhook_by_request, bad_request("webhook"), quick=True),
    Attack("http: quota of bytes", quota_of_bytes, QUOTA),
    Attack("http: quota of files", quota_of_files, QUOTA),
)  # fmt: skip
