"""What an agent may reach: the plan that every level enforces as far as it can, its mounts, ports and inner command."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from autorl_hpc.sandbox.seccomp import guard_job
from autorl_hpc.states import Network

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/sys", "/nix", "/gnu", "/cvmfs",
)  # fmt: skip
"""Usual places of software. No home, /var, /run, /srv, /mnt, /scratch; software there must be named by PATH or the spec."""

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
GPU_DEVICES = ("nvidia", "dri", "kfd", "infiniband", "dxg")  # name prefixes of devices for GPUs and their networks
SETTINGS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""Parts of /proc that belong to the node and not to a process."""

SHORT = "/tmp"
"""Folder for sockets: a Unix socket's path is limited to 107 bytes, and $TMPDIR and scratch may be longer."""

INSIDE = "/run/autorl"  # folder in the sandbox with the sockets that lead out and the script that forwards to them
SOCKET_NAME = "bridge.sock"
DRIVER_SOCKET_NAME = "driver.sock"
HOSTS_NAME = "hosts"
HOST = "sandbox"
"""Host name of the sandbox. Torch and MPI resolve their host name, and the node's address does not exist inside."""

SLURM_COMMANDS = (
    "sbatch", "srun", "salloc", "scancel", "scontrol", "squeue", "sacct", "sacctmgr", "sattach", "sbcast", "sinfo", "sprio",
    "sreport", "sshare", "sstat", "strigger", "slurmctld", "slurmd", "slurmstepd",
)  # fmt: skip


@dataclass(frozen=True)
class SandboxPlan:
    """What one agent may reach. `ways`: (port, name of a socket in that folder): each port on the loopback inside is
    forwarded to its socket."""

    workspace: str  # writable, under its own path
    tmp: str  # folder outside that is its private /tmp; levels that can't mount use it under its own path
    readable: tuple[str, ...]  # files and folders that are read-only under their own paths
    hidden: tuple[str, ...]  # folders that don't exist inside, even below a readable one
    placed: tuple[tuple[str, str], ...] = ()  # (folder outside, path inside), read-only: base model and training data
    devices: tuple[str, ...] = ()  # device nodes or folders of them
    masked: tuple[str, ...] = ()  # programs that can't be run
    network: Network = Network.NONE  # what to enforce
    socket_folder: str | None = None  # folder outside with the sockets that lead out; INSIDE in the sandbox
    ways: tuple[tuple[int, str], ...] = ()
    image: str | None = None  # for level apptainer; None excludes that level


def lay_way_out(folder: str) -> None:
    """Write the files that belong beside the socket into its folder."""
    Path(folder, HOSTS_NAME).write_text(f"127.0.0.1 localhost {HOST}\n::1 localhost\n", encoding="ascii")


