"""A task's corpus of one document, and connections, of which none leaves this machine."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.rollouts.search.backends import Document, write_corpus


@pytest.fixture(autouse=True)
def no_connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing leaves this machine, and nothing but a test's own server is connected to."""
    tried: list[Any] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        tried.append(address)
        if not (isinstance(address, tuple) and address[0] == "127.0.0.1"):
            raise AssertionError(f"a connection to {address} was opened")
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return tried


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "vault" / "task"
    write_corpus(folder / "corpus.jsonl", [Document("Orlen", "u:1", "Orlen is a town on the river Tesh.")])
    return folder


def sha(data: Path) -> str:
    return hashlib.sha256((data / "corpus.jsonl").read_bytes()).hexdigest()
