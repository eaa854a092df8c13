"""Sandboxes: plans, what each level makes of them, what a trial says, and agents of real supervisors inside them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from driver_server import DriverServer, Turn
from helpers import PATIENCE_S, SUBMITS_ONE, Cluster, free_listener, wait_for

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.experiment import SandboxSpec
from autorl_hpc.sandbox import sandbox_plan, seccomp
from autorl_hpc.sandbox import sandbox_plan as plans
from autorl_hpc.sandbox.levels import LEVELS, Apptainer, Level, level
from autorl_hpc.sandbox.prove import TrialFindings, choose, probe
from autorl_hpc.sandbox.sandbox_plan import (
    DRIVER_SOCKET_NAME,
    SOCKET_NAME,
    SandboxPlan,
    carved,
    devices,
    lay_way_out,
    slurm_programs,
    software,
)
from autorl_hpc.states import Fault, Network, SandboxLevel
from autorl_hpc.supervise.confine import Confinement

CONFINING = [SandboxLevel.BWRAP, SandboxLevel.NAMESPACES, SandboxLevel.LANDLOCK]


@pytest.fixture
def plan(tmp_path: Path) -> SandboxPlan:
    for name in ("vault", "store/m", "runs", "scratch/w/.tmp", "scratch/w/.home", "scratch/w/models", "socket"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("vault/items", "store/m/weights", "runs/run.json"):
        (tmp_path / name).write_text("x")
    lay_way_out(str(tmp_path / "socket"))
    workspace = tmp_path / "scratch" / "w"
    outer = dict(os.environ)
    return SandboxPlan(
        workspace=str(workspace),
        tmp=str(workspace / ".tmp"),
        readable=tuple(software([sys.prefix, sys.base_prefix], outer)),
        hidden=tuple(str(tmp_path / name) for name in ("vault", "store", "runs", "scratch")),
        placed=((str(tmp_path / "store" / "m"), str(workspace / "models")),),
        devices=tuple(devices()),
        masked=tuple(slurm_programs(outer)),
        socket_folder=str(tmp_path / "socket"),
        ways=_two_ways(),
    )


def _free_port() -> int:
    with free_listener() as listener:
        return int(listener.getsockname()[1])


def _two_ways() -> tuple[tuple[int, str], tuple[int, str]]:
    """At two ports: while one is held the other is drawn."""
    with free_listener() as listener:
        return (int(listener.getsockname()[1]), SOCKET_NAME), (_free_port(), DRIVER_SOCKET_NAME)


def environment(plan: SandboxPlan) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": f"{plan.workspace}/.home", "TMPDIR": plan.tmp}


WORKS: dict[SandboxLevel, tuple[str, ...]] = {}
"""What a level lacks on this host, found once."""


def usable(name: SandboxLevel, plan: SandboxPlan) -> Level:
    if name is SandboxLevel.LANDLOCK:
        Path(plan.workspace, "models").rmdir()
        Path(plan.workspace, "models").symlink_to(plan.placed[0][0])
    if name not in WORKS:
        WORKS[name] = probe(level(name), plan, environment(plan)).failures
    if WORKS[name]:
        needs.skip(str(name.value), f"level {name}: {WORKS[name][0]}")
    return level(name)


def inside(found: Level, plan: SandboxPlan, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        found.argv(plan, command),
        env=environment(plan),
        cwd=plan.workspace,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


# --- plans ---


def test_carving_leaves_the_other_children(tmp_path: Path) -> None:
    for name in ("a/x", "a/secret/deep", "b"):
        (tmp_path / name).mkdir(parents=True)
    secret = str(tmp_path / "a" / "secret")
    assert carved([str(tmp_path)], [secret]) == [str(tmp_path / "a" / "x"), str(tmp_path / "b")]
    assert carved([secret], [secret]) == []
    assert carved([f"{secret}/deep"], [secret]) == [f"{secret}/deep"], "named on purpose"


def test_a_link_to_what_holds_something_hidden_is_left_out(tmp_path: Path) -> None:
    """As Debian's /usr/bin/X11, which is /usr/bin."""
    for name in ("hidden", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "in").symlink_to(tmp_path / "hidden")
    (tmp_path / "harmless").symlink_to(tmp_path / "other")
    found = carved([str(tmp_path)], [str(tmp_path / "hidden")])
    assert found == [str(tmp_path / "harmless"), str(tmp_path / "other")]


