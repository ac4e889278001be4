"""Transfers share the links of both ends."""

from __future__ import annotations

from math import inf

import pytest

from pipeline.simulator.serving.link import LinkSettings, SharedLinks

LINK = LinkSettings(bytes_per_second=100.0, window_bytes=None)


def ends(links: SharedLinks[str]) -> dict[str, float]:
    """When each running transfer ends."""
    found: dict[str, float] = {}
    while (now := links.next_end()) < inf:
        found |= dict.fromkeys(links.ended(now), now)
    return found


def test_a_transfer_alone_takes_its_bytes() -> None:
    links: SharedLinks[str] = SharedLinks(LINK)
    links.start(5.0, "a", source=0, target=1, num_bytes=200.0)
    assert links.waiting_bytes() == 200.0
    assert ends(links) == {"a": pytest.approx(7.0)}
    assert (links.waiting_bytes(), links.moved_bytes, links.next_end()) == (0.0, 200.0, inf)


@pytest.mark.parametrize(("source", "target"), [(0, 2), (3, 1)])
def test_transfers_of_one_link_share_it(source: int, target: int) -> None:
    links: SharedLinks[str] = SharedLinks(LINK)
    links.start(0.0, "a", source=0, target=1, num_bytes=200.0)
    links.start(1.0, "b", source, target, num_bytes=100.0)
    # "a" has 100 bytes left at 1 s, and both have 50 bytes a second from then on.
    assert ends(links) == {"a": pytest.approx(3.0), "b": pytest.approx(3.0)}


def test_transfers_of_different_links_do_not() -> None:
    links: SharedLinks[str] = SharedLinks(LINK)
    links.start(0.0, "a", source=0, target=1, num_bytes=200.0)
    links.start(0.0, "b", source=2, target=3, num_bytes=100.0)
    assert ends(links) == {"a": pytest.approx(2.0), "b": pytest.approx(1.0)}


def test_the_rest_gets_the_whole_link_when_a_transfer_ends() -> None:
    links: SharedLinks[str] = SharedLinks(LINK)
    links.start(0.0, "a", source=0, target=1, num_bytes=50.0)
    links.start(0.0, "b", source=0, target=1, num_bytes=150.0)
    assert ends(links) == {"a": pytest.approx(1.0), "b": pytest.approx(2.0)}


def test_a_window_bounds_a_transfer_but_not_the_link() -> None:
    window = LinkSettings(bytes_per_second=100.0, round_trip_seconds=0.5, window_bytes=20.0)
    assert window.bytes_per_second_of_one == 40.0
    links: SharedLinks[str] = SharedLinks(window)
    for name in "ab":
        links.start(0.0, name, source=0, target=1, num_bytes=80.0)
    assert ends(links) == {"a": pytest.approx(2.0), "b": pytest.approx(2.0)}


def test_an_infinite_bandwidth_takes_no_time() -> None:
    links: SharedLinks[str] = SharedLinks(LinkSettings(bytes_per_second=inf, window_bytes=None))
    links.start(3.0, "a", source=0, target=1, num_bytes=1e18)
    links.start(3.0, "b", source=0, target=1, num_bytes=0.0)
    assert ends(links) == {"a": 3.0, "b": 3.0}
