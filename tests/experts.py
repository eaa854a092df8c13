"""Workspaces of the scripted experts without a supervisor: real task, real tiny model, their real files; only `submit` and `time`
are played by a stand-in that writes down what it was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoints import record_of, science_of

from autorl_hpc.agents import load_agent
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.models import stage_model
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.supervise.workspace import lay, run_meta
from autorl_hpc.tasks.loader import load_task

LIMIT_S = 1500.0
"""Of one script: several trainings, each of which loads its libraries, on a machine that is busy with other things."""

GAME = '''
from autorl_rollouts.environment import Step


def goals(data):
    for n in range(40):
        yield {"id": f"g{n}", "question": f"{n} and {n + 3}"}


class Dialogue:
    def prompt(self, transcript):
        return transcript.first + "".join(f" {said}\\n{seen}\\nAnswer:" for said, seen in transcript.turns)

    def action(self, completion):
        return completion.strip()


class Environment:
    """Two questions; half the reward for each answer with a 1 in it, which the base model gives in four of five cases."""

    def reset(self, goal, seed):
        self.asked = self.good = 0
        return f"Question: What is {goal['question']}?\\nAnswer:"

    def step(self, action):
        self.asked, self.good = self.asked + 1, self.good + ("1" in action)
        return Step("Question: And then?", self.asked == 2, self.good / 2)

    def close(self):
        pass
'''

STAND_IN = """#!{python}
import json, os, sys
if os.path.basename(sys.argv[0]) == "time":
    with open("asked", "a") as file:
        file.write(".")
    told = {left_s}
    print(json.dumps({{"left_s": told[min(os.path.getsize("asked"), len(told)) - 1]}}))
else:
    with open("submitted.jsonl", "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\\n")
    print(json.dumps({{"status": "accepted"}}))
"""


class Workplace:
    """A workspace and the variables that an agent gets in it.

    Args:
        left_s: what `./time` says, one time after the other, and the last of them ever after.
    """

    def __init__(
        self, path: Path, task: str, agent: str, *, source: Path | None = None, left_s: tuple[float, ...] = (600.0,)
    ) -> None:
        root = Root(path / "root")
        root.path.mkdir(parents=True)
        loaded = load_task(task)
        stage_task(root, loaded, source)
        stage_model(root, "tiny", None)
        record = record_of(science_of(loaded, agent=agent))
        self.path = path / "workspace"
        self.agent = agent
        lay(self.path, root, record, loaded, load_agent(agent))
        (self.path / "run_meta.json").write_text(json.dumps(run_meta(record)))
        for name in ("submit", "time"):
            (self.path / name).unlink()
            (self.path / name).write_text(STAND_IN.format(python=sys.executable, left_s=left_s))
            (self.path / name).chmod(0o755)
        self.model = self.path / "models" / "autorl" / "tiny"
        self.env = {
            **{name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH") if name in os.environ},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(path),
            "WORKSPACE": str(self.path),
            "MODEL_PATH": str(self.model),
            "DATA_PATH": str(self.path / "data"),
            **({"PYTHONPATH": str(self.path / "environment")} if loaded.file.environment else {}),
            "AUTORL_SEED": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def bash(self, script: str, *, check: bool = True, **env: str) -> str:
        """Runs a piece of a start script, behind the experts' library; what it printed."""
        library = "set -euo pipefail\nsource .agent/scripted/lib.sh\n"
        return self._run(["bash", "-c", library + script], check, env)

    def start(self) -> str:
        """The agent's own start script."""
        return self._run(["bash", f".agent/{self.agent}/start.sh"], True, {})

    def _run(self, command: list[str], check: bool, env: dict[str, str]) -> str:
        out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=self.path, env={**self.env, **env}, timeout=LIMIT_S, check=False, **out)
        assert not check or done.returncode == 0, done.stdout[-6000:]
        return str(done.stdout)

    def submitted(self) -> list[list[str]]:
        """What `./submit` was asked, in order."""
        path = self.path / "submitted.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def weights(self, name: str) -> dict[str, Any]:
        """The tensors of a checkpoint in output/."""
        from safetensors.numpy import load_file

        return dict(load_file(self.path / "output" / name / "model.safetensors"))
