"""The entry point of `autorl-hpc` and `python -m autorl_hpc`: every way of failing becomes an exit code and a message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

INTERRUPTED = 130  # `Exit.INTERRUPTED`; importing may be what was interrupted


def main() -> None:
    code = guarded(_run)
    if code == INTERRUPTED:
        # Python would die by the signal at its end where ctrl-C met code that `exec` runs, as dataclasses do.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _run() -> None:
    _restore_gpus()
    from autorl_hpc.cli import app  # in here, so that a ctrl-C while it loads is one, too

    app()


def _restore_gpus() -> None:
    """submitit's local executor hides the GPUs of a job that asked for none; ours share what launch was given."""
    given = os.environ.get("AUTORL_CUDA_VISIBLE_DEVICES")  # kept: jobs start jobs
    if given == "unset":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    elif given is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = given


def guarded(run: Callable[[], Any]) -> int:
    """Run a command and return its exit code; print errors with what to do next."""
    try:
        run()
        return 0
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as ending:  # typer turns a ctrl-C into an exit of its own
        if isinstance(getattr(ending.__context__, "__cause__", None), KeyboardInterrupt):
            return _interrupted()
        if "--json" in sys.argv and hasattr(ending.__context__, "format_message"):  # typer has printed this usage error
            _print_json(_usage_error(ending.__context__))
        raise
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    from autorl_hpc import __version__
    from autorl_hpc.errors import AutorlError, Exit, from_os_error

    if isinstance(error, BrokenPipeError):
        sys.stderr.close()
        return int(Exit.OK)
    known = error
    if isinstance(error, OSError):
        known = from_os_error(error, "reading or writing", error.filename or "(no name)")
    if isinstance(known, AutorlError):
        if "--json" in sys.argv:
            _print_json(known)
        _say(f"autorl-hpc: {known}")
        return int(known.exit_code)
    # A compiled library that ctrl-C breaks into while it loads makes an error of its own of it.
    if isinstance(error.__context__, KeyboardInterrupt) or "KeyboardInterrupt" in str(error):
        return _interrupted()
    import traceback

    told = "".join(traceback.format_exception(error))
    _say(f"autorl-hpc: this is a defect of autorl-hpc {__version__}; please report it with these lines\n{told}")
    return int(Exit.INTERNAL)


def _interrupted() -> int:
    _say("autorl-hpc: interrupted; nothing is lost, the same command goes on where it stopped")
    return INTERRUPTED


def _usage_error(error: Any) -> Any:
    from autorl_hpc.errors import AutorlError

    command = getattr(getattr(error, "ctx", None), "command_path", "autorl-hpc")
    return AutorlError(error.format_message(), next_step=f"see {command} --help")


def _print_json(error: Any) -> None:
    from autorl_hpc.cli import print_json

    print_json(error.as_json())


def _say(text: str) -> None:
    from autorl_hpc.errors import visible

    print(visible(text), file=sys.stderr, flush=True)