def test_mounts_go_from_the_root_down_and_hide_what_lies_between(plan: SandboxPlan, tmp_path: Path) -> None:
    shown = SandboxPlan(**{**plan.__dict__, "readable": (str(tmp_path),)})
    steps = sandbox_plan.steps(shown)
    place = {step.target: number for number, step in enumerate(steps)}
    assert (
        place[str(tmp_path)]
        < place[str(tmp_path / "scratch")]
        < place[plan.workspace]
        < place[f"{plan.workspace}/models"]
    )
    assert {step.target for step in steps if step.kind == "empty"} == set(plan.hidden)
    assert [step.target for step in steps if step.kind == "writable"] == ["/tmp", plan.workspace]


@pytest.mark.parametrize("name", CONFINING)
def test_a_root_below_a_readable_folder_is_hidden_whole(
    name: SandboxLevel, plan: SandboxPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable(name, plan)
    root, experiment, workspace = _place(tmp_path / "opt" / "autorl", monkeypatch)
    monkeypatch.setattr(plans, "SYSTEM", (*plans.SYSTEM, str(tmp_path / "opt")))
    confined = _confinement(root, experiment, workspace, level=str(name))
    try:
        env = {"PATH": os.environ["PATH"], "HOME": f"{workspace}/.home", "TMPDIR": f"{workspace}/.tmp"}
        assert confined.choose(29562, env, 1).level is name
        if confined.placing == "linked":
            (workspace / "data").symlink_to(root.task_train("t"))
        script = (
            f"cat {root.path}/scratch/other/run/secret {root.path}/anchor.key; ls {root.path} {root.path}/scratch; true"
        )
        argv = confined.argv(["bash", "-c", script])
        said = subprocess.run(
            argv, env=env, cwd=workspace, check=False, capture_output=True, text=True, timeout=PATIENCE_S
        ).stdout
        assert "SECRET" not in said and "vault" not in said and "other" not in said, said
    finally:
        confined.close()


def test_what_a_spec_names_may_not_show_what_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, experiment, workspace = _place(tmp_path / "data" / "autorl", monkeypatch)
    (tmp_path / "software").mkdir()
    _confinement(root, experiment, workspace, readable=(str(tmp_path / "software"),)).close()
    for path in (tmp_path / "data", root.vault, root.vault / "t", root.path / "scratch" / "other"):
        with pytest.raises(AutorlError, match=r"sandbox\.readable"):
            _confinement(root, experiment, workspace, readable=(str(path),))


def _place(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Root, ExperimentDir, Path]:
    """A root with another experiment's workspace and a key in it, and an empty workspace of ours."""
    root, home = Root(path), path.parent / "home"
    workspace = path / "scratch" / "exp" / "run"
    for folder in (
        root.task_vault("t") / "report",
        root.task_train("t"),
        root.model("m"),
        root.runs / "exp" / "run",
        home,
    ):
        folder.mkdir(parents=True)
    for folder in (workspace / ".tmp", workspace / ".home", path / "scratch" / "other" / "run"):
        folder.mkdir(parents=True)
    (root.task_vault("t") / "report" / "items.jsonl").write_text("SECRET")
    (root.runs / "exp" / "run" / "run.json").write_text("SECRET")
    (path / "scratch" / "other" / "run" / "secret").write_text("SECRET")
    (path / "anchor.key").write_text("SECRET")
    monkeypatch.setenv("HOME", str(home))
    return root, ExperimentDir(root.runs / "exp"), workspace


def _confinement(
    root: Root, experiment: ExperimentDir, workspace: Path, drivers: Mapping[str, Any] | None = None, **fields: Any
) -> Confinement:
    science = SimpleNamespace(task="t", base_model="m", network=Network.NONE, evaluate_script=False)
    record: Any = SimpleNamespace(science=science, run_id="run")
    spec: Any = SimpleNamespace(judge=None, drivers=drivers or {}, sandbox=SandboxSpec(**fields))
    return Confinement(root, experiment, record, spec, workspace, None)


def test_the_key_files_of_all_drivers_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, experiment, workspace = _place(tmp_path / "root", monkeypatch)
    (tmp_path / "elsewhere.key").write_text("k")
    (tmp_path / "link.key").symlink_to(tmp_path / "elsewhere.key")
    api = {"kind": "api", "url": "https://h/v1", "model": "m"}
    drivers = {
        "a": DriverSpec.model_validate({**api, "key_file": str(tmp_path / "link.key")}),
        "b": DriverSpec.model_validate({**api, "key_variable": "K"}),
    }
    confinement = _confinement(root, experiment, workspace, drivers)
    try:
        assert os.path.realpath(tmp_path / "elsewhere.key") in confinement._plan.masked
    finally:
        confinement.close()


# --- levels ---


@pytest.mark.parametrize("name", CONFINING)
def test_what_a_level_stops(name: SandboxLevel, plan: SandboxPlan) -> None:
    found = probe(usable(name, plan), plan, environment(plan), secret=[f"{plan.hidden[0]}/items"], programs=plan.masked)
    assert not found.failures and found.start_s is not None
    rights = inside(level(name), plan, "grep", "CapEff", "/proc/self/status").stdout.split()
    assert rights == ["CapEff:", "0" * 16], "with root's rights it could mount"
    everywhere = [hole for hole in found.holes if hole.startswith(("the kernel's limits of a user", "locks (flock)"))]
    assert len(everywhere) == 2
    if name is not SandboxLevel.LANDLOCK:
        assert list(found.holes) == everywhere
    else:
        named = ("Unix sockets of other programs", "TCP leads out", "terminals of other programs")
        assert all(any(hole.startswith(words) for hole in found.holes) for words in named)
        assert not any("keyrings" in hole or "leases" in hole or "IPC" in hole for hole in found.holes)


@pytest.mark.parametrize("name", CONFINING)
def test_a_trial_sees_what_is_open(name: SandboxLevel, plan: SandboxPlan, tmp_path: Path) -> None:
    """Plans with a mistake in them: the trial must say so, or its silence would mean nothing."""
    usable(name, plan)
    if name is SandboxLevel.LANDLOCK:
        words, workspace = "can be written to", str(tmp_path / "scratch")
        change: dict[str, Any] = {"workspace": workspace, "placed": ((plan.workspace, plan.workspace),)}
    else:
        words, change = "can be listed", {"readable": (*plan.readable, f"{plan.hidden[0]}/")}
    broken = SandboxPlan(**{**plan.__dict__, **change})
    assert any(words in failure for failure in probe(level(name), broken, environment(plan)).failures)
    if name is not SandboxLevel.LANDLOCK:
        opened = SandboxPlan(**{**plan.__dict__, "network": Network.OPEN})
        assert any(
            hole.startswith("abstract Unix sockets") for hole in probe(level(name), opened, environment(plan)).holes
        )


HELD_BY_THE_KERNEL = """
import ctypes, fcntl, sys
libc, said = ctypes.CDLL(None, use_errno=True), []
for numbers in ((250, 0, -3, 0), (248, b"user", b"k", b"v", 1, -3), (249, b"user", b"k", None, 0)):
    words = [ctypes.c_long(n) if isinstance(n, int) else n for n in numbers]
    said.append(ctypes.get_errno() if libc.syscall(*words) < 0 else 0)
with open("own", "w") as file:
    fcntl.fcntl(file, fcntl.F_SETFD, 1)
    for command, value in ((fcntl.F_SETLEASE, fcntl.F_WRLCK), (1040, bytes(8))):  # F_SETDELEG
        try: fcntl.fcntl(file, command, value); said.append(0)
        except OSError as error: said.append(error.errno)
libc.shmat.restype = ctypes.c_long
print(said, libc.shmat(int(sys.argv[1]), None, 0) >= 0, libc.mq_open(sys.argv[2].encode(), 2) >= 0)
"""


@pytest.mark.parametrize("name", [*CONFINING, SandboxLevel.NONE])
@pytest.mark.parametrize("network", [Network.NONE, Network.OPEN])
def test_keyrings_leases_memory_and_queues_of_the_node_are_out_of_reach(
    name: SandboxLevel, network: Network, plan: SandboxPlan
) -> None:
    """Catches a key of the user's session that an agent uses or leaves for another run, and a lease that holds up the suite's own
    reads: also without a forwarder, and at level none. Other commands of fcntl stay. Numbers and names of memory and queues are
    guessed: two runs at level landlock could talk by them, and look into the user's programs."""
    opened = SandboxPlan(**{**plan.__dict__, "network": network})
    found = level(name) if name is SandboxLevel.NONE else usable(name, opened)
    libc = ctypes.CDLL(None, use_errno=True)
    segment, queue = libc.shmget(0, ctypes.c_size_t(64), 0o600), f"/autorl-{os.getpid()}".encode()
    made = libc.mq_open(queue, os.O_CREAT | os.O_RDWR, 0o600, None)
    try:
        assert segment >= 0 and made >= 0
        done = inside(found, opened, sys.executable, "-I", "-c", HELD_BY_THE_KERNEL, str(segment), queue.decode())
    finally:
        libc.shmctl(segment, 0, None)
        libc.mq_unlink(queue)
    reached = name is SandboxLevel.NONE
    assert done.stdout == f"[1, 1, 1, 1, 1] {reached} {reached}\n", done.stderr


@pytest.mark.parametrize("name", CONFINING)
def test_masked_programs_can_t_be_run(name: SandboxLevel, plan: SandboxPlan, tmp_path: Path) -> None:
    """As Slurm's commands: an agent that can submit jobs is out of its sandbox."""
    for program in ("sbatch", "harmless"):
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\necho it ran\n")
        path.chmod(0o755)
    folder = str(tmp_path / "bin")
    masked = SandboxPlan(**{**plan.__dict__, "readable": (*plan.readable, folder), "masked": (f"{folder}/sbatch",)})
    found = usable(name, masked)
    assert inside(found, masked, f"{folder}/harmless").stdout == "it ran\n"
    done = inside(found, masked, f"{folder}/sbatch")
    assert done.returncode != 0 and done.stdout == ""


@pytest.mark.parametrize("name", CONFINING)
def test_exit_codes_pass_nothing_survives_and_no_descriptor_leaks(name: SandboxLevel, plan: SandboxPlan) -> None:
    found = usable(name, plan)
    assert inside(found, plan, "bash", "-c", "exit 7").returncode == 7
    assert inside(found, plan, "no-such-program").returncode in (126, 127)
    assert inside(found, plan, "bash", "-c", "kill -9 $$").returncode in (137, -9)
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
    fds = json.loads(inside(found, plan, sys.executable, "-I", "-c", code).stdout)
    assert fds[:3] == [0, 1, 2] and len(fds) == 4, "a descriptor of ours leaks; the fourth is the listing's own"
    if name is not SandboxLevel.LANDLOCK:
        nap = f"sleep 3600.{os.getpid():07d}"  # nobody else's
        done = inside(found, plan, "bash", "-c", f"setsid {nap} > /dev/null 2>&1 & echo started")
        assert done.stdout == "started\n"

        def is_gone() -> bool:
            return subprocess.run(["pgrep", "-f", nap], check=False, capture_output=True).returncode == 1

        # bwrap ends before its first process inside, with which the kernel then ends all that is there.
        wait_for(is_gone, "the end of what was left inside")


@pytest.mark.parametrize("name", [SandboxLevel.BWRAP, SandboxLevel.NAMESPACES])
def test_the_terminal_that_the_suite_was_started_from_is_out_of_reach(name: SandboxLevel, plan: SandboxPlan) -> None:
    """Through it an agent could type commands into the shell of its user."""
    found = usable(name, plan)
    first = '[ "$(cut -d" " -f7 /proc/1/stat)" = 0 ] || exit 3'  # the first process inside has no terminal either
    tries = found.argv(plan, ("bash", "-c", f"{first}; : </dev/tty"))
    command = ["bash", "-c", ': </dev/tty && exec "$@"', "bash", *tries]
    pid, terminal = pty.fork()
    if pid == 0:  # its terminal is the one that pty made
        os.chdir(plan.workspace)
        os.execvpe(command[0], command, environment(plan))
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(terminal, 4096):
            said += part
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert code == 1 and b"/dev/tty" in said.splitlines()[-1], said


@pytest.mark.parametrize("name", CONFINING)
def test_each_way_leads_to_its_own_socket_and_nowhere_else(name: SandboxLevel, plan: SandboxPlan) -> None:
    found = usable(name, plan)
    ports = [port for port, _ in plan.ways]
    with contextlib.ExitStack() as stack:
        for port, socket_name in plan.ways:
            if name is SandboxLevel.LANDLOCK:  # no network of its own: bridge and gateway are at these very ports
                stack.enter_context(_says(socket.create_server(("127.0.0.1", port)), socket_name))
            else:
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(f"{plan.socket_folder}/{socket_name}")
                listener.listen()
                stack.enter_context(_says(listener, socket_name))
        other = free_listener()
        stack.enter_context(_says(other, "another service"))
        code = (
            "import socket, sys\n"
            "for port in sys.argv[1:]:\n"
            "    try: print(socket.create_connection(('127.0.0.1', int(port)), 60).recv(50).decode())\n"
            "    except OSError: print('nobody')\n"
        )
        done = inside(found, plan, sys.executable, "-I", "-c", code, *map(str, [*ports, other.getsockname()[1]]))
    assert done.stdout.splitlines() == [SOCKET_NAME, DRIVER_SOCKET_NAME, "nobody"], done.stderr


@contextlib.contextmanager
def _says(listener: socket.socket, word: str) -> Iterator[None]:
    """A server that says one word to everyone."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.sendall(word.encode())

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_the_filter_for_sockets_refuses_all_but_tcp(plan: SandboxPlan) -> None:
    found = usable(SandboxLevel.LANDLOCK, plan)
    code = (
        "import socket, json\n"
        "def tried(*a):\n"
        "    try: socket.socket(*a).close(); return True\n"
        "    except OSError as e: return e.errno\n"
        "print(json.dumps([tried(socket.AF_INET, socket.SOCK_STREAM), tried(socket.AF_INET6, socket.SOCK_STREAM, 6),"
        " tried(socket.AF_INET, socket.SOCK_DGRAM), tried(socket.AF_INET6, socket.SOCK_DGRAM), tried(socket.AF_INET, socket.SOCK_STREAM, 262),"
        " tried(socket.AF_INET, socket.SOCK_STREAM, 132), tried(40, socket.SOCK_STREAM), tried(socket.AF_UNIX, socket.SOCK_DGRAM)]))"
    )
    assert json.loads(inside(found, plan, sys.executable, "-I", "-c", code).stdout) == [True, True, 1, 1, 1, 1, 1, True]
    assert seccomp.socket_instructions("aarch64") != seccomp.socket_instructions("x86_64")
    with pytest.raises(OSError, match="no list of system calls"):
        seccomp.socket_instructions("riscv64")


# --- apptainer, by a stand-in that understands the options that are used ---

STAND_IN = r"""#!/usr/bin/env python3
import os, sys
argv, binds, env, net = sys.argv[1:], [], {}, True
assert argv[:2] == ["--silent", "exec"], argv
argv = argv[2:]
flags = {"--contain", "--pid", "--ipc", "--uts", "--no-home", "--no-privs", "--nv", "--net"}
values = {"--workdir", "--pwd", "--env", "--network", "--bind"}
pwd = work = None
while argv[0].startswith("--"):
    name = argv.pop(0)
    assert name in flags | values, name
    if name not in values:
        continue
    value = argv.pop(0)
    if name == "--bind": binds.append(value.split(":"))
    elif name == "--pwd": pwd = value
    elif name == "--workdir": work = value
    elif name == "--network": net = value != "none"
    elif name == "--env": env.update([value.split("=", 1)])
image, command = argv[0], argv[1:]
assert os.path.isfile(image), image
made = ["bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm"]
for path in ("/usr", "/etc", "/opt"): made += ["--ro-bind", path, path]
for path in ("/bin", "/lib", "/lib64", "/sbin"): made += ["--symlink", "usr" + path, path]
made += ["--bind", work, "/tmp"] + ([] if net else ["--unshare-net"])
for source, target, how in binds: made += ["--bind" if how == "rw" else "--ro-bind", source, target]
os.execvpe("bwrap", made + ["--chdir", pwd, "--"] + command, {**os.environ, **env})
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not shutil.which("bwrap"):
        needs.skip("apptainer", "the stand-in for apptainer is made of bwrap, which is not here")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(STAND_IN)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "image.sif").write_bytes(b"SIF")
    return tmp_path / "image.sif"


