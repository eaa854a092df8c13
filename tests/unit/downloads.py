"""A server on loopback, a place for its file, and a download that succeeds or fails."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import PATIENCE_S
from web_server import (
    Answer,
    LoopbackServer,
    clean_environment,
    served,
)

from autorl_hpc.errors import AutorlError
from autorl_hpc.stage.download import Patience, Pin, fetch
from autorl_hpc.stage.sources import HttpSource

DATA = bytes(range(256)) * 1000
SHA = hashlib.sha256(DATA).hexdigest()
OTHER = DATA[:-1] + b"\0"
QUICK = Patience(tries=3, timeout_s=PATIENCE_S, first_pause_s=0.01, longest_pause_s=0.02, longest_wait_s=1.5)
"""It waits for an answer as long as a busy machine may need for one, and not between two tries."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    clean_environment(monkeypatch, tmp_path)
    with served() as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


def get(
    server: LoopbackServer, place: Path, *answers: Answer, pin: Pin | None = None, patience: Patience = QUICK
) -> tuple[str, str]:
    """Fetches /file, which the server answers in turn by `answers`; returns its sha256 and what was said."""
    if answers:
        server.answers["/file"] = list(answers)
    lines: list[str] = []
    wanted = Pin(sha256=SHA) if pin is None else pin
    done = fetch(HttpSource(server.url("/file")), place / "file", wanted, say=lines.append, patience=patience)
    return done.sha256, "\n".join(lines)


def fails(server: LoopbackServer, place: Path, *answers: Answer, pin: Pin | None = None) -> AutorlError:
    with pytest.raises(AutorlError) as caught:
        get(server, place, *answers, pin=pin)
    assert caught.value.next_step and not (place / "file").exists()
    return caught.value


def left(place: Path) -> list[str]:
    return sorted(os.listdir(place))
