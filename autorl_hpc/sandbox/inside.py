"""First program inside a sandbox: forwards TCP ports to Unix sockets that lead out, then executes the agent.

`python -I inside.py JSON` with `command` and `ways`, pairs of port and socket. One file with the standard library only, because
nothing else of the suite is visible inside. The forwarder's command line is a neutral word, so that no `pkill -f python` or `-f
TASK` of the agent finds it; if it dies, its parent tells the bridge and starts it again.
"""

import ctypes
import json
import os
import socket
import sys
import threading
import time

CHUNK_BYTES = 65536
BACKLOG = 128
PAUSE_S = 0.2  # before the forwarder is started again
PR_SET_NAME = 15


def main() -> None:
    job = json.loads(sys.argv[1])
    listeners = [(socket.create_server(("127.0.0.1", port), backlog=BACKLOG), path) for port, path in job["ways"]]
    if listeners:
        # Fork twice: this process becomes the command, which must not have an unknown child.
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)
            _keep_forwarding(listeners)
        os.waitpid(child, 0)
        for listener, _ in listeners:
            listener.close()
    command = job["command"]
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


def _keep_forwarding(listeners: "list[tuple[socket.socket, str]]") -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _rename(b"relay")
    while True:
        forwarder = os.fork()
        if forwarder == 0:
            _forward(listeners)
        os.waitpid(forwarder, 0)
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