def test_apptainer_gets_the_plan(plan: SandboxPlan, stand_in: Path) -> None:
    if not shutil.which("python3", path="/usr/bin"):
        needs.skip("apptainer", "the stand-in's image is this machine's /usr, which has no python3")
    assert probe(Apptainer(), plan, environment(plan)).failures == ("the run's environment is no image",)
    of_image = SandboxPlan(**{**plan.__dict__, "image": str(stand_in)})
    found = probe(Apptainer(), of_image, environment(plan), secret=[f"{plan.hidden[0]}/items"])
    # The stand-in leaves /proc as it is, which apptainer does not.
    assert found.failures == () and set(found.holes[:-1]) <= {"root may change the node's settings in /proc/sys"}
    chosen = choose(SandboxSpec(), of_image, environment(plan), wanted=Network.NONE)
    assert chosen.level.name is SandboxLevel.APPTAINER
    with pytest.raises(OSError, match="colon or comma"):
        Apptainer().argv(SandboxPlan(**{**of_image.__dict__, "workspace": "/a:b"}), ["true"])


# --- the choice ---


def outcomes(*works: SandboxLevel) -> Any:
    def try_level(found: Level, plan: SandboxPlan, env: Any, **more: Any) -> TrialFindings:
        if found.name is SandboxLevel.NONE:
            return probe(found, plan, env)
        return TrialFindings(() if found.name in works else (f"{found.name} is broken here",))

    return try_level


