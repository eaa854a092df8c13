"""One worker process of an engine: started, heard, and ended with all its children.

A thread starts the process and listens to it for as long as it lives: PR_SET_PDEATHSIG, by which the worker ends with the daemon,
means the thread that started it. Everything that the worker says goes to a handler in that thread.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autorl_hpc.cluster.vllm_program import INSTALL, PROGRAM_VARIABLE, python_beside
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.processes import descendants
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.grading.engines import framing
from autorl_hpc.grading.engines.framing import Frame
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.rollouts.engine import EngineFailed
from autorl_hpc.states import Fault

log = logging.getLogger("autorl_hpc.grader")

START_LIMIT_S = 900.0
"""Until a new worker is ready: libraries cold from a busy shared file system, kernels compiled, graphs recorded."""

SILENCE_LIMIT_S = 300.0
"""A worker that works says so every second, one that is idle every five; a single step may have to compile a kernel."""

TICK_S = 1.0
"""Silence is counted in ticks of this length: a job that was suspended and goes on has not been silent all the while."""

END_WAIT_S = 10.0
EXIT_WAIT_S = 10.0
"""A process that ends closes its socket first; on a busy node it takes a while until how it ended can be told."""

LAST_WORDS_S = 60.0
"""A frame may fail to go out before the thread has found out how the worker ended, and has ended its children."""

KILL_WAIT_S = 30.0
LOG_TAIL_BYTES = 16 * 1024
MAX_PROBLEM_CHARS = 500
MAX_LOG_BYTES = 64 * 1024 * 1024
"""Of a worker's output; what is older is dropped at its next start."""

MODULE = "autorl_hpc.grading.engines.vllm_worker"


