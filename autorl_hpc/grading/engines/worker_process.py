"""Worker processes of an engine: start, listen, end with all children; and which Python and environment they use.

One thread starts a worker and listens to it, and must live as long: PR_SET_PDEATHSIG ends the worker when the thread that
started it ends. That thread passes the worker's frames to a handler.
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
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

from autorl_hpc.cluster.vllm_program import INSTALL, PROGRAM_VARIABLE, python_beside
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.processes import descendants, stat_fields
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.grading.engines import framing
from autorl_hpc.grading.engines.framing import Frame
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.rollouts.engine import EngineFailed
from autorl_hpc.states import Fault

log = logging.getLogger("autorl_hpc.grader")

START_LIMIT_S = 900.0
"""Limit until a new worker is ready: slow imports from a shared file system, compiling kernels, recording graphs."""

SILENCE_LIMIT_S = 300.0
"""A busy worker sends a sign of life every second, an idle one every five; one step may have to compile a kernel."""

TICK_S = 1.0  # Silence is counted in ticks of this length, so that the time of a suspended job does not count

END_WAIT_S = 10.0
EXIT_WAIT_S = 10.0  # An ending process closes its socket first; on a busy node its exit status comes later
LAST_WORDS_S = 60.0  # A send may fail before the thread knows how the worker ended and has killed its children

KILL_WAIT_S = 30.0
LOG_TAIL_BYTES = 16 * 1024
MAX_PROBLEM_CHARS = 500

MODULE = "autorl_hpc.grading.engines.vllm_worker"


class Replica:
    """A worker process. Two arguments are appended to `command`: the socket's descriptor and this process's id."""

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
        """Start a worker with its first frame; `log` is the file for its output. Both handlers are called in the replica's thread:
        `heard` with each frame except signs of life, and `ended` once if the worker ends unexpectedly, when all its children are gone."""
        self.log = log
        self.pid: int | None = None
        self._command, self._env, self._first = [*command], dict(env), dict(first)
        self._heard, self._ended = heard, ended
        self._start_limit_s, self._silence_limit_s = start_limit_s, silence_limit_s
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
        self._children: dict[int, int] = {}  # start times, because a process id may be reused
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, head: Mapping[str, Any], block: bytes = b"") -> None:
        """Send a frame. Raises EngineFailed: the worker is gone."""
        try:
            with self._sending:
                framing.send(self._sock, dict(head), block)
        except OSError as error:
            if threading.current_thread() is not self._thread:
                self._told.wait(LAST_WORDS_S)
            raise self._problem or EngineFailed(f"the engine's worker is gone: {error}") from error

    def close(self) -> None:
        """End the worker and all its children and wait until they are gone."""
        self._note_children()  # after the worker's end, children in other sessions can't be found
        self._closing.set()
        if self._sending.acquire(timeout=1.0):  # a worker that hangs may not read the frame
            with suppress(OSError):
                self._sock.settimeout(1.0)
                framing.send(self._sock, {"op": "end"})
                self._asked_to_end = True
            self._sending.release()
        if self._asked_to_end:
            self._thread.join(END_WAIT_S + 2 * TICK_S)
        if self._thread.is_alive():
            self._hang_up()  # the thread may wait for the rest of a frame
            self._thread.join(END_WAIT_S + KILL_WAIT_S + 5.0)

    def _run(self) -> None:
        doing = "the engine's worker could not be started"
        with ExitStack() as after:  # runs in reverse order, even if one of them raises
            after.callback(self._tell_end)
            after.callback(self._close_socket)
            after.callback(self._end)
            try:
                self._start()
                doing = "what the engine's worker says can't be taken in"
                self._why = self._listen()
            except BaseException as error:  # whoever waits for the worker must learn of any error
                self._why = f"{doing}: {type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]

    def _tell_end(self) -> None:
        if not self._closing.is_set():
            # Its last words: the last line of this start's output that says something, usually its error.
            text = reading.tail(self.log, LOG_TAIL_BYTES, self._log_from) or ""
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            words = ([line for line in lines if "Error" in line] or lines or [""])[-1][-300:]
            told = f"{self._why}{f'; its last words: {words}' if words else ''}"
            log.warning("%s (what it printed: %s)", told, self.log)  # agents must not see the path
            self._problem = EngineFailed(told)
        self._told.set()  # first, because `ended` may wait for a failed send
        if self._problem is not None:
            self._ended(self._problem)

    def _close_socket(self) -> None:
        self._hang_up()
        with self._sending:
            self._sock.close()

    def _start(self) -> None:
        with self._theirs as theirs, open(self.log, "ab") as output:
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

        def introduce() -> None:  # in a thread: it may exceed the socket buffer, and the time limits must still count
            with suppress(OSError), self._sending:  # where the worker is gone, the listener reports how
                framing.send(self._sock, self._first)

        threading.Thread(target=introduce, name="engine-start", daemon=True).start()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> str:
        silent_s, limit_s, closing_s = 0.0, self._start_limit_s, 0.0
        while True:
            begun = time.monotonic()
            ready = bool(select.select([self._sock], [], [], TICK_S)[0])
            passed_s = min(time.monotonic() - begun, 2 * TICK_S)
            if self._closing.is_set():
                closing_s += passed_s
                if closing_s > END_WAIT_S:
                    return "it did not end when asked to"
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
                with suppress(subprocess.TimeoutExpired, AttributeError):
                    code = self._process.wait(EXIT_WAIT_S)  # type: ignore[union-attr]
                    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with {code}"
                    return f"the engine's worker ended {how}"
                return "the engine's worker ended"
            silent_s = 0.0
            if "broken" in frame.head:
                return f"the engine broke: {frame.head['broken']}"
            if "ready" in frame.head:
                limit_s = self._silence_limit_s
                self._note_children()
            if "beat" not in frame.head and not self._closing.is_set():
                self._heard(frame)

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if self._asked_to_end:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_WAIT_S)
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline:
            self._note_children()
            left = [pid for pid, began in self._children.items() if _started(pid) == began]
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if process.poll() is not None and not left:
                break
            time.sleep(0.02)

    def _note_children(self) -> None:
        for pid in [*self._children, *([self.pid] if self.pid is not None else [])]:
            found = {child: _started(child) for child in descendants(pid)}
            self._children.update({child: began for child, began in found.items() if began is not None})


def _started(pid: int) -> int | None:
    """Return a process's start time in clock ticks; None if it is gone, or a zombie."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != b"Z" else None