@pytest.mark.parametrize(
    ("works", "spec", "level_", "network"),
    [
        ((SandboxLevel.BWRAP, SandboxLevel.LANDLOCK), {}, SandboxLevel.BWRAP, Network.NONE),
        ((SandboxLevel.LANDLOCK,), {}, SandboxLevel.LANDLOCK, Network.NONE),
        ((SandboxLevel.LANDLOCK,), {"network": "open"}, SandboxLevel.LANDLOCK, Network.OPEN),
        ((SandboxLevel.BWRAP, SandboxLevel.LANDLOCK), {"level": "landlock"}, SandboxLevel.LANDLOCK, Network.NONE),
        ((), {}, SandboxLevel.NONE, Network.OPEN),
        ((SandboxLevel.BWRAP,), {"level": "none"}, SandboxLevel.NONE, Network.OPEN),
    ],
)
def test_the_strongest_that_works_or_what_is_demanded(
    plan: SandboxPlan, works: Sequence[SandboxLevel], spec: dict[str, Any], level_: SandboxLevel, network: Network
) -> None:
    chosen = choose(SandboxSpec(**spec), plan, {}, wanted=Network.NONE, try_level=outcomes(*works))
    assert (chosen.record.level, chosen.record.network, chosen.plan.network) == (level_, network, network)
    assert set(chosen.record.refused) <= {str(found.name) for found in LEVELS}


