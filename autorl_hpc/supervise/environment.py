"""The agent's environment: the reference's variables, an allow-list, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.environments import IMAGE, VENV, find_environment
from autorl_hpc.files.layout import Root
from autorl_hpc.files.processes import MARK_VARIABLE
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.run import RunRecord
from autorl_hpc.sandbox.plan import program_folders
from autorl_hpc.states import Fault

ALLOWED = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TERM",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "ROCR_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
)
"""What makes programs run on this host, and no more: no tokens, no SLURM_*, no PYTHONPATH."""


def agent_environment(
    record: RunRecord,
    workspace: Path,
    url: str,
    mark: str,
    attempt: int,
    outer: Mapping[str, str] = os.environ,
    venv: Path | None = None,
    secrets: Sequence[str] = (),
    own: Mapping[str, str] | None = None,
    readable: Sequence[str] = (),
) -> dict[str, str]:
    """The variables of the agent's process; see docs/file-protocol.md.

    Args:
        venv: of the run's environment; its programs come first, and those of the suite's own environment not at all.
        secrets: further variables, which the agent's definition names.
        own: variables that the agent's definition sets; ours go before them.
        readable: folders that the experiment names; their programs come last.
    """
    science = record.science
    env = {**(own or {}), **{name: outer[name] for name in (*ALLOWED, *secrets) if name in outer}}
    ours, path = str(Path(sys.executable).parent), env.get("PATH", os.defpath)
    if venv is None:
        env["PATH"] = os.pathsep.join([ours, path])
    else:
        others = [part for part in path.split(os.pathsep) if part != ours or sys.prefix == sys.base_prefix]
        env["PATH"] = os.pathsep.join([str(venv / "bin"), *others])
        env["VIRTUAL_ENV"] = str(venv)
    env["PATH"] = os.pathsep.join([env["PATH"], *program_folders(readable)])
    env.setdefault("LANG", "C.UTF-8")
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(
        TASK=science.task,
        BASE_MODEL=science.base_model,
        WORKSPACE=str(workspace),
        MODEL_PATH=str(workspace / "models" / science.base_model),
        DATA_PATH=str(workspace / "data"),
        OUTPUT_DIR=str(workspace / "output"),
        GRADING_SERVER_URL=url,
        AUTORL_SEED=str(science.seed),
        AUTORL_MODE=science.mode,
        AUTORL_ATTEMPT=str(attempt),
        HOME=str(workspace / ".home"),
        TMPDIR=str(workspace / ".tmp"),
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HOME=str(workspace / ".home" / "huggingface"),
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    if science.recipe.max_steps:  # an interactive task: its environment, and what plays it
        env["PYTHONPATH"] = str(workspace / "environment")
    env[MARK_VARIABLE] = mark
    return env


_CARRIED: Final = "AUTORL_CARRIED_"
_TAKE_UP: Final = f'for each in "${{!{_CARRIED}@}}"; do export "${{!each}}"; unset "$each"; done; unset each; exec "$@"'


def take_own(env: dict[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Takes the variables of an agent's definition out of `env`, but for those that ours stand above.

    What makes the sandbox runs outside of it, and must not see them: LD_PRELOAD would load the agent's own code into it.
    """
    return {name: env.pop(name) for name, value in own.items() if env.get(name) == value}


def carried(own: Mapping[str, str]) -> dict[str, str]:
    """Variables under names that mean nothing to anybody, until `with_carried` gives them their own; argv would show them to all."""
    return {f"{_CARRIED}{number}": f"{name}={value}" for number, (name, value) in enumerate(own.items())}


def with_carried(command: Sequence[str]) -> list[str]:
    """`command` with the variables that its environment carries, which nothing before it has."""
    return ["bash", "-c", _TAKE_UP, "bash", *command]


def driver_environment(spec: DriverSpec, url: str, token: str) -> dict[str, str]:
    """How the agent reaches its driver: by the gateway, with the run's own token in the place of a key.

    Args:
        url: of the gateway, without a path.
    """
    env = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": token,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": token,
        "AUTORL_DRIVER_MODEL": spec.model,
        "AUTORL_DRIVER_PARAMETERS": json.dumps(spec.parameters),
        "AUTORL_DRIVER_TOOLS": ",".join(spec.tools),
    }
    if spec.context_tokens is not None:
        env["AUTORL_DRIVER_CONTEXT_TOKENS"] = str(spec.context_tokens)
    if spec.max_output_tokens is not None:
        env["AUTORL_DRIVER_MAX_OUTPUT_TOKENS"] = str(spec.max_output_tokens)
    return env


def environment_venv(root: Root, record: RunRecord) -> Path | None:
    """The venv that run.json names; None: the run has no environment of its own, or an image.

    Raises:
        AutorlError: it is not there, or its Python is not on this node.
    """
    if record.environment is None or record.environment.kind == "image":
        return None
    name, content_hash = record.environment.name, record.environment.content_hash
    venv = find_environment(root, name, content_hash)[0] / VENV
    if not os.access(venv / "bin" / "python", os.X_OK):
        raise AutorlError(
            f"environment {name} has no Python on this node",
            where=venv / "bin" / "python",
            fault=Fault.CLUSTER,
            next_step="it is a link to the Python that made it, which must be on every node: stage the environment anew with a "
            "Python on the shared file system",
        )
    return venv


def environment_image(root: Root, record: RunRecord) -> Path | None:
    """The image that run.json names; None: the run's environment is none.

    Raises:
        AutorlError: it is not there.
    """
    if record.environment is None or record.environment.kind != "image":
        return None
    return find_environment(root, record.environment.name, record.environment.content_hash)[0] / IMAGE
