"""Dead letters: written once, complete when visible, and replayed on request."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from pipeline.ingest.dead_letters import CannotReplay, DeadLetter, DeadLetterNotFound, DeadLetters, DeadLetterSource
from pipeline.ports import PipelineError, World
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at
from tests.pipeline.simulation import START, simulated_world


def source(position: int = 7) -> DeadLetterSource:
    return DeadLetterSource("kafka", "cluster/requests", f"0-{position}", START + timedelta(seconds=position))


def test_given_a_record_when_it_is_written_and_found_then_nothing_of_it_is_lost(world: World) -> None:
    dead_letters = DeadLetters(world)
    headers = [("tier", b"bulk"), ("tier", b"\xff\x00"), ("none", None)]
    made = dead_letters.record(source(), "invalid_json", "line 1 is no JSON", b"\x00\xffpoison", headers, key=b"k\xff")
    found = dead_letters.find(made)
    assert found.replays == 0
    assert (found.dead_letter.ingest_source, found.dead_letter.place, found.dead_letter.position) == (
        "kafka",
        "cluster/requests",
        "0-7",
    )
    assert (found.dead_letter.reason_code, found.dead_letter.message) == ("invalid_json", "line 1 is no JSON")
    assert found.dead_letter.record_headers() == headers
    assert found.dead_letter.record_key() == b"k\xff"
    assert dead_letters.original(found.dead_letter) == b"\x00\xffpoison"


def test_given_the_same_source_again_when_it_is_written_then_it_is_the_same_dead_letter(world: World) -> None:
    dead_letters = DeadLetters(world)
    first = dead_letters.record(source(), "a", "b", b"c")
    world.clock.sleep(5.0)
    assert dead_letters.record(source(), "a", "b", b"c") == first
    assert dead_letters.record(source(8), "a", "b", b"c") != first
    assert [found.dead_letter.position for found in dead_letters.dead_letters()] == ["0-8", "0-7"], "the newest first"


def test_given_a_death_at_any_call_when_a_dead_letter_is_written_then_it_is_whole_or_unseen(world: World) -> None:
    for nth in range(1, 10):
        fresh = simulated_world(world.scratch)
        watched = WatchedStore(fresh.store, dies_at(nth))
        with suppress(Killed):
            DeadLetters(replace(fresh, store=watched)).record(source(), "a", "b", b"original")
        dead_letters = DeadLetters(fresh)
        for found in dead_letters.dead_letters():
            assert dead_letters.original(found.dead_letter) == b"original"
        dead_letters.record(source(), "a", "b", b"original")
        assert len(list(dead_letters.dead_letters())) == 1
        if len(watched.calls) < nth:
            assert nth == 3
            return
    raise AssertionError("it never ends")


def test_given_a_dead_letter_when_it_is_replayed_then_its_original_is_sent_once_and_it_is_marked(world: World) -> None:
    dead_letters, sent = DeadLetters(world), list[tuple[DeadLetter, bytes]]()

    def send(dead_letter: DeadLetter, original: bytes) -> str:
        sent.append((dead_letter, original))
        return "it is 0-9 now"

    made = dead_letters.record(source(), "a", "b", b"c", [("h", b"v")], key=b"k")
    assert dead_letters.replay(made, send) == "it is 0-9 now"
    ((dead_letter, original),) = sent
    assert (original, dead_letter.record_headers(), dead_letter.record_key()) == (b"c", [("h", b"v")], b"k")
    with pytest.raises(CannotReplay, match="replayed before; --again"):
        dead_letters.replay(made, send)
    dead_letters.replay(made, send, again=True)
    assert len(sent) == dead_letters.find(made).replays == len(dead_letters.replays(made)) == 2
    assert [found.replays for found in dead_letters.dead_letters()] == [2]
    assert dead_letters.replays(made)[0].outcome == "it is 0-9 now"


def test_given_a_send_that_fails_when_a_dead_letter_is_replayed_then_it_is_not_marked(world: World) -> None:
    dead_letters = DeadLetters(world)
    made = dead_letters.record(source(), "a", "b", b"c")

    def fails(_dead_letter: DeadLetter, _original: bytes) -> str:
        raise PipelineError("the broker is gone")

    with pytest.raises(PipelineError, match="gone"):
        dead_letters.replay(made, fails)
    assert dead_letters.find(made).replays == 0


def test_given_what_cannot_be_replayed_then_the_reason_says_what_to_do(world: World) -> None:
    dead_letters = DeadLetters(world, max_bytes=4)
    long = dead_letters.record(source(), "a", "b", b"12345")
    assert dead_letters.original(dead_letters.find(long).dead_letter) == b"1234"
    with pytest.raises(CannotReplay, match="only 4 of 5 bytes"):
        dead_letters.replay(long, lambda _, __: "sent")
    with pytest.raises(CannotReplay, match="the ingest source 'kafka', which can't be reached"):
        dead_letters.replay(dead_letters.record(source(8), "a", "b", b"1"))
    with pytest.raises(DeadLetterNotFound, match="dl-nothing"):
        dead_letters.find("dl-nothing")


def test_given_a_dead_letter_with_a_marker_when_it_is_replayed_then_the_marker_is_deleted_last(world: World) -> None:
    dead_letters = DeadLetters(world)
    world.store.create("taken/x", b"")
    made = dead_letters.record(source(), "a", "b", marker="taken/x")
    assert dead_letters.open_source(source()) is None
    watched = WatchedStore(world.store)
    DeadLetters(replace(world, store=watched)).replay(made)
    changes = [call for call in watched.calls if call[0] in ("create", "delete")]
    assert [call for call, _ in changes] == ["create", "delete"]
    assert world.store.info("taken/x") is None
    again = dead_letters.open_source(source())
    assert again is not None
    assert dead_letters.record(again, "a", "b") != made
    assert dead_letters.open_source(source()) is None, "refused again, and no replay was requested"
