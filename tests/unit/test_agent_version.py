"""GPUs that the torch of an agent does not see: told at the start of an attempt, and by a scripted agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S

from autorl_hpc.agents import Agent, AgentFile
from autorl_hpc.agents.program_check import Where, look_at_torch, where_agents_run
from autorl_hpc.files.layout import share

TORCH = """
import os, sys
from pathlib import Path
from autorl_hpc.supervise import confine
env = {"PATH": f"{sys.argv[2]}:{os.environ['PATH']}", "AUTORL_RUN_MARK": "mark-of-test.1."}
for granted in (0, 2):
    print(confine.note_torch(Path(sys.argv[1]), granted, 3, list, env, "mark-of-test.1.", lambda: False))
"""


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("0 2.13.0+cpu None", "torch 2.13.0+cpu is built without CUDA: it sees none of 2 GPUs"),
        ("1 2.14.0 13.0", "torch 2.14.0 for 13.0 sees 1 of 2 GPUs: look at the node's driver"),
        ("2 2.14.0 13.0", None),
        ("Traceback", None),
    ],
)
def test_gpus_that_the_agent_s_torch_does_not_see_are_in_the_events(tmp_path: Path, says: str, why: str | None) -> None:
    """A job was charged for a GPU, and the agent's training died of it or went on without; nothing was told."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    events = tmp_path / "events.jsonl"
    argv = [sys.executable, "-c", TORCH, str(events), str(python.parent)]
    done = subprocess.run(argv, check=True, timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["None", str(why)]
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    assert [(one["event"], one["granted"], one["why"]) for one in told] == ([("gpus_unseen", 2, why)] if why else [])
    where = Where(str(python.parent), None, environ={"PATH": os.environ["PATH"]})
    plain = Agent(tmp_path, AgentFile(name="a", description="d"))
    noted = look_at_torch([plain], where, 2)
    assert [(one.state, one.value) for one in noted] == ([("note", why)] if "None" in says else []), (
        "elsewhere its build alone tells"
    )
    assert look_at_torch([plain], where, 0) == []


OWN_TORCH = """
class cuda:
    device_count = staticmethod(lambda: 0)
class version:
    cuda, hip = None, None
__version__ = "of-the-definition"
"""


def test_launch_and_doctor_ask_the_torch_that_a_definition_leads_to(tmp_path: Path) -> None:
    """Its PYTHONPATH names another torch than the suite's own; on this host it is asked in a sandbox alone, since it runs its code."""
    (tmp_path / "agents" / "mine").mkdir(parents=True)
    torch = tmp_path / "agents" / "mine" / "torch.py"
    torch.write_text(OWN_TORCH)
    own = {"PYTHONPATH": str(torch.parent)}
    mine = Agent(torch.parent, AgentFile.model_validate({"name": "mine", "description": "d", "env": own}))
    (noted,) = look_at_torch([mine], where_agents_run(None), 2)
    assert noted.agent == "mine" and noted.value.startswith("torch of-the-definition is built without CUDA")


def test_a_scripted_agent_says_that_torch_sees_no_gpu_and_trains_on_the_cpu(tmp_path: Path) -> None:
    """It died in `min()` of no GPUs."""
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    device_count = staticmethod(lambda: 0)\n"
        "class version:\n    cuda = hip = None\n__version__ = '2.13.0+cpu'\n"
    )
    templates = share("templates")
    argv = [sys.executable, str(templates / "agents" / "scripted" / "fit.py"), str(templates / "models" / "tiny"), "1"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "cpu full 0\n"
    assert "torch 2.13.0+cpu sees 0 of 1 GPUs granted (CUDA_VISIBLE_DEVICES 0): it is built without CUDA" in done.stderr
