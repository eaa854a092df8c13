"""What a launch notes about an experiment's drivers before anything is queued; what a driver's answers say of key and cluster."""

from __future__ import annotations

from typing import Any

import pytest

from autorl_hpc.drivers.client import lost, refusal
from autorl_hpc.files.safe_open import DriverCall
from autorl_hpc.launch.drivers import notes
from autorl_hpc.records.experiment import ExperimentSpec


def noted(level: str = "bwrap", *, of_runs: str | list[str] = "d", network: str | None = None, **driver: Any) -> str:
    """The notes, of a spec whose one driver is an API.

    Args:
        of_runs: `matrix.driver`.
    """
    spec = {
        "name": "x",
        "drivers": {"d": {"kind": "api", "url": "https://api.example.org/v1", "model": "m", **driver}},
        "matrix": {"task": "gsm8k", "agent": "mini", "driver": of_runs, "base_model": "b", "seed": [0]},
        "budget": {"wall_clock": "1h"},
        "sandbox": {"level": level, "network": network},
    }
    return "\n".join(notes(ExperimentSpec.model_validate(spec)))


@pytest.mark.parametrize("key", [{"key_file": "/k"}, {"key_variable": "K"}])
def test_a_key_that_an_agent_could_read_is_warned_of(key: dict[str, str]) -> None:
    assert "WARNING: at sandbox level none an agent can read" in noted("none", **key)
    assert "WARNING: on a node where no sandbox level works" in noted("auto", **key)
    assert noted("landlock", **key) == "" and noted("none") == ""


def test_runs_that_no_leaderboard_compares_are_noted_before_they_run() -> None:
    both = ["d", "none"]
    assert "sandbox: {network: driver}` gives all of them the same" in noted(of_runs=both)
    assert noted(of_runs=both, network="driver") == noted(of_runs="none") == noted() == ""
    assert noted("none", of_runs=both) == "", "at level none all networks are open"


@pytest.mark.parametrize(
    ("code", "said", "dialect", "problem", "passes"),
    [
        (401, "invalid key", "any", "refuses the key", False),
        (403, "not in your region", "anthropic", "refuses the key", False),
        (400, '{"status": "INVALID_ARGUMENT", "message": "API key not valid."}', "gemini", "refuses the key", False),
        (402, "Insufficient Balance", "openai-chat", "gives this account no answers", False),
        (429, '{"code": "insufficient_quota"}', "openai-chat", "gives this account no answers", False),
        (404, "no such model", "openai-chat", "knows no such model", False),
        (307, "", "openai-chat", "sends elsewhere", False),
        (429, "slow down", "openai-chat", "is not there at the moment", True),
        (503, "overloaded", "openai-chat", "is not there at the moment", True),
        (400, "use max_completion_tokens", "openai-chat", None, False),  # the key was taken
        (404, "not found", "any", None, False),  # an agent of no dialect may ask at another address
    ],
)
def test_what_an_answer_says_of_the_key(code: int, said: str, dialect: str, problem: str | None, passes: bool) -> None:
    found, may_pass = refusal(code, said, dialect)
    assert (found is None) == (problem is None) and (problem or "") in (found or "") and may_pass == passes


GOOD, BAD = {"status": 200}, {"status": 503, "fault": "cluster", "error": "the driver answered 503: x"}
KEY_GONE = {"status": 401, "fault": "cluster", "error": "driver_key: the driver refuses the key"}


@pytest.mark.parametrize(
    ("calls", "lost_"),
    [
        ([], False),
        ([GOOD, KEY_GONE], True),
        ([KEY_GONE, GOOD], False),
        ([GOOD, BAD, BAD], False),  # a request of the agent's own may bring about one
        ([GOOD, BAD, BAD, BAD], True),
        ([BAD, BAD, GOOD, BAD], False),
        ([KEY_GONE, {"status": 400, "fault": "agent"}], True),
        ([KEY_GONE, {"status": 403, "refused": "budget_exhausted"}], True),
        ([{**KEY_GONE, "attempt": 1}], False),  # of an earlier attempt
    ],
)
def test_when_a_driver_counts_as_lost(calls: list[dict[str, Any]], lost_: bool) -> None:
    same = {"at": "t", "dialect": "openai-chat", "path": "/v1/chat/completions", "attempt": 2}
    made = [DriverCall.model_validate({**same, "number": n + 1, **call}) for n, call in enumerate(calls)]
    assert (lost(made, 2) is not None) == lost_
