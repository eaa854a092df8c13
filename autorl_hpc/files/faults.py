"""Which OSErrors are the file system's own, and not a statement about the file that was asked for."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CLUSTER_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.EROFS,
        errno.EREMOTEIO,
        errno.ENFILE,
        errno.EMFILE,
        errno.ENOMEM,
        errno.ETIMEDOUT,
        errno.EINTR,
    }
)
"""A full disk, a stale handle, no more descriptors: tried again, never charged to an agent."""


def is_cluster_error(error: OSError) -> bool:
    """Whether waiting may help."""
    return error.errno in CLUSTER_ERRNOS


PASSING_ERRNOS = frozenset({errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN})
"""Those that are often gone at the next try; a full disk is not."""

TRIES = 5
PAUSE_S = 0.05


def as_lost_answer(error: FileExistsError) -> OSError:
    """What EEXIST says of a name that nobody else has: Linux asked a second time by itself, after an answer was lost."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), error.filename)


def again(step: Callable[[], T]) -> T:
    """Does one step on a shared file system, over again while it fails in a way that often passes: five tries in a second.

    A step that changes something must bear to be done twice: an error may be a lost answer to what was done.

    Raises:
        OSError: it failed in another way, or to the last.
    """
    for attempt in range(TRIES - 1):
        try:
            return step()
        except OSError as error:
            if error.errno not in PASSING_ERRNOS:
                raise
            time.sleep(PAUSE_S * 2**attempt)
    return step()
