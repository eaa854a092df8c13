"""Start `python -m autorl_hpc ...`, or `python -c ...`, as a fork of a process that has the package, torch and transformers loaded. For tests only.

A grader needs seconds of CPU for its imports, each other command half a second or more, a fork of this server none. The child
is as if started cold: session, files, folder, environment, search path, arguments and what /proc shows of them are its own.
A test's unchanged copy of the package counts as the package: the paths that modules hold are those of the copy.
What differs: its parent is the server, which reaps it at once and tells its status.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEAVY = """numpy torch transformers safetensors.torch tokenizers transformers.models.auto.modeling_auto transformers.generation
transformers.models.llama.modeling_llama aiohttp jinja2 pydantic matplotlib.backends.backend_agg matplotlib.figure rich.console
matplotlib.backends.backend_svg rich.live scipy.special scipy.stats typer yaml zstandard"""
"""What children find imported, besides all of autorl_hpc."""

REPO = Path(__file__).resolve().parent.parent
PACKAGE = "autorl_hpc"

ROOM = 1 << 16
"""Bytes that the server's command line and environment hold for those of its children."""

NOT_IMPORTED = ("__main__", "vllm_extension", "vllm_worker", "program_child", "own_child")
"""Modules that are started as programs of their own, or need what is not here."""

AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH", "OMP_", "MKL_", "CUDA", "LD_", "PYTHON", "LANG", "LC_")
"""Variables that libraries or Python read once: a process for which they differ from the server's starts cold."""

_ENVIRON = dict(os.environ)
_SERVER: Any = None
_LOCK = threading.Lock()


class WarmProcess:
    """A forked process, with what tests use of subprocess.Popen."""

    def __init__(self, args: Sequence[str], pid: int, status: int) -> None:
        self.args, self.pid, self.returncode = list(args), pid, None
        self._status, self._reading = status, threading.Lock()
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except OSError:  # it has ended already, or an old kernel
            self._pidfd = None

    returncode: int | None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. If the server was killed before it could tell the status, the process counts as killed, too."""
        if self.returncode is None:
            self._await(self._status, timeout)
            with self._reading:
                if self.returncode is None:
                    told = os.read(self._status, 4)
                    if not told and self._pidfd is not None:
                        self._await(self._pidfd, timeout)
                    self.returncode = struct.unpack("i", told)[0] if told else -signal.SIGKILL
        return self.returncode

    def __del__(self) -> None:
        for each in filter(None, (self._status, self._pidfd)):
            os.close(each)

    def _await(self, descriptor: int, timeout: float | None) -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Server:
    """The client's side: one server, started when it is first needed."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "x" * ROOM],
                env={**_ENVIRON, "AUTORL_WARM_ROOM": "x" * ROOM},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, args: Sequence[str], env: Mapping[str, str], cwd: Path, out: Any, err: Any) -> WarmProcess:
        read, write = os.pipe()
        try:
            request = json.dumps({"args": list(args), "env": dict(env), "cwd": str(cwd)}).encode()
            rights = array.array("i", [out.fileno(), err.fileno(), write])
            self.ours.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            answer = self.ours.recv(64)
            if not answer:
                raise ConnectionResetError("the server of warm processes has ended")
            return WarmProcess([sys.executable, *args], int(answer), read)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)


def may_fork(args: Sequence[str], env: Mapping[str, str], code: Path | None) -> bool:
    """Tell whether a fork would be as a cold start: nothing that is read at import differs, no stand-in comes first.

    Args:
        code: a test's copy of the repository, from which the package is imported.
    """
    named = {name for name in {*env, *_ENVIRON} if name.startswith(AT_IMPORT) and name != "PYTHONPATH"}
    same = all(env.get(name) == _ENVIRON.get(name) for name in named - {"PYTHONDONTWRITEBYTECODE"})
    if not same or not (args[0] == "-c" or tuple(args[:2]) == ("-m", PACKAGE)):
        return False
    if code is not None and env.get("PYTHONPATH") == str(code):
        return _stamps(code) == _stamps(REPO)
    return env.get("PYTHONPATH") == _ENVIRON.get("PYTHONPATH")


