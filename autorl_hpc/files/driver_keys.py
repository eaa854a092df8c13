"""The key of a driver: in a file that its owner alone may read. No error shows any of it."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.driver import DriverSpec

MAX_KEY_BYTES = 4096


def key_path(experiment: ExperimentDir, name: str, spec: DriverSpec) -> Path | None:
    """The file that holds the driver's key; None where it has none.

    An API's key that came in a variable lies in `drivers/<name>.key`, as that of a server of ours does: jobs of Slurm don't get
    the launching shell's variables, and any process of the user may read those of another.
    """
    if spec.key_file is not None:
        return Path(os.path.expanduser(spec.key_file))
    if spec.kind == "vllm" or spec.key_variable is not None:
        return experiment.driver_key(name)
    return None


def read_key(path: Path) -> str:
    """The key in `path`.

    Raises:
        AutorlError: the file can't be read, is open to others, or holds no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = os.fstat(fd)
            data = os.read(fd, MAX_KEY_BYTES + 1) if stat.S_ISREG(state.st_mode) else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise _no_key(
            f"the driver's key file can't be read: {error.strerror}", path, "put the key there, and chmod 600 it"
        ) from None
    if not stat.S_ISREG(state.st_mode):
        raise _no_key("the driver's key file is no file", path, "put the key into a plain file, and chmod 600 it")
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise _no_key("the driver's key file can be read by others, or is another's", path, f"chmod 600 {path}")
    return checked_key(data, path)


def checked_key(data: bytes, where: str | Path) -> str:
    """`data` as a key: one line of visible characters.

    Raises:
        AutorlError: it is none.
    """
    key = data.strip()
    if not key or len(key) > MAX_KEY_BYTES or any(not 33 <= byte <= 126 for byte in key):
        raise _no_key(
            "the driver's key is no single line of visible characters", where, "put the key there, and nothing else"
        )
    return key.decode("ascii")


def write_key(path: Path, key: str) -> None:
    """Writes the key for its owner alone."""
    atomic.write_bytes(path, key.encode() + b"\n", mode=0o600)


def new_key() -> str:
    """A random key for a server of ours."""
    return secrets.token_urlsafe(32)


def _no_key(what: str, where: str | Path, next_step: str) -> AutorlError:
    return AutorlError(what, where=where, next_step=next_step, exit_code=Exit.USAGE)
