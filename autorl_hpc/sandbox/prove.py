"""Proves on this node what a level stops, with the agent's actual plan; chooses the level of an attempt (`choose`).

Listeners, a process and other targets are set up outside; trial.py tries to reach them from inside. A level is used only if what must hold
holds (held-out data, ledgers, other runs hidden; base model and data read-only; network; GPUs); the rest is reported as holes."""

from __future__ import annotations

import json
import os
import pty
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.entries import SandboxUsed
from autorl_hpc.records.experiment import SandboxSpec
from autorl_hpc.sandbox.levels import LEVELS, Level
from autorl_hpc.sandbox.sandbox_plan import SHORT, SandboxPlan, below
from autorl_hpc.sandbox.seccomp import key_calls
from autorl_hpc.states import Fault, Network, SandboxLevel

TRIAL_S = 60.0  # CUDA may take many seconds to start on a node with eight GPUs
MUNGE = ("/run/munge/munge.socket.2", "/var/run/munge/munge.socket.2")
MAX_SAID = 300


@dataclass(frozen=True)
class TrialFindings:
    """What a trial found. `failures`: what must hold and does not, or why no trial was possible; none: the level can be used."""

    failures: tuple[str, ...]
    holes: tuple[str, ...] = ()  # what the level does not stop
    start_s: float | None = None  # start time of one program inside


@dataclass(frozen=True)
class Outside:
    """Targets outside that the trial tries to reach."""

    word: str
    tcp: int
    udp: socket.socket
    unix: str
    target: subprocess.Popen[bytes]
    clock: str
    terminal: str


def cuda_works() -> bool:
    """Return whether CUDA starts on this node. Tried in another process, because it can't be undone."""
    if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):
        return False
    code = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    command = [sys.executable, "-I", "-c", code]
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=TRIAL_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def probe(
    level: Level, plan: SandboxPlan, env: Mapping[str, str], *, secret: Sequence[str] = (), programs: Sequence[str] = ()
) -> TrialFindings:
    """Try a level. `env`: the agent's environment; `secret`: files that must not be readable; `programs`: Slurm's
    programs, which should not run."""
    why = level.why_not(plan)
    if why is not None:
        return TrialFindings((why,))
    if level.name is SandboxLevel.NONE:
        return TrialFindings((), level.known_holes(plan))

    def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        argv, null = level.argv(plan, command), subprocess.DEVNULL
        return subprocess.run(
            argv, check=False, env=dict(env), cwd=plan.workspace, stdin=null, capture_output=True, timeout=TRIAL_S
        )

    inside = level.name is not SandboxLevel.LANDLOCK
    placed = [target if inside else source for source, target in plan.placed]
    python = "python3" if level.name is SandboxLevel.APPTAINER else sys.executable
    script = Path(__file__).with_name("trial.py").read_text(encoding="utf-8")
    with _waiting_outside() as outside, _echoes(plan):
        job = {
            "hidden": [path for path in plan.hidden if os.path.isdir(path)],
            "secret": list(secret),
            "read_only": [*placed, sys.prefix],
            "placed": placed,
            "workspace": plan.workspace,
            "tcp": outside.tcp,
            "udp": outside.udp.getsockname()[1],
            "word": outside.word,
            "sockets": [outside.unix, *(path for path in MUNGE if os.path.exists(path))],
            "pid": outside.target.pid,
            "backwards": outside.clock[::-1],
            "terminal": outside.terminal,
            "key_calls": key_calls(),
            "ipc": os.readlink("/proc/self/ns/ipc"),
            "settings": ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/dirty_writeback_centisecs"],
            "programs": list(programs),
            "cuda": cuda_works(),
            "ways": [port for port, _ in _ways(plan)] if inside else [],
        }
        try:
            done = run([python, "-I", "-c", script, json.dumps(job)])
            value = json.loads(done.stdout) if done.returncode == 0 else None
            if not isinstance(value, dict):
                said = done.stderr.decode("utf-8", "replace").strip().splitlines()
                raise OSError(f"exit code {done.returncode}" + (f": {said[-1]}" if said else ""))
            started = time.monotonic()
            run(["true"])
            start_s = time.monotonic() - started
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return TrialFindings((str(error)[:MAX_SAID] or type(error).__name__,))
        holes = (*_holes(value, outside), *level.known_holes(plan))
        return TrialFindings(tuple(_failures(value, plan, outside)), holes, start_s)


def _failures(value: dict[str, Any], plan: SandboxPlan, outside: Outside) -> Iterator[str]:
    placed = [plan.workspace, plan.tmp, *plan.readable, *(path for pair in plan.placed for path in pair)]
    for path, names in value["listed"].items():
        for name in names:
            if not any(below(each, os.path.join(path, name)) for each in placed):  # it leads to nothing that is shown
                yield f"{path} can be listed: {name}"
                break
    yield from (f"{path} can be read" for path, how in value["read"].items() if how is True)
    yield from (f"{path} can be written to" for path, how in value["written"].items() if how is True)
    yield from (f"{path} can't be read: {how}" for path, how in value["placed"].items() if how is not True)
    for name in ("workspace", "tmp", "shm"):
        if value[name] is not True:
            yield f"the agent's {name} can't be written to: {value[name]}"
    if value["cuda"] not in (None, True):
        yield f"CUDA does not start inside: {value['cuda']}"
    yield from (f"the way out at port {p} does not work: {how}" for p, how in value["ways"].items() if how is not True)
    if plan.network is not Network.OPEN:
        if value["tcp"] is True:
            yield "TCP leads out"
        outside.udp.settimeout(0.2)
        with suppress(OSError):
            if outside.word.encode() in outside.udp.recv(256):
                yield "UDP leads out"