class Replica:
    """A worker process. `command` precedes the two arguments that a worker takes: its descriptor, and this process's id."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        first: Mapping[str, Any],
        heard: Callable[[Frame], None],
        ended: Callable[[EngineFailed], None],
        *,
        start_limit_s: float = START_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """
        Args:
            log: gets what it prints.
            first: the frame that it starts by.
            heard: called with each frame but signs of life, by the replica's thread.
            ended: called once by the replica's thread where the worker ends unasked, with all its children gone.
        """
        self.log = log
        self.pid: int | None = None
        self._command = [*command]
        self._env = dict(env)
        self._first = dict(first)
        self._heard = heard
        self._ended = ended
        self._start_limit_s = start_limit_s
        self._silence_limit_s = silence_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._why = ""
        self._sock, self._theirs = socket.socketpair()
        self._sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", max(1, int(silence_limit_s)), 0)
        )
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._told = threading.Event()
        self._asked_to_end = False
        self._log_from = 0
        self._problem: EngineFailed | None = None
        self._children: dict[int, int] = {}  # when each started: after its end its number may be another's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, head: Mapping[str, Any], block: bytes = b"") -> None:
        """Hands a frame over.

        Raises:
            EngineFailed: the worker is gone.
        """
        try:
            with self._sending:
                framing.send(self._sock, dict(head), block)
        except OSError as error:
            if threading.current_thread() is not self._thread:
                self._told.wait(LAST_WORDS_S)
            raise self._problem or EngineFailed(f"the engine's worker is gone: {error}") from error

    def close(self) -> None:
        """Ends it and all its children, and waits until they are gone."""
        self._note_children()  # once the worker has ended, those in sessions of their own are nobody's
        self._closing.set()
        try:
            # A worker that hangs may not take the frame.
            if self._sending.acquire(timeout=1.0):
                try:
                    self._sock.settimeout(1.0)
                    framing.send(self._sock, {"op": "end"})
                    self._asked_to_end = True
                finally:
                    self._sending.release()
        except OSError:
            pass
        if self._asked_to_end:
            self._thread.join(END_WAIT_S + 2 * TICK_S)
        if self._thread.is_alive():
            self._hang_up()  # it may wait for the rest of a frame
            self._thread.join(END_WAIT_S + KILL_WAIT_S + 5.0)

    def last_words(self) -> str:
        """The last line that this start printed and that says something, most often its error."""
        lines = [line.strip() for line in self.tail().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1][-300:]

    def tail(self) -> str:
        """The end of what this start printed."""
        try:
            with open(self.log, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._log_from, size - LOG_TAIL_BYTES))
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def _run(self) -> None:
        doing = "the engine's worker could not be started"
        with ExitStack() as after:  # from the last to the first, whatever one of them raises
            after.callback(self._tell_end)
            after.callback(self._close_socket)
            after.callback(self._end)
            try:
                self._start()
                doing = "what the engine's worker says can't be taken in"
                self._why = self._listen()
            except BaseException as error:  # whatever it is: who waits for the worker has to be told
                self._why = f"{doing}: {type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]

    def _tell_end(self) -> None:
        if self._closing.is_set():
            self._told.set()
            return
        words = self.last_words()
        told = f"{self._why}{f'; its last words: {words}' if words else ''}"
        log.warning("%s (what it printed: %s)", told, self.log)  # the path is nothing for an agent's eyes
        self._problem = problem = EngineFailed(told)
        self._told.set()  # first: whoever is told may wait for one whose frame did not go out
        self._ended(problem)

    def _close_socket(self) -> None:
        self._hang_up()
        with self._sending:
            self._sock.close()

    def _start(self) -> None:
        with self._theirs as theirs:
            fresh = not self.log.exists() or self.log.stat().st_size > MAX_LOG_BYTES
            with open(self.log, "wb" if fresh else "ab") as output:
                os.chmod(self.log, 0o600)
                self._log_from = output.tell()
                self._process = subprocess.Popen(
                    [*self._command, str(theirs.fileno()), str(os.getpid())],
                    env=self._env,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        self.pid = self._process.pid
        threading.Thread(target=self._introduce, name="engine-start", daemon=True).start()

    def _introduce(self) -> None:
        """Sends the first frame, which may be larger than the socket takes at once: the limits must count meanwhile."""
        try:
            with self._sending:
                framing.send(self._sock, self._first)
        except OSError:
            return  # the worker is gone: it is heard how

    def _hang_up(self) -> None:
        """Ends both directions; whoever waits for the socket, in whatever thread, is woken."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _listen(self) -> str:
        """Passes frames on until the worker ends; says why it did."""
        silent_s, limit_s = 0.0, self._start_limit_s
        closing_s = 0.0
        while True:
            begun = time.monotonic()
            ready = bool(select.select([self._sock], [], [], TICK_S)[0])
            passed_s = min(time.monotonic() - begun, 2 * TICK_S)
            if self._closing.is_set():
                closing_s += passed_s
                if closing_s > END_WAIT_S:
                    return "it did not end when it was told to"
            if not ready:
                silent_s += passed_s
                if silent_s > limit_s:
                    return f"the engine's worker gave no sign of life for {limit_s:.0f} s"
                continue
            try:
                frame = framing.receive(self._sock)
            except BlockingIOError:
                return f"the engine's worker stopped in the middle of a frame for {self._silence_limit_s:.0f} s"
            if frame is None:
                return f"the engine's worker ended{_how(self._process)}"
            silent_s = 0.0
            if "broken" in frame.head:
                return f"the engine broke: {frame.head['broken']}"
            if "ready" in frame.head:
                limit_s = self._silence_limit_s
                self._note_children()
            if "beat" not in frame.head and not self._closing.is_set():
                self._heard(frame)

    def _end(self) -> None:
        """Kills the process, its group, and what it started in groups of their own."""
        process = self._process
        if process is None:
            return
        if self._asked_to_end:
            try:
                process.wait(END_WAIT_S)
            except subprocess.TimeoutExpired:
                pass
        self._note_children()
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline:
            for pid in [*self._children]:
                self._note_children(pid)
            left = _kill_group(process.pid) | _kill_each(dict(self._children))
            if process.poll() is not None and not left:
                break
            time.sleep(0.02)

    def _note_children(self, of: int | None = None) -> None:
        pid = self.pid if of is None else of
        found = {} if pid is None else {child: _started(child) for child in descendants(pid)}
        self._children.update({child: began for child, began in found.items() if began is not None})


def log_beside_ours(environ: Mapping[str, str] = os.environ) -> Path:
    """`<the grader's log>.vllm-<pid>.log`, where our own messages go to a file; else a file in a private folder."""
    try:
        ours = Path(os.readlink("/proc/self/fd/2"))
        if ours.is_absolute() and ours.is_file():
            return ours.with_name(f"{ours.stem}.vllm-{os.getpid()}.log")
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="autorl-engine-", dir=environ.get("TMPDIR"))) / "vllm.log"


def _how(process: subprocess.Popen[bytes] | None) -> str:
    if process is None:
        return ""
    try:
        code = process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        return ""
    return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with {code}"


def _kill_group(group: int) -> bool:
    """Sends KILL to a process group; whether any of it is more than a zombie that its new parent has not collected."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return any(
        _stat(int(name), 4) == str(group) and _stat(int(name), 2) != "Z"
        for name in os.listdir("/proc")
        if name.isdigit()
    )


def _kill_each(started: Mapping[int, int]) -> bool:
    """Sends KILL to processes, if they are those that were noted; whether any lives."""
    left = False
    for pid, began in started.items():
        if _started(pid) == began and _stat(pid, 2) != "Z":
            left = True
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    return left


def _started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if it is gone."""
    value = _stat(pid, 21)
    return None if value is None else int(value)


def _stat(pid: int, field: int) -> str | None:
    """A field of /proc/PID/stat, counted from 0; from the third on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[field - 2].decode()
    except (OSError, IndexError):
        return None


# Which Python has vLLM, and the environment that an engine's worker starts in.

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