@pytest.mark.parametrize("spec", [{"level": "bwrap"}, {"network": "none"}, {"level": "apptainer"}])
def test_what_is_demanded_and_not_to_be_had_is_the_clusters_fault(plan: SandboxPlan, spec: dict[str, Any]) -> None:
    with pytest.raises(AutorlError, match=r"can't be had on this node: .*is broken here") as caught:
        choose(SandboxSpec(**spec), plan, {}, wanted=Network.NONE, try_level=outcomes())
    assert caught.value.fault is Fault.CLUSTER and "autorl-hpc doctor" in str(caught.value.next_step)


def test_no_level_closes_the_network_at_none() -> None:
    with pytest.raises(ValueError, match="can't keep the network"):
        SandboxSpec(level="none", network=Network.NONE)


# --- agents ---

LOOKS = (
    "#!/usr/bin/env bash\ncd $WORKSPACE\n"
    "{ ls $WORKSPACE/../.. ; cat ../../../vault/*/report/items.jsonl; touch $MODEL_PATH/x; touch $DATA_PATH/x; ls /root /home; } > code/seen 2>&1\n"
    "echo $TMPDIR > code/tmp; echo private > /tmp/mine && echo yes >> code/tmp\n"
    'curl -s $GRADING_SERVER_URL/health > code/health || python3 -c \'import os,urllib.request as u; print(u.urlopen(os.environ["GRADING_SERVER_URL"]+"/health").read().decode())\' > code/health\n'
)