def _holes(value: dict[str, Any], outside: Outside) -> tuple[str, ...]:
    sockets: dict[str, Any] = value["sockets"]
    found = {
        "other processes can be seen": value["seen"] is True,
        "the environment of the user's other processes can be read": value["environ"] is True,
        "the user's other processes can be ended": outside.target.poll() is not None,
        "root may change the node's settings in /proc/sys": any(how is True for how in value["settings"].values()),
        "shared memory is shared with the node": bool(value["shared_shm"]),
        "abstract Unix sockets of other programs can be reached": value["abstract"] is True,
        "Unix sockets of other programs can be reached (tmux, ssh-agent)": sockets.get(outside.unix) is True,
        "terminals of other programs can be read and written (/dev/pts)": value["terminal"] is True,
        "kernel keyrings are shared with other processes": value["keys"] is True,
        "leases can hold up whoever opens a file": value["lease"] is True,
        "System V IPC is shared with the node": value["ipc"] is True,
        "the kernel's limits of a user (inotify, pipes, queues) are shared with the user's other programs": True,
        "locks (flock) on files that several runs read are shared": value["lock"] is True,
        "munge can be asked, so jobs can be submitted": any(sockets.get(path) is True for path in MUNGE),
        "Slurm's programs can be run": any(value["programs"].values()),
    }
    return tuple(hole for hole, there in found.items() if there)


@contextmanager
def _waiting_outside() -> Iterator[Outside]:
    word = f"autorl-trial-{secrets.token_hex(8)}"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="autorl-", dir=SHORT))
        tcp = stack.enter_context(socket.socket())
        for port in random.sample(range(20000, 29000), 50):  # level landlock leaves the ephemeral ones open
            with suppress(OSError):
                tcp.bind(("127.0.0.1", port))
                break
        else:
            raise OSError("no free port for a trial")
        tcp.listen()
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        for address in (f"\0{word}", f"{folder}/s"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        clock = f"600.{secrets.randbelow(10**12):012d}"
        target = subprocess.Popen(["sleep", clock], env={"WORD": word}, stdin=subprocess.DEVNULL)
        stack.callback(target.wait)
        stack.callback(target.kill)
        with suppress(OSError):
            shm = Path("/dev/shm") / word
            shm.touch(mode=0o600)
            stack.callback(shm.unlink)
        ends = pty.openpty()
        for end in ends:
            stack.callback(os.close, end)
        yield Outside(word, tcp.getsockname()[1], udp, f"{folder}/s", target, clock, os.ttyname(ends[1]))


def _ways(plan: SandboxPlan) -> tuple[tuple[int, str], ...]:
    return () if plan.network is Network.OPEN or plan.socket_folder is None else plan.ways


@contextmanager
def _echoes(plan: SandboxPlan) -> Iterator[None]:
    """Substitute bridge and gateway at the plan's sockets during the trial, unless they are running."""

    def echo(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    client.sendall(client.recv(5))

    with ExitStack() as stack:
        for _, name in _ways(plan):
            path = Path(plan.socket_folder or "") / name
            if not path.exists():
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(path))
                listener.listen()
                threading.Thread(target=echo, args=(listener,), name="trial", daemon=True).start()
                stack.callback(path.unlink, missing_ok=True)
                stack.callback(listener.shutdown, socket.SHUT_RDWR)
        yield


# --- choice of the level: the one demanded, else the strongest that works

AUTO = "auto"


@dataclass(frozen=True)
class ChosenLevel:
    """The level that an agent runs in."""

    level: Level
    plan: SandboxPlan
    record: SandboxUsed


def choose(
    spec: SandboxSpec,
    plan: SandboxPlan,
    env: Mapping[str, str],
    *,
    wanted: Network,
    secret: Sequence[str] = (),
    programs: Sequence[str] = (),
    try_level: Callable[..., TrialFindings] = probe,
) -> ChosenLevel:
    """Choose the sandbox for `plan`. Raises AutorlError: what is demanded is not possible on this node. `spec`: what the
    experiment demands; `wanted`: the network if the spec names none; enforced if the level can, open at level none."""
    network = spec.network or wanted
    refused: dict[str, str] = {}
    for level in LEVELS:
        if spec.level not in (AUTO, level.name) or (
            plan.image is not None and level.name is not SandboxLevel.APPTAINER
        ):
            continue
        open_anyway = level.name is SandboxLevel.NONE and spec.network is None
        candidate = replace(plan, network=Network.OPEN if open_anyway else network)
        found = try_level(level, candidate, env, secret=secret, programs=programs)
        if not found.failures:
            told = {"holes": found.holes, "start_s": found.start_s, "refused": refused}
            return ChosenLevel(level, candidate, SandboxUsed(level=level.name, network=candidate.network, **told))
        refused[level.name] = "; ".join(found.failures)[:500]
    level_or_network = f"sandbox level {spec.level}" if spec.level != AUTO else f"network {network}"
    demanded = "an image" if plan.image else level_or_network
    what = f"{demanded} can't be had on this node: " + "; ".join(f"{name}: {why}" for name, why in refused.items())
    advice = "see what this node can do: autorl-hpc doctor; or demand less in the experiment's `sandbox`"
    raise AutorlError(what, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT, passes=True)
