"""In a Python process that has this folder on its path: the wall clock is $CLOCK_AHEAD_S ahead, the monotonic one is not.

Not libfaketime: it doesn't know the waits of Python 3.11 (sem_clockwait), so that a wait of a second takes 90.
"""

import datetime
import os
import time

AHEAD_S = float(os.environ.get("CLOCK_AHEAD_S", "0"))
true_time, true_time_ns, TrueDatetime = time.time, time.time_ns, datetime.datetime


class _Kind(type):
    """Lets what the C code makes pass for a datetime too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, TrueDatetime)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, TrueDatetime)


class Ahead(TrueDatetime, metaclass=_Kind):
    """datetime with its three ways to ask for the time."""

    @classmethod
    def now(cls, tz: "datetime.tzinfo | None" = None) -> TrueDatetime:  # type: ignore[override]
        return TrueDatetime.now(tz) + datetime.timedelta(seconds=AHEAD_S)

    @classmethod
    def utcnow(cls) -> TrueDatetime:  # type: ignore[override]
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)

    @classmethod
    def today(cls) -> TrueDatetime:  # type: ignore[override]
        return cls.now()


if AHEAD_S:
    time.time = lambda: true_time() + AHEAD_S
    time.time_ns = lambda: true_time_ns() + int(AHEAD_S * 1e9)
    datetime.datetime = Ahead  # type: ignore[misc]
