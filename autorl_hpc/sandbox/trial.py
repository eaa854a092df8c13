"""Trial inside a sandbox that finds out what it stops: `python -I -c SOURCE JSON`, JSON out, standard library only. Every attempt is
real; the caller (prove.py) checks whether anything arrived."""

import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable

TIMEOUT_S = 1.0
ANSWER_S = 20.0  # for a way out that must work, on a node that may be busy

LEAST_PID = 64  # a sandbox with process numbers of its own has lower ones


def tried(action: Callable[[], object]) -> "bool | str":
    """Return True if it worked, otherwise the name of the error."""
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return True


def each(paths: Iterable[str], action: Callable[[str], object]) -> "dict[str, bool | str]":
    return {path: tried(lambda path=path: action(path)) for path in paths}  # type: ignore[misc]


def write(path: str) -> None:
    with open(os.path.join(path, ".autorl-trial"), "w") as file:
        file.write("x")
    os.unlink(os.path.join(path, ".autorl-trial"))


def find(path: str, word: bytes = b"") -> None:
    with open(path, "rb") as file:
        data = file.read() if word else file.read(1)
    if not data or word not in data:
        raise OSError("empty, or another process")


def names(path: str) -> "list[str]":
    try:
        return os.listdir(path)
    except OSError:
        return []


def udp(port: int, word: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.sendto(word.encode(), ("127.0.0.1", port))


def unix(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as out:
        out.settimeout(TIMEOUT_S)
        out.connect(path)


def answered(port: int) -> None:
    """Check that a way out answers: the supervisor's bridge, the gateway, or a substitute."""
    with socket.create_connection(("127.0.0.1", port), ANSWER_S) as there:
        there.settimeout(ANSWER_S)
        there.sendall(b"trial\r\n\r\n")
        if not there.recv(1):
            raise OSError("no answer")


def lease(path: str) -> None:
    with open(os.path.join(path, ".autorl-trial"), "w") as file:
        os.unlink(file.name)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def ipc(outside: str) -> None:
    """Make and remove a segment of memory where they are the node's."""
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, ctypes.c_size_t(1), 0o600) if os.readlink("/proc/self/ns/ipc") == outside else -1
    if segment < 0:
        raise OSError("refused, or not the node's")
    libc.shmctl(segment, 0, None)


def keys(calls: "list[int]") -> None:
    """Use the session's keyring by each of the calls (keyctl, add_key, request_key)."""
    keyctl, add, request = calls
    libc, session = ctypes.CDLL(None), -3
    for given in (
        (keyctl, 0, session, 0),
        (add, b"user", b"autorl", b"x", 1, session),
        (request, b"user", b"autorl", None, 0),
    ):
        if libc.syscall(*[ctypes.c_long(each) if isinstance(each, int) else each for each in given]) >= 0:
            return
    raise OSError("refused")


def cuda() -> None:
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    if code:
        raise OSError(code)


def main() -> None:
    job = json.loads(sys.argv[1])
    pid, word = job["pid"], job["word"]
    clock = job["backwards"][::-1].encode()  # reversed, because it is in this process's own command line
    lines = [f"/proc/{name}/cmdline" for name in names("/proc") if name.isdigit()]
    out = {
        "listed": {path: names(path) for path in job["hidden"]},
        "read": each(job["secret"], find),
        "written": each(job["read_only"], write),
        "workspace": tried(lambda: write(job["workspace"])),
        "tmp": tried(lambda: write(os.environ.get("TMPDIR", "/tmp"))),
        "shm": tried(lambda: write("/dev/shm")),
        "placed": each(job["placed"], os.listdir),
        "tcp": tried(lambda: socket.create_connection(("127.0.0.1", job["tcp"]), TIMEOUT_S).close()),
        "udp": tried(lambda: udp(job["udp"], word)),
        "abstract": tried(lambda: unix("\0" + word)),
        "sockets": each(job["sockets"], unix),
        "lease": tried(lambda: lease(job["workspace"])),
        "ipc": tried(lambda: ipc(job["ipc"])),
        "lock": tried(lambda: fcntl.flock(os.open(job["read_only"][-1], os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)),
        "keys": tried(lambda: keys(job["key_calls"])) if job["key_calls"] else True,
        "terminal": tried(lambda: os.close(os.open(job["terminal"], os.O_RDWR | os.O_NOCTTY))),
        "environ": tried(lambda: find(f"/proc/{pid}/environ", word.encode())),
        "settings": each(job["settings"], lambda path: os.close(os.open(path, os.O_WRONLY))),
        "shared_shm": os.path.exists("/dev/shm/" + word),
        "seen": True in each(lines, lambda path: find(path, clock)).values(),
        "programs": {path: os.access(path, os.X_OK) for path in job["programs"]},
        "cuda": tried(cuda) if job["cuda"] else None,
        "signal": tried(lambda: os.kill(pid, signal.SIGTERM)) if pid > LEAST_PID else "untried",
        "ways": {str(port): tried(lambda port=port: answered(port)) for port in job["ways"]},  # type: ignore[misc]
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
