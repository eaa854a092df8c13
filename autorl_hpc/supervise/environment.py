"""The agent's environment: the reference's variables, an allow-list, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from autorl_hpc.records.run import RunRecord
from autorl_hpc.supervise.processes import MARK_VARIABLE

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
    record: RunRecord, workspace: Path, url: str, mark: str, attempt: int, outer: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables of the agent's process; see docs/file-protocol.md."""
    science = record.science
    env = {name: outer[name] for name in ALLOWED if name in outer}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
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
    env[MARK_VARIABLE] = mark
    return env