def _stamps(repository: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file of a package's code; a copy keeps both."""
    stamps = {}
    for path in (repository / PACKAGE).rglob("*.py"):
        found = path.stat()
        stamps[str(path.relative_to(repository))] = (found.st_size, found.st_mtime_ns)
    return stamps


def start(args: Sequence[str], env: Mapping[str, str], cwd: Path, out: Any, err: Any) -> WarmProcess:
    """Fork `python ARGS`, which must be `-m autorl_hpc ...` or `-c SCRIPT ...`; its output goes to the open files `out` and `err`."""
    global _SERVER  # noqa: PLW0603 - one for each worker of pytest
    with _LOCK:
        for last in (False, True):
            if _SERVER is None or _SERVER.process.poll() is not None:
                _SERVER = Server()
            try:
                return _SERVER.fork(args, env, cwd, out, err)
            except OSError:  # it was killed, as agents of tests do
                _SERVER.process.kill()
                _SERVER.process.wait()
                if last:
                    raise
    raise AssertionError("unreachable")


def run(
    args: Sequence[str], env: Mapping[str, str], cwd: Path, limit_s: float, **ways: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` to its end, started by `begin`, which takes the `ways`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = begin(args, env, cwd, out, err, **ways)
        try:
            status = process.wait(limit_s)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(args, status, out.read().decode(), err.read().decode())


def begin(
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    out: Any,
    err: Any,
    *,
    cold: bool = False,
    code: Path | None = None,
) -> Any:
    """Start `python ARGS` in a session of its own: as a fork if `may_fork` and not `cold`."""
    if not cold and may_fork(args, env, code):
        return start(args, env, cwd, out, err)
    command = [sys.executable, *args]
    stdin = subprocess.DEVNULL
    return subprocess.Popen(
        command, env=dict(env), cwd=cwd, stdin=stdin, stdout=out, stderr=err, start_new_session=True
    )


def serve(ours: socket.socket) -> list[str]:
    """Fork a child for each request until the client ends; return in the child, with its arguments."""
    for name in HEAVY.split():
        importlib.import_module(name)
    for module in pkgutil.walk_packages([str(REPO / PACKAGE)], f"{PACKAGE}."):
        if not module.name.endswith(NOT_IMPORTED):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tell: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([ours, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            reap(tell)
        if ours not in ready:
            continue
        request, passed, _, _ = socket.recv_fds(ours, 4 * ROOM, 3)
        if not request:
            os._exit(0)
        told = json.loads(request)
        out, err, status = passed
        pid = os.fork()
        if pid == 0:
            become(told, (out, err), ours)
            return list(told["args"])
        tell[pid] = status
        os.close(out)
        os.close(err)


def reap(tell: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = tell.pop(ended[0])
            with contextlib.suppress(OSError):
                os.write(status, struct.pack("i", os.waitstatus_to_exitcode(ended[1])))
            os.close(status)


def become(told: Mapping[str, Any], files: tuple[int, int], ours: socket.socket) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    os.chdir(told["cwd"])
    os.environ.clear()
    show([sys.executable, *told["args"]], told["env"])
    os.environ.update(told["env"])
    time.tzset()
    ours.send(str(os.getpid()).encode())  # not before /proc shows what it is
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    sys.orig_argv[:] = [sys.executable, *told["args"]]
    sys.dont_write_bytecode = bool(told["env"].get("PYTHONDONTWRITEBYTECODE"))
    before = told["env"].get("PYTHONPATH", "")
    sys.path[:] = [told["cwd"], *filter(None, before.split(os.pathsep)), *sys.path[1:]]
    sys.path_importer_cache.clear()
    copy = Path(before.split(os.pathsep)[0])
    if before and (copy / PACKAGE).is_dir():
        move_package(REPO, copy)
    random.seed()
    sys.modules["numpy"].random.seed()


def move_package(old: Path, new: Path) -> None:
    """Let the loaded package say that it was imported from a copy."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE:
            for key, value in list(vars(module).items()):
                setattr(module, key, moved(value, old, new))
            if module.__spec__ is not None:
                module.__spec__.origin = moved(module.__spec__.origin, old, new)


def moved(value: Any, old: Path, new: Path) -> Any:
    """Return a path, or a list of paths, of one folder as one of another; anything else as it is."""
    if isinstance(value, list):
        return [moved(each, old, new) for each in value]
    if isinstance(value, (str, Path)) and Path(value).is_relative_to(old):
        return type(value)(new / Path(value).relative_to(old))
    return value


def show(args: Sequence[str], env: Mapping[str, str]) -> None:
    """Write the command line and the environment where /proc reads them."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    args_at, args_end, env_at, env_end = map(int, fields[45:49])
    for start, end, words in (
        (args_at, args_end, args),
        (env_at, env_end, [f"{name}={value}" for name, value in env.items()]),
    ):
        text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run_to_end(arguments: Sequence[str]) -> int:
    """Run `-m MODULE ...` or `-c SCRIPT ...` to the end of its threads and exit functions; return its status."""
    sys.argv[:] = [arguments[0], *arguments[2:]]
    status: Any = 0
    try:
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), vars(main))
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status or 0)


if __name__ == "__main__":
    os._exit(run_to_end(serve(socket.socket(fileno=int(sys.argv[1])))))  # to take all modules apart takes 0.2 s
