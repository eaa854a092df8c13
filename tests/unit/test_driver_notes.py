"""What a launch notes about an experiment's drivers before anything is queued."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize("end", ["v1", "v1/", "v1beta", "v1beta/openai", "v4"])
def test_the_usual_addresses_need_no_note(end: str) -> None:
    assert noted(url=f"https://api.example.org/{end}") == ""


@pytest.mark.parametrize("key", [{"key_file": "/k"}, {"key_variable": "K"}])
def test_a_key_that_an_agent_could_read_is_warned_of(key: dict[str, str]) -> None:
    assert "WARNING: at sandbox level none an agent can read" in noted("none", **key)
    assert "WARNING: on a node where no sandbox level works" in noted("auto", **key)
    assert noted("landlock", **key) == "" and noted("none") == ""


def test_an_address_without_a_version_is_noted() -> None:
    assert "ends without a version" in noted(url="https://api.example.org")
    assert "https://api.example.org/api/chat/completions" in noted(url="https://api.example.org/api")


def test_runs_that_no_leaderboard_compares_are_noted_before_they_run() -> None:
    both = ["d", "none"]
    assert "sandbox: {network: driver}` gives all of them the same" in noted(of_runs=both)
    assert noted(of_runs=both, network="driver") == noted(of_runs="none") == noted() == ""
    assert noted("none", of_runs=both) == "", "at level none all networks are open"
