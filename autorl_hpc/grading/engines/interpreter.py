"""Which Python has vLLM, and the environment that an engine's worker starts in."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autorl_hpc.cluster.vllm import INSTALL, PROGRAM_VARIABLE, python_beside
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.secrets import without_secrets
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.states import Fault

CACHE_VARIABLE = "AUTORL_ENGINE_CACHE"
"""A folder for compiled kernels, in place of the one in the user's cache."""

HOME = Path(__file__).resolve().parents[3]
"""The folder that this package is imported from."""

PACKAGE = __name__.partition(".")[0]

_linked: list[Path] = []

NOT_PASSED_ON = frozenset(
    {
        *("VLLM_PORT", "VLLM_DP_MASTER_PORT", "MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
        *(
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "ROLE_RANK",
            "NODE_RANK",
            "VLLM_CONFIG_ROOT",
            "VLLM_ALLOW_INSECURE_SERIALIZATION",
        ),
        *(
            "VLLM_API_KEY",
            "VLLM_LOGGING_CONFIG_PATH",
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            "PYTHONSTARTUP",
            "PYTHONINSPECT",
        ),
    }
)
"""Ports and ranks of whoever started the grader: engines side by side would meet at them. vLLM then asks the kernel for free ports."""

FIXED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",  # none: they are code that acts in every process of vLLM
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in the worker itself, which is a process of its own already
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # else its kernels are compiled at a first start: 131 s on an H100
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Of vLLM's CPU build, where the job says nothing else: GiB, and threads that the kernel places."""

COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Processes that compile at a first start; by default one for each core, of each worker."""

MOST_THREADS = 4
"""Of a worker on a GPU: weights of another dtype are converted by the processor. The rest of its work is one thread's."""

CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""What these libraries compile is code that runs at the next start: by default some of it lies in /tmp, under a name that is known."""


def name_program(profile: ClusterProfile | None) -> None:
    """Has this process's engines take the program that the cluster's profile names, unless the variable says another one."""
    if profile is not None and profile.vllm:
        os.environ.setdefault(PROGRAM_VARIABLE, profile.vllm)


def interpreter() -> str:
    """The Python that runs the engine: beside `$AUTORL_VLLM`; else this one if it has vLLM; else beside the `vllm` on PATH. Where no
    Python lies beside the named program, which may be a script, this one is taken if it has vLLM.

    Raises:
        AutorlError: there is none.
    """
    wanted = os.environ.get(PROGRAM_VARIABLE)
    here = importlib.util.find_spec("vllm") is not None
    if not wanted and here:
        return sys.executable
    program = shutil.which(os.path.expandvars(os.path.expanduser(wanted or "vllm")))
    if program is not None:
        beside = python_beside(program)
        if beside is not None or here:
            return beside or sys.executable
    raise AutorlError(
        "no Python with vLLM is here, which `grader.engine: vllm` asks for"
        if program is None
        else f"no Python lies beside {program}",
        where=socket.gethostname(),
        fault=Fault.CLUSTER,
        next_step=INSTALL,
        exit_code=Exit.ENVIRONMENT,
    )


def environment(outer: Mapping[str, str], devices: Mapping[str, str], threads: int) -> dict[str, str]:
    """A worker's variables: this process's without secrets, offline, with our code first, its own caches, and these GPUs.

    Args:
        threads: of vLLM's CPU build; 0 leaves its default.
    """
    env = {name: value for name, value in without_secrets(outer).items() if name not in NOT_PASSED_ON}
    path = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    env["PYTHONPATH"] = os.pathsep.join([str(code_folder()), *(part for part in path if Path(part) != HOME)])
    env.update({name: value for name, value in DEFAULTS.items() if name not in outer})
    env.update(FIXED)
    cache = cache_folder(outer)
    env.update({name: str(cache / folder) for name, folder in CACHES.items()})
    env.update(devices)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def code_folder() -> Path:
    """A folder that this package can be imported from, and nothing else: where ours lies may be a whole site-packages, whose numpy
    or torch would come before that of another Python."""
    if not (_linked and (_linked[-1] / PACKAGE).is_dir()):
        folder = Path(tempfile.mkdtemp(prefix="autorl-code-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / PACKAGE).symlink_to(HOME / PACKAGE, target_is_directory=True)
        _linked.append(folder)
    return _linked[-1]


def beside_gpus(outer: Mapping[str, str], cores: int) -> dict[str, str]:
    """Threads of a worker that has GPUs and so many cores: a grader's OMP_NUM_THREADS is meant for its own process."""
    compilers = {} if COMPILERS in outer else {COMPILERS: str(max(1, cores))}
    return {"OMP_NUM_THREADS": str(max(1, min(MOST_THREADS, cores))), **compilers}


def cache_folder(outer: Mapping[str, str]) -> Path:
    """A folder that only this user may enter; one that lasts, where there is a home."""
    named = outer.get(CACHE_VARIABLE)
    home = outer.get("XDG_CACHE_HOME") or (f"{outer['HOME']}/.cache" if outer.get("HOME") else "")
    for folder in [named, f"{home}/autorl-hpc/engines" if home else None]:
        if folder:
            path = Path(folder)
            try:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
                found = path.stat()
                if found.st_uid == os.getuid() and os.access(path, os.W_OK):
                    path.chmod(0o700)
                    return path
            except OSError:
                continue
    return Path(tempfile.mkdtemp(prefix="autorl-engine-"))
