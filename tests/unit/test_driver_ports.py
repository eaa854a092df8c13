"""A served driver listens where agents at level landlock can't go, as long as its node has such a port."""

from __future__ import annotations

import socket

import pytest

from autorl_hpc.drivers import serve
from autorl_hpc.sandbox.sandbox_plan import TORCH_PORTS, handed_out

ALL = range(1024, 65_536)


def ports(count: int = 200) -> set[int]:
    return {serve.free_port(serve.LOOPBACK) for _ in range(count)}


def test_the_port_is_none_that_landlock_leaves_open() -> None:
    assert not {port for port in ports() if port in handed_out() or port in TORCH_PORTS}


def test_a_node_that_hands_out_the_usual_places_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "handed_out", lambda: range(15_000, 61_000))
    assert not {port for port in ports() if 15_000 <= port < 61_000}


def test_a_node_that_hands_out_all_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "handed_out", lambda: ALL)
    assert ports(1)


def test_a_busy_port_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind((serve.LOOPBACK, 0))
        taken = busy.getsockname()[1]
        monkeypatch.setattr(serve, "SERVED_PORTS", (taken,))
        monkeypatch.setattr(serve, "ANY_PORTS", (taken,))
        monkeypatch.setattr(serve, "handed_out", lambda: range(0))
        assert taken not in ports(5)
