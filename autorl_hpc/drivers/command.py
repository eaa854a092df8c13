"""How a driver's server is started: its program, arguments, environment and address."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from autorl_hpc.cluster.vllm import PROGRAM_VARIABLE
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.driver import DriverSpec, serve_options
from autorl_hpc.sandbox.ports import TORCH_PORTS, handed_out
from autorl_hpc.states import Fault

KEY_VARIABLE = "VLLM_API_KEY"
"""By which vLLM takes its key: on the command line every user of the node could read it."""

ANY_ADDRESS = "0.0.0.0"
LOOPBACK = "127.0.0.1"
SERVED_PORTS = range(20_000, 30_000)
ANY_PORTS = range(1024, 65_536)
PORT_TRIES = 100


def program(profile: ClusterProfile | None) -> str:
    """The path of `vllm`: `$AUTORL_VLLM`, the profile's `vllm`, the one beside this Python, or that on PATH.

    Raises:
        AutorlError: there is none.
    """
    named = os.environ.get(PROGRAM_VARIABLE) or (profile.vllm if profile is not None else None)
    beside = Path(sys.executable).parent / "vllm"
    wanted = os.path.expandvars(os.path.expanduser(named)) if named else str(beside) if beside.is_file() else "vllm"
    found = shutil.which(wanted)
    if found is None:
        raise AutorlError(
            f"the program `{wanted}` that serves the driver is not here",
            where=socket.gethostname(),
            fault=Fault.CLUSTER,
            next_step=f"install vllm in the jobs' environment, or name it: `vllm:` of the cluster's profile, or ${PROGRAM_VARIABLE}",
            exit_code=Exit.ENVIRONMENT,
        )
    return found


def arguments(spec: DriverSpec, model: Path, gpus: int, host: str, port: int) -> list[str]:
    """What follows the program. The key is not among it."""
    parallel = spec.tensor_parallel or max(1, gpus)
    found = ["serve", str(model), f"--served-model-name={spec.model}", f"--host={host}", f"--port={port}"]
    found.append(f"--tensor-parallel-size={parallel}")
    if spec.context_tokens is not None:
        found.append(f"--max-model-len={spec.context_tokens}")
    return [*found, *spec.args]


def environment(outer: Mapping[str, str], key: str, code: str, inner_port: int | None = None) -> dict[str, str]:
    """The server's variables: this job's, with the key, offline, and without our frozen code, which may be of another Python.

    Args:
        code: the folder of the frozen code.
        inner_port: where its own processes meet; None: it takes one of those that the kernel hands out.
    """
    env = dict(outer)
    path = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != code]
    env["PYTHONPATH"] = os.pathsep.join(path)
    if not path:
        del env["PYTHONPATH"]
    env.update({KEY_VARIABLE: key, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    env.update({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"})
    # Its processes are on this node. Asked by itself it would take the address of the way out, or none.
    env["VLLM_HOST_IP"] = LOOPBACK
    if inner_port is not None:
        env["VLLM_PORT"] = str(inner_port)
    # Ours, for the frozen code; vLLM is imported three times a start, and each would compile all of it again.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # The server's stacks go into its log when it is ended for not answering.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    # Compiled by nvcc at the first start: a minute, and nodes without nvcc fail. vLLM's own sampler needs none.
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return env


def inner_port(spec: DriverSpec) -> int | None:
    """A free port for the server's own processes, which ask for no key there; None where it needs several that it can't take in turn."""
    return None if "data-parallel-size" in serve_options(spec.args) else free_port(LOOPBACK)


def free_port(host: str) -> int:
    """A port that nobody has now. Should another take it before the server does, that dies and gets a new one.

    It is none of those that agents at level landlock may go to, as long as the node has others: some paths of the server ask for no key.
    """
    handed = handed_out()
    for wanted in (SERVED_PORTS, ANY_PORTS):
        ports = [port for port in wanted if port not in handed and port not in TORCH_PORTS]
        for port in random.sample(ports, min(len(ports), PORT_TRIES)):
            with contextlib.suppress(OSError):
                return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def reachable_name() -> str:
    """By which other nodes reach this one: its host name where that is known, else the address of its way out."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return _own_address()
    return name


def _own_address() -> str:
    """Of the interface that a packet into the wide world would take; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK
