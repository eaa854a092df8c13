"""First program inside a sandbox: closes kernel keyrings and file leases, forwards TCP ports to Unix sockets that lead out, then executes
the agent. `python -I inside.py JSON` with `command`, `guard` (seccomp.guard_job) and `ways`, pairs of port and socket; standard library
only. The forwarder has a neutral name, so that no `pkill -f` of the agent finds it; if it dies, its parent tells the bridge and starts it
again. The parent is the sandbox's first process where there are process namespaces of our making: no signal from inside ends that one."""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time

CHUNK_BYTES = 65536
BACKLOG = 128
PAUSE_S = 0.2  # before the forwarder is started again
TELL_S = 2.0
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
JOIN_SESSION_KEYRING = 1


def main() -> None:
    job = json.loads(sys.argv[1])
    guard(job["guard"])
    listeners = [(socket.create_server(("127.0.0.1", port), backlog=BACKLOG), path) for port, path in job["ways"]]
    if os.getpid() == 1:
        child = os.fork()
        if child:
            _keep(listeners, child)
        os.setsid()
    elif listeners:
        # Fork twice: this process becomes the command, which must not have an unknown child.
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)
            _keep(listeners)
        os.waitpid(child, 0)
    for listener, _ in listeners:
        listener.close()
    command = job["command"]
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


def guard(given: "dict | None") -> None:  # type: ignore[type-arg]
    """Give this process and its children a session keyring of their own, and filter their system calls."""
    if given is not None:
        libc = ctypes.CDLL(None)
        libc.syscall(ctypes.c_long(given["keyctl"]), ctypes.c_long(JOIN_SESSION_KEYRING), None)
        steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in given["steps"]))
        program = struct.pack("HP", len(given["steps"]), ctypes.addressof(steps))
        if libc.prctl(PR_SET_SECCOMP, FILTER, program) != 0:  # only root may, while a setuid program could gain rights
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            libc.prctl(PR_SET_SECCOMP, FILTER, program)


def _keep(listeners: "list[tuple[socket.socket, str]]", agent: int = 0) -> None:
    """Keep a forwarder running, and collect orphans. Exit as the agent does, if it is a child; then the kernel ends all inside."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the kernel keeps from a first process, as all others
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if agent else 0, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _rename(b"relay")
    forwarder = 0
    while True:
        if listeners and not forwarder:
            try:
                forwarder = os.fork()
            except OSError:  # the agent has used up the processes
                time.sleep(PAUSE_S)
            else:
                if forwarder == 0:
                    _forward(listeners)
        pid, status = os.waitpid(-1, 0 if forwarder or not listeners else os.WNOHANG)
        if agent and pid == agent:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if forwarder and pid == forwarder:
            forwarder = 0
            _tell(listeners[0][1])
            time.sleep(PAUSE_S)


def _rename(name: bytes) -> None:
    """Overwrite this process's name and command line in memory; see proc(5), arg_start."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    if 0 < start < end - len(name):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name, len(name))


def _tell(bridge: str) -> None:
    """Tell the bridge that the forwarder died. Its token is in the agent's environment: an agent may tell this too."""
    token = os.environ.get("GRADING_SERVER_URL", "").rpartition("/")[2]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as out:
            out.settimeout(TELL_S)
            out.connect(bridge)
            out.sendall(b"POST /%s/forwarder_died HTTP/1.0\r\n\r\n" % token.encode())
            out.recv(CHUNK_BYTES)
    except OSError:
        pass


def _forward(listeners: "list[tuple[socket.socket, str]]") -> None:
    for listener, path in listeners[1:]:
        threading.Thread(target=_accept, args=(listener, path), daemon=True).start()
    _accept(*listeners[0])
    os._exit(0)


def _accept(listener: socket.socket, path: str) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        try:
            out = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            out.connect(path)
        except OSError:
            client.close()
            continue
        for one, other in ((client, out), (out, client)):
            threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while True:
            data = source.recv(CHUNK_BYTES)
            if not data:
                break
            target.sendall(data)
    except OSError:
        pass
    for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        try:
            end.shutdown(how)
        except OSError:
            pass


if __name__ == "__main__":
    main()
