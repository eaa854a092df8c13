"""What may end a grader, and what may not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("autorl_hpc.grader")


class Stopped(BaseException):
    """A signal asks the grader to stop. Not KeyboardInterrupt: raised inside an import of torch, that one makes Python
    kill itself at its end though it was caught."""


class WouldEnd(Exception):
    """Something that the grader called would have ended it: SystemExit, a panic of compiled code."""


@contextmanager
def contained() -> Iterator[None]:
    """Lets nothing but a signal end the grader.

    Raises:
        WouldEnd: in place of an error that is no Exception.
    """
    try:
        yield
    except (Exception, Stopped, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise WouldEnd(f"{type(error).__name__}: {error}") from error


def each(*steps: Callable[[], object]) -> None:
    """Takes all steps; one that fails is told in the log and keeps none from being taken."""
    for step in steps:
        try:
            with contained():
                step()
        except Exception:
            log.exception("while ending")
