"""Which OSErrors are faults of the file system and not of the requested file, and `again`, which retries them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PASSING_ERRNOS = frozenset({errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN})
"""Errors that are often gone at the next try; a full disk is not."""

CLUSTER_ERRNOS = PASSING_ERRNOS | {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENFILE, errno.EMFILE, errno.ENOMEM}
"""These and a full disk, no free descriptors and the like: retried, never charged to an agent."""

TRIES = 5
PAUSE_S = 0.05


def is_cluster_error(error: OSError) -> bool:
    """Return whether waiting may help."""
    return error.errno in CLUSTER_ERRNOS


def as_lost_answer(error: FileExistsError) -> OSError:
    """Return the error that EEXIST stands for if nobody else uses the name: Linux repeated the request after a lost answer."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), error.filename)


def again(step: Callable[[], T]) -> T:
    """Run one step, with up to five tries in a second for errors that often pass. It must be safe to repeat, because an error may
    be a lost answer to a completed step. Raises OSError: it failed with another error, or at the last try."""
    for attempt in range(TRIES - 1):
        try:
            return step()
        except OSError as error:
            if error.errno not in PASSING_ERRNOS:
                raise
            time.sleep(PAUSE_S * 2**attempt)
    return step()