# --- the worker's log, Python and environment


def log_beside_ours() -> Path:
    """Return `<the grader's log>.vllm-<pid>.log` if stderr is a file; otherwise a file in a private folder."""
    ours = Path("/proc/self/fd/2").resolve()
    if ours.is_file():
        return ours.with_name(f"{ours.stem}.vllm-{os.getpid()}.log")
    return Path(tempfile.mkdtemp(prefix="autorl-engine-", dir=os.environ.get("TMPDIR"))) / "vllm.log"


CACHE_VARIABLE = "AUTORL_ENGINE_CACHE"
"""Variable with a folder for compiled kernels, instead of the one in the user's cache."""

HOME = Path(__file__).resolve().parents[3]  # The folder that this package is imported from

PACKAGE = __name__.partition(".")[0]

_RANKS = """
VLLM_PORT VLLM_DP_MASTER_PORT MASTER_PORT MASTER_ADDR RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK NODE_RANK
VLLM_CONFIG_ROOT VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_API_KEY VLLM_LOGGING_CONFIG_PATH VLLM_ENABLE_V1_MULTIPROCESSING
PYTHONSTARTUP PYTHONINSPECT
"""
NOT_PASSED_ON = frozenset(_RANKS.split())
"""Ports and ranks of the grader's launcher, on which engines of one node would collide. Without them vLLM takes free ports."""

FIXED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",  # none, because plugins run code in every process of vLLM
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in the worker, which is a process already
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # otherwise its kernels are compiled at the first start: 131 s on an H100
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Defaults for vLLM's CPU build: cache in GiB, and threads placed by the kernel."""

COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Variable for the number of compiling processes at a first start; by default one per core and worker."""

MOST_THREADS = 4
"""Thread limit of a GPU worker: only converting weights to another dtype uses several; the rest is one thread."""

CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Folders for compiled code, which runs at the next start. Some libraries use predictable names in /tmp by default."""


def name_program(profile: ClusterProfile | None) -> None:
    """Use the vLLM program of the cluster's profile in this process, unless the variable is set."""
    if profile is not None and profile.vllm:
        os.environ.setdefault(PROGRAM_VARIABLE, profile.vllm)


def interpreter() -> str:
    """Return the Python for the engine: beside `$AUTORL_VLLM`, else this one if it has vLLM, else beside `vllm` on PATH.

    If the named program has no Python beside it (it may be a script), this Python is used if it has vLLM. AutorlError if none.
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
        f"there is no Python beside {program}"
        if program
        else "no Python with vLLM is here, as `grader.engine: vllm` needs",
        where=socket.gethostname(),
        fault=Fault.CLUSTER,
        next_step=INSTALL,
        exit_code=Exit.ENVIRONMENT,
    )


def environment(outer: Mapping[str, str], devices: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return a worker's environment: no secrets, offline, our code first, its own caches, these GPUs, and so many threads for vLLM's
    CPU build (0 keeps its default)."""
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


@cache
def code_folder() -> Path:
    """Return a folder that holds only this package. Our parent may be a whole site-packages, whose numpy or torch would shadow
    those of the worker's Python."""
    folder = Path(tempfile.mkdtemp(prefix="autorl-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / PACKAGE).symlink_to(HOME / PACKAGE, target_is_directory=True)
    return folder


def beside_gpus(outer: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return thread limits of a GPU worker with this many cores; the grader's own OMP_NUM_THREADS does not apply to it."""
    compilers = {} if COMPILERS in outer else {COMPILERS: str(max(1, cores))}
    return {"OMP_NUM_THREADS": str(max(1, min(MOST_THREADS, cores))), **compilers}


def cache_folder(outer: Mapping[str, str]) -> Path:
    """Return a cache folder that only this user can enter; a lasting one if there is a home directory."""
    home = outer.get("XDG_CACHE_HOME") or (f"{outer['HOME']}/.cache" if outer.get("HOME") else "")
    for folder in (outer.get(CACHE_VARIABLE), f"{home}/autorl-hpc/engines" if home else None):
        if folder:
            path = Path(folder)
            with suppress(OSError):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
                if path.stat().st_uid == os.getuid() and os.access(path, os.W_OK):
                    path.chmod(0o700)
                    return path
    return Path(tempfile.mkdtemp(prefix="autorl-engine-"))