ASKS = r"""
python3 - <<'END' > code/asked
import json, os, urllib.error, urllib.request
def ask(url, key):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers), timeout=600) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return "nobody"
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
print(json.dumps([ask(url, key), ask(url, "another"), ask("DRIVER", "the-key"), ask("DRIVER", key)]))
END
cat KEYFILE /proc/*/environ > code/key 2>&1
"""


@pytest.mark.parametrize("name", [SandboxLevel.BWRAP, SandboxLevel.LANDLOCK])
def test_an_agent_works_inside_asks_its_driver_and_submits(
    cluster: Cluster, plan: SandboxPlan, name: SandboxLevel, tmp_path: Path
) -> None:
    usable(name, plan)
    (tmp_path / "key").write_text("the-key")
    (tmp_path / "key").chmod(0o600)
    with _free_server([Turn("hello")], "the-key") as server:
        asks = ASKS.replace("DRIVER", server.url).replace("KEYFILE", str(tmp_path / "key"))
        run_id = cluster.sealed_run(
            LOOKS + asks + SUBMITS_ONE.split("\n", 1)[1],
            agent={"driver": {"dialect": "openai-chat"}},
            matrix={"driver": "d"},
            drivers={"d": {"kind": "api", "url": server.url, "model": "m", "key_file": str(tmp_path / "key")}},
            sandbox={"level": str(name), "network": "driver"},
        )
        assert len(server.conversations) == 1
    view, workspace = cluster.view(run_id), cluster.workspace(run_id)
    (used,) = view.sandboxes
    assert (used.level, used.network, used.attempt) == (name, Network.DRIVER, 1)
    assert json.loads((workspace / "code" / "asked").read_text()) == [200, 401, "nobody", "nobody"]
    assert "the-key" not in (workspace / "code" / "key").read_bytes().decode(errors="replace")
    assert view.sealed is not None and view.sealed.driver is not None and view.sealed.driver.calls == 1
    assert [submission.status for submission in view.submissions.values()] == ["accepted"]
    seen = (workspace / "code" / "seen").read_text()
    assert ("question" not in seen and "Read-only file system" in seen) or "Permission denied" in seen
    assert json.loads((workspace / "code" / "health").read_text())["status"] == "ok"
    temporary = (workspace / "code" / "tmp").read_text().split()
    if name is SandboxLevel.LANDLOCK:  # short enough for the path of a socket
        assert temporary != ["/tmp"] and len(temporary) == 1 and len(temporary[0]) < 80
    else:
        assert temporary == ["/tmp", "yes"]
    assert not (cluster.root.model("autorl/tiny") / "x").exists() and not Path("/tmp/mine").exists()


