"""A shell behind a Unix socket in the workspace. `terminal.py` serves it until it exits; `terminal.py attach WORKSPACE` shows it.

What the shell prints also goes to standard output, which is recorded as any agent's. Several may attach; each sees everything.
Ctrl-] lets go and leaves the shell as it is. Standard library only.
"""

import fcntl
import os
import pty
import select
import socket
import struct
import sys
import termios
import tty

NAME = ".terminal"
KEPT_BYTES = 64 * 1024
"""Of what was printed, for one who attaches later."""

DETACH = b"\x1d"
DATA, SIZE = b"d", b"s"
HEAD = struct.Struct(">cI")


def serve():
    """Runs the shell; its exit code."""
    listener = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    new = f"{NAME}.{os.getpid()}"
    listener.bind(new)  # relative: an absolute path may be longer than a socket's may be
    os.umask(old)
    listener.listen()
    os.rename(new, NAME)
    print("a shell waits for you: autorl-hpc attach, with this run's folder", flush=True)
    child, master = pty.fork()
    if child == 0:
        os.environ.setdefault("TERM", "xterm-256color")
        os.execvp("bash", ["bash", "--norc", "-i"])
    kept, clients = b"", {}
    while True:
        for ready in select.select([listener, master, *clients], [], [])[0]:
            if ready is listener:
                client, _ = listener.accept()
                clients[client] = b""
                _send(clients, client, kept)
            elif ready is master:
                try:
                    said = os.read(master, 65536)
                except OSError:  # so Linux says that the last process of the terminal is gone
                    said = b""
                if not said:
                    os.unlink(NAME)
                    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                kept = (kept + said)[-KEPT_BYTES:]
                sys.stdout.buffer.write(said)
                sys.stdout.buffer.flush()
                for client in list(clients):
                    _send(clients, client, said)
            elif ready in clients:
                _hear(clients, ready, master)


def _send(clients, client, data):
    try:
        client.sendall(data)
    except OSError:
        clients.pop(client, None)


def _hear(clients, client, master):
    try:
        data = client.recv(65536)
    except OSError:
        data = b""
    if not data:
        clients.pop(client, None)
        client.close()
        return
    data = clients[client] + data
    while len(data) >= HEAD.size:
        kind, length = HEAD.unpack_from(data)
        if len(data) < HEAD.size + length:
            break
        body, data = data[HEAD.size : HEAD.size + length], data[HEAD.size + length :]
        if kind == SIZE:
            fcntl.ioctl(master, termios.TIOCSWINSZ, body)
        else:
            os.write(master, body)
    clients[client] = data


def attach(workspace):
    """Shows the shell on this terminal until it exits or Ctrl-] is typed.

    Raises:
        OSError: there is none on this node.
    """
    os.chdir(workspace)
    server = socket.socket(socket.AF_UNIX)
    server.connect(NAME)
    terminal = os.isatty(0)
    before = termios.tcgetattr(0) if terminal else None
    try:
        if terminal:
            tty.setraw(0, termios.TCSADRAIN)  # what was typed meanwhile is kept
            size = fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8)
            server.sendall(HEAD.pack(SIZE, len(size)) + size)
        inputs = [server, 0]
        while True:
            for ready in select.select(inputs, [], [])[0]:
                if ready is server:
                    said = server.recv(65536)
                    if not said:
                        return
                    os.write(1, said)
                    continue
                typed = os.read(0, 65536)
                if not typed:
                    inputs.remove(0)
                elif terminal and DETACH in typed:
                    return
                else:
                    server.sendall(HEAD.pack(DATA, len(typed)) + typed)
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


if __name__ == "__main__":
    if sys.argv[1:2] == ["attach"]:
        attach(sys.argv[2])
    else:
        sys.exit(serve())
