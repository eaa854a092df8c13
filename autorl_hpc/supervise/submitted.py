"""A folder that an agent submitted, seen by descriptor: names are looked up relative to it, no link is followed, no FIFO
can block, and what was opened stays the file that was looked at."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import MAX_JSON_BYTES, parse_json
from autorl_hpc.files.faults import is_cluster_error
from autorl_hpc.supervise.basemodel import BaseModel

MAX_FILES = 2000
"""A checkpoint has tens of files; a trainer's output folder hundreds."""

OPTIMIZER_BYTES_PER_VALUE = 16
"""Training state beside the weights (Adam in fp32, master weights) is at most this large; a larger file is a trap."""

SLACK_BYTES = 1 << 30
HEADER_BYTES, HEADER_BYTES_PER_TENSOR = 1 << 20, 4096
"""A header has about 150 bytes a tensor; parsing one takes many times its size in memory, so it is bounded by the base's."""


def max_header_bytes(base: BaseModel) -> int:
    """The longest header that a checkpoint of this base, or an adapter for it, may have."""
    return HEADER_BYTES + HEADER_BYTES_PER_TENSOR * len(base.shapes)


@dataclass(frozen=True)
class Submitted:
    """The folder behind `fd`. What is opened is closed by `stack`.

    Attributes:
        sizes: size in bytes of each regular file.
        folders: names of the folders in it, for people.
    """

    fd: int
    stack: ExitStack
    sizes: dict[str, int]
    folders: list[str]

    @classmethod
    def survey(cls, fd: int, base: BaseModel, stack: ExitStack) -> Submitted:
        """Looks at every name.

        Raises:
            Refused: one is neither a file of its own nor a folder, a file is too large, or there are too many.
            OSError: the file system failed.
        """
        limit = base.elements * OPTIMIZER_BYTES_PER_VALUE + SLACK_BYTES
        sizes: dict[str, int] = {}
        folders: list[str] = []
        with os.scandir(fd) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_FILES:
                    raise Refused(
                        "too_many_files",
                        f"the folder holds more than {MAX_FILES} files",
                        "submit a folder with the checkpoint alone",
                    )
                shown = entry.name.encode("utf-8", "backslashreplace").decode()[:120]
                try:
                    info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    raise Refused(
                        "artifact_changed",
                        f"{shown} was removed while it was looked at",
                        "submit after the save has ended",
                    ) from None
                if stat.S_ISDIR(info.st_mode):
                    folders.append(shown + "/")
                    continue
                _refuse_kind(shown, info, limit)
                sizes[entry.name] = info.st_size
        return cls(fd, stack, sizes, folders)

    def open_regular(self, name: str) -> int:
        """A descriptor of the file `name`.

        Raises:
            Refused: it can't be opened, or is no file of its own any more.
            OSError: the file system failed.
        """
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            if is_cluster_error(error):
                raise
            raise Refused(
                "unreadable", f"{name[:120]}: {error.strerror}", "make the file readable and submit again"
            ) from None
        self.stack.callback(os.close, fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            raise Refused(
                "special_file",
                f"{name[:120]} was exchanged while it was read",
                "submit a folder that nothing writes to",
            )
        return fd

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in the file `name`.

        Raises:
            Refused: it is too large, not JSON, or no object.
            OSError: the file system failed.
        """
        again = "save the checkpoint again with save_pretrained"
        if self.sizes.get(name, 0) > MAX_JSON_BYTES:
            raise Refused("not_json", f"{name}: {self.sizes[name]} bytes are too many", again)
        fd, data = self.open_regular(name), b""
        while len(data) <= MAX_JSON_BYTES and (part := os.read(fd, 1 << 20)):
            data += part
        value = parse_json(data, name)
        if not isinstance(value, dict):
            raise Refused("not_json", f"{name}: holds no JSON object", again)
        return value


def _refuse_kind(shown: str, info: os.stat_result, limit: int) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise Refused("symlink", f"{shown} is a symbolic link", "put real files into the folder: `cp -rL src dst`")
    if not stat.S_ISREG(info.st_mode):
        raise Refused(
            "special_file", f"{shown} is no regular file (FIFO, socket or device)", "remove it from the folder"
        )
    if info.st_nlink > 1:
        raise Refused(
            "hard_link", f"{shown} is a hard link ({info.st_nlink} names)", "copy the file: `cp --reflink=auto src dst`"
        )
    if info.st_size > limit:
        raise Refused(
            "file_too_large",
            f"{shown} has {info.st_size} bytes; nothing of this model needs more than {limit}",
            "remove it from the folder",
        )