def _free_server(turns: list[Turn], key: str) -> DriverServer:
    """At a port that the kernel gives to nobody who asks for any: those are open at level landlock."""
    while True:
        with contextlib.suppress(OSError):
            return DriverServer(turns, key=key, port=_free_port())


def test_a_demand_that_a_node_cannot_keep_ends_the_attempt_before_the_agent(cluster: Cluster) -> None:
    cluster.agent("one", "#!/usr/bin/env bash\ntouch $WORKSPACE/code/ran\n")
    (run_id,) = cluster.prepare(["one"], sandbox={"level": "apptainer"}, attempts=1)
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 75, cluster.logs()
    (ended,) = cluster.view(run_id).ended
    assert "sandbox level apptainer can't be had on this node" in ended.reason
    assert not (cluster.workspace(run_id) / "code" / "ran").exists()
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.fault is Fault.CLUSTER


def test_auto_means_the_level_that_the_first_attempt_proved(cluster: Cluster, plan: SandboxPlan) -> None:
    """The later runs of an experiment got another level when a package appeared on their node."""
    usable(SandboxLevel.BWRAP, plan)
    usable(SandboxLevel.NAMESPACES, plan)
    cluster.agent("one", "#!/usr/bin/env bash\ntrue\n")
    settings = {"sandbox": {"level": "auto"}, "attempts": 1, "matrix": {"seed": [0, 1, 2]}}
    first, second, third = cluster.prepare(["one"], **settings)

    def supervise(run_id: str, path: str) -> int:
        command = [sys.executable, "-m", "autorl_hpc", "job", "agent", str(cluster.experiment.path), run_id]
        process = subprocess.Popen(command, env={**cluster.env, "PATH": path}, cwd=cluster.root.path)
        cluster.processes.append(process)
        return process.wait(PATIENCE_S)

    broken = cluster.root.path / "broken"
    broken.mkdir()
    (broken / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (broken / "bwrap").chmod(0o755)
    levels = []
    for run_id, path in ((first, f"{broken}:{os.environ['PATH']}"), (second, os.environ["PATH"])):
        assert supervise(run_id, path) == 0, cluster.logs()
        (used,) = cluster.view(run_id).sandboxes
        levels.append(used.level)
    assert levels == [SandboxLevel.NAMESPACES, SandboxLevel.NAMESPACES]
    written = json.loads(cluster.experiment.sandbox.read_text())
    assert (written["level"], written["run_id"]) == ("namespaces", first)
    cluster.experiment.sandbox.chmod(0o644)
    cluster.experiment.sandbox.write_text(json.dumps({**written, "level": "bwrap"}))
    assert supervise(third, f"{broken}:{os.environ['PATH']}") == 75
    (ended,) = cluster.view(third).ended
    assert "The first attempt of this experiment ran at level bwrap" in ended.reason
    assert supervise(third, os.environ["PATH"]) == 0
    sealed = cluster.view(third).sealed
    assert sealed is not None and sealed.fault is Fault.CLUSTER


TORCH = """
class cuda:
    device_count = staticmethod(lambda: 0)
class version:
    cuda = hip = None
__version__ = "of-the-definition"
"""


def test_an_attempt_asks_the_torch_that_a_definition_leads_to(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch.py").write_text(TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    own = {"env": {"PYTHONPATH": str(tmp_path / "site")}}
    run_id = cluster.sealed_run("#!/usr/bin/env bash\ntrue\n", own, sandbox={"readable": [str(tmp_path / "site")]})
    events = cluster.run_dir(run_id).events.read_text().splitlines()
    (told,) = [event["why"] for event in map(json.loads, events) if event["event"] == "gpus_unseen"]
    assert told == "torch of-the-definition is built without CUDA: it sees none of 2 GPUs"


MANAGER = """
import multiprocessing, sys
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Manager() as manager:
        print(manager.dict(a=1)["a"])
"""


@pytest.mark.parametrize("name", [*CONFINING, SandboxLevel.NONE])
def test_sockets_work_however_long_the_paths_are(
    name: SandboxLevel, plan: SandboxPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a $TMPDIR of more than 107 bytes with a socket's name: it failed every attempt, and the agent's DataLoader and Manager
    at levels that can't mount."""
    usable(name, plan) if name is not SandboxLevel.NONE else None
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    root, experiment, workspace = _place(deep / "autorl", monkeypatch)
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    (workspace / "manager.py").write_text(MANAGER)
    confined = _confinement(root, experiment, workspace, level=str(name))
    try:
        env = {"PATH": os.environ["PATH"], "HOME": f"{workspace}/.home", "TMPDIR": f"{workspace}/.tmp"}
        assert confined.choose(29563, env, 1).level is name
        argv = confined.argv([sys.executable, "manager.py"])
        done = subprocess.run(
            argv, env=env, cwd=workspace, check=False, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.stdout == "1\n", done.stderr[-500:]
    finally:
        confined.close()