def below(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or inside it. Both must be absolute and without `..`."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def software(prefixes: Iterable[str], outer: dict[str, str]) -> list[str]:
    """Return what programs on this machine need: system folders, Pythons (`prefixes`: sys.prefix and similar), and folders named by PATH and
    the like in the environment `outer`, with the libraries beside those of PATH."""
    found = [path for path in SYSTEM if os.path.lexists(path)]
    home = os.path.realpath(os.path.expanduser("~"))
    for prefix in prefixes:
        found += [prefix, os.path.realpath(prefix)]
    for folder in outer.get("PATH", "").split(os.pathsep):
        if not folder.startswith("/"):
            continue
        found.append(folder)
        over = os.path.dirname(folder.rstrip("/"))
        if os.path.basename(folder.rstrip("/")) in ("bin", "sbin") and os.path.realpath(over) not in ("/", home):
            # Of the home only what programs need, because `share` holds keyrings and tokens.
            beside = ("lib", "lib64") if below(os.path.realpath(over), home) else ("lib", "lib64", "libexec", "share")
            found += [os.path.join(over, name) for name in beside]
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        found += [part for part in outer.get(name, "").split(os.pathsep) if part.startswith("/")]
    return outermost(os.path.normpath(path) for path in found if os.path.lexists(path))


def program_folders(readable: Sequence[str]) -> list[str]:
    """Return program folders among an experiment's readable folders; they come last in the agent's PATH."""
    names = [folder.rstrip("/") for folder in readable]
    folders = [name if os.path.basename(name) == "bin" else f"{name}/bin" for name in names]
    return [folder for folder in folders if os.path.isdir(folder)]


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not inside another one. Links are kept, because inside nothing exists below them."""
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda path: path.count("/")):
        if not any(below(path, other) and not os.path.islink(other) for other in kept):
            kept.append(path)
    return kept


def devices() -> list[str]:
    """Return device nodes that programs need: harmless ones, and those of GPUs."""
    gpus = sorted(name for name in os.listdir("/dev") if name.startswith(GPU_DEVICES))
    return [path for path in (f"/dev/{name}" for name in (*DEVICES, *gpus)) if os.path.exists(path)]


def slurm_programs(outer: dict[str, str]) -> list[str]:
    """Return Slurm's programs on this machine."""
    folders = outer.get("PATH", os.defpath).split(os.pathsep)
    folders += ["/usr/bin", "/usr/sbin", "/opt/slurm/bin", "/usr/local/bin"]
    found = {os.path.realpath(os.path.join(folder, name)) for folder in folders for name in SLURM_COMMANDS}
    return sorted(path for path in found if os.path.isfile(path))


def carved(readable: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """Return `readable` without `hidden`, for levels that can only allow: a folder with hidden content becomes its other
    children."""
    found: list[str] = []
    left = list(readable)
    while left:
        path = left.pop()
        # A readable path inside a hidden folder was named on purpose; a hidden path itself was not.
        if path in hidden:
            continue
        if not any(below(each, path) for each in hidden):
            found.append(path)
            continue
        try:
            inner = [os.path.join(path, name) for name in os.listdir(path)]
        except OSError:
            continue
        left += [child for child in inner if not (os.path.islink(child) and _leads_to(child, hidden))]
    return sorted(found)


def _leads_to(link: str, hidden: Sequence[str]) -> bool:
    """Return whether it leads to something hidden or to a parent of it: Debian's /usr/bin/X11 is /usr/bin."""
    real = os.path.realpath(link)
    return any(below(real, each) or below(each, real) for each in hidden)


def inside_script() -> str:
    """Return the path of the script that runs first inside (inside.py)."""
    return str(Path(__file__).with_name("inside.py"))


# --- mounts of a plan, parents first, so that deeper ones win


class MountStep(NamedTuple):
    """One mount of `source` outside at `target` inside. An empty folder has no source; a link's source is its text."""

    kind: Literal["readable", "writable", "empty", "link"]
    source: str
    target: str


def steps(plan: SandboxPlan) -> list[MountStep]:
    """Return the mounts of a plan. /proc, /dev and the root itself are the level's own."""
    made = []
    for path in plan.readable:
        is_link = os.path.islink(path) and os.path.dirname(path) == "/"
        made.append(MountStep("link", os.readlink(path), path) if is_link else MountStep("readable", path, path))
    made += [MountStep("empty", "", path) for path in plan.hidden if os.path.isdir(path) and _shown(path, plan)]
    made += [MountStep("readable", "/dev/null", path) for path in plan.masked if _shown(path, plan)]
    made += [MountStep("writable", plan.workspace, plan.workspace), MountStep("writable", plan.tmp, "/tmp")]
    made += [MountStep("readable", source, target) for source, target in plan.placed]
    if plan.socket_folder is not None:
        made.append(MountStep("readable", plan.socket_folder, INSIDE))
        if plan.network is not Network.OPEN and os.path.isfile("/etc/hosts"):
            made.append(MountStep("readable", f"{plan.socket_folder}/{HOSTS_NAME}", "/etc/hosts"))
    made.append(MountStep("readable", inside_script(), f"{INSIDE}-inside.py"))
    order = {"readable": 0, "link": 0, "empty": 1, "writable": 2}
    return sorted(made, key=lambda step: (step.target.rstrip("/").count("/"), order[step.kind]))


def _shown(path: str, plan: SandboxPlan) -> bool:
    return any(below(path, each) for each in plan.readable)


# --- TCP ports that level `landlock` allows at any address: its rules name ports only, and training needs these

TORCH_PORTS = range(29500, 29564)  # default listening ports of torch's launchers


def handed_out() -> range:
    """Return the kernel's range of ephemeral ports, which NCCL and gloo use even for one process."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return range(int(first), int(last) + 1)
    except (OSError, ValueError):
        return range(32768, 61000)


# --- the first command inside


def inner_command(
    plan: SandboxPlan, command: Sequence[str], python: str, script: str = f"{INSIDE}-inside.py"
) -> list[str]:
    """Return `command` behind inside.py, run by `python`, which must exist inside. `script`: inside.py as seen there."""
    forwards = plan.network is not Network.OPEN and plan.socket_folder is not None
    ways = [(port, f"{INSIDE}/{name}") for port, name in plan.ways if forwards]
    return [python, "-I", script, json.dumps({"command": list(command), "guard": guard_job(), "ways": ways})]


# --- an agent definition's own variables, which begin inside

_CARRIED: Final = "AUTORL_CARRIED_"
_TAKE_UP: Final = f'for each in "${{!{_CARRIED}@}}"; do export "${{!each}}"; unset "$each"; done; unset each; exec "$@"'


def take_own(env: dict[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Remove an agent definition's variables from `env` and return them, except those that ours override. Programs that build the sandbox must
    not get them: LD_PRELOAD would load the agent's code."""
    return {name: env.pop(name) for name, value in own.items() if env.get(name) == value}


def carried(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under neutral names, until `with_carried` restores them; everybody sees command lines."""
    return {f"{_CARRIED}{number}": f"{name}={value}" for number, (name, value) in enumerate(own.items())}


def with_carried(command: Sequence[str]) -> list[str]:
    """Return `command` with the carried variables restored, so that only it sees them."""
    return ["bash", "-c", _TAKE_UP, "bash", *command]
