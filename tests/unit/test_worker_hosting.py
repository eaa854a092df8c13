"""What a worker's process inherits and shows, what a broken answer does, and which environments a grader keeps warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

from autorl_hpc.files import redact
from autorl_hpc.rollouts import pool
from autorl_hpc.rollouts.pool import Lost, Pool, Reply
from autorl_hpc.rollouts.source import Source

ENVIRONMENT = """
import ctypes, json, os, stat

class Dialogue:
    def __init__(self, *arguments, **options): pass
    def prompt(self, transcript): return transcript.first
    def action(self, completion): return completion

class Environment:
    def __init__(self, *arguments, **options): pass
    def reset(self, goal, seed):
        if goal.get("breaks"):
            for number in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(number).st_mode):
                        os.write(number, b"[" * 200_000 + b"\\n")
                except OSError:
                    pass
        return json.dumps([dict(os.environ), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)])
    def step(self, action): return "", True, 1.0
    def close(self): pass
"""


def begun(tmp_path: Path, held_out: bool, **goal: Any) -> Reply | Lost | None:
    file = tmp_path / "environment.py"
    file.write_text(ENVIRONMENT)
    with Pool(Source(file, "Environment", tmp_path, held_out), 1) as pool:
        pool.begin(0, {"id": "g", **goal}, 0)
        return pool.hear(PATIENCE_S)


@pytest.mark.parametrize("held_out", [True, False])
def test_beside_a_vault_a_worker_gets_no_secrets_and_no_gpu_and_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    monkeypatch.setenv("A_JUDGES_API_KEY", "k")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("GAMES", "/games")
    reply = begun(tmp_path, held_out)
    assert isinstance(reply, Reply) and reply.error is None, reply
    environment, dumpable = json.loads(reply.observation)
    assert environment["GAMES"] == "/games"
    got = environment.get("A_JUDGES_API_KEY"), environment["CUDA_VISIBLE_DEVICES"]
    assert got == ((None, "") if held_out else ("k", "3"))
    if held_out:
        assert dumpable == 0


def test_an_answer_nested_too_deeply_loses_the_worker_and_not_the_call(tmp_path: Path) -> None:
    assert isinstance(begun(tmp_path, False, breaks=True), Lost)


def test_one_rule_of_what_a_secret_is_called() -> None:
    """Agents get this room without the other, so the rule stands twice."""
    assert pool.SECRET == redact.SECRET
    names = ("HF_TOKEN", "SLURM_JWT", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "GPG_PASSPHRASE", "PGPASSWORD")
    assert redact.without_secrets({**dict.fromkeys(names, "x"), "PATH": "/bin", "SLURM_JOB_ID": "1"}).keys() == {
        "PATH",
        "SLURM_JOB_ID",
    }
