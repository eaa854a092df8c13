"""What runs first inside a sandbox: forwards a TCP port to the socket that leads out, then becomes the agent.

`python -I inside.py JSON` with `command` and, unless the network is open, `port` and `socket`. One file, standard library
only: nothing else of the suite is to be seen in there. The forwarder is a process of the agent's: it may be killed by it,
which costs the agent its bridge and nobody else anything.
"""

import json
import os
import socket
import sys
import threading

CHUNK_BYTES = 65536
BACKLOG = 128


def main() -> None:
    job = json.loads(sys.argv[1])
    if job.get("port"):
        listener = socket.create_server(("127.0.0.1", job["port"]), backlog=BACKLOG)
        # Twice: the command, which this process becomes, must not find a child that it doesn't know.
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)
            _forward(listener, job["socket"])
        os.waitpid(child, 0)
        listener.close()
    command = job["command"]
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


def _forward(listener: socket.socket, path: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            os._exit(0)
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
