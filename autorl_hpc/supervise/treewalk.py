"""The regular files of a folder that belongs to an agent, by descriptor. No link is followed, nothing else is opened."""

from __future__ import annotations

import os
import stat
from collections import deque
from dataclasses import dataclass, field

from autorl_hpc.files.below import DIR_FLAGS, open_below
from autorl_hpc.supervise.plaintext import Limit, Meter

MAX_FILES = 100_000
MAX_FOLDERS = 50_000
MAX_DEPTH = 64
TICK_ENTRIES = 256
MAX_NAME_BYTES = 32 << 20
"""Of names and links' targets in one walk."""

Identity = tuple[int, int, int, int]
"""Device, inode, size, ctime: only root can give a changed file its old ctime."""


@dataclass(frozen=True)
class Found:
    """A regular file as the listing showed it."""

    parts: tuple[str, ...]
    identity: Identity

    @property
    def size(self) -> int:
        return self.identity[2]


@dataclass
class Listing:
    """What a walk met; `whole` is False if it was cut short, or a folder could not be read.

    Attributes:
        names: of folders and whatever lies in them, and what links say: an agent can write there too.
    """

    files: list[Found]
    whole: bool = True
    names: list[bytes] = field(default_factory=list)
    _name_bytes: int = 0

    def add_name(self, name: bytes) -> None:
        """Keeps a name."""
        self._name_bytes += len(name) + 1
        if self._name_bytes > MAX_NAME_BYTES:
            self.whole = False
        else:
            self.names.append(name)


def identity_of(status: os.stat_result) -> Identity:
    """What tells one content from another."""
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def list_files(root_fd: int, meter: Meter) -> Listing:
    """The regular files below an open folder, those near the top first; what lies on another device is left out.

    Raises:
        Limit: the look is over.
    """
    listing, device = Listing([]), os.fstat(root_fd).st_dev
    folders: deque[tuple[str, ...]] = deque([()])
    met = entries_seen = 0
    while folders:
        parts = folders.popleft()
        try:
            fd = open_below(root_fd, parts, DIR_FLAGS)
        except FileNotFoundError:
            continue
        except OSError:
            listing.whole = False
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    entries_seen += 1
                    if entries_seen % TICK_ENTRIES == 0:
                        meter.tick()
                    try:
                        status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # removed under our eyes: that must not hide its neighbours
                    here = (*parts, entry.name)
                    listing.add_name(os.fsencode(entry.name))
                    if stat.S_ISLNK(status.st_mode):
                        try:
                            listing.add_name(os.fsencode(os.readlink(entry.name, dir_fd=fd)))
                        except OSError:
                            pass  # no link any more
                    if status.st_dev != device:
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        met += 1
                        if met > MAX_FOLDERS or len(here) > MAX_DEPTH:
                            listing.whole = False
                        else:
                            folders.append(here)
                    elif stat.S_ISREG(status.st_mode):
                        if len(listing.files) >= MAX_FILES:
                            listing.whole = False
                            return listing
                        listing.files.append(Found(here, identity_of(status)))
        except Limit:
            raise
        except OSError:
            listing.whole = False
        finally:
            os.close(fd)
    return listing
