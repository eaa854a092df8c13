"""What of sandboxes is here, by doing. In this version agents run at level none whatever is here."""

from __future__ import annotations

import ctypes

from autorl_hpc.doctor.finding import Finding, note, ok
from autorl_hpc.doctor.tools import Answer, ask

LANDLOCK_CREATE_RULESET = 444
VERSION_FLAG = 1
"""LANDLOCK_CREATE_RULESET_VERSION: linux/landlock.h"""

LATER = "no harm in this version, which runs agents at level none; a later one will use what is here"


def level() -> Finding:
    """The level that runs have."""
    return note(
        "level of runs",
        "none",
        "an agent can read all that you can read, held-out items too: its scores never rank",
        "run agents that you trust; see docs/threat-model.md",
    )


def containers() -> list[Finding]:
    """Apptainer or Singularity."""
    for name in ("apptainer", "singularity"):
        answer = ask([name, "--version"])
        if answer is not None and answer.code == 0:
            return [ok(name, f"{answer.out.strip()} (its version; no container was started)")]
        if answer is not None:
            return [note(name, f"there, but fails: {answer.said}", LATER)]
    return [note("apptainer", "not here", LATER, "often a module: module avail apptainer")]


def bubblewrap() -> Finding:
    """bwrap with everything unshared."""
    argv = ["bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all", "true"]
    return _doing("bwrap", ask(argv), "runs with all namespaces of its own")


def namespaces() -> Finding:
    """User namespaces."""
    return _doing("user namespaces", ask(["unshare", "-Ur", "true"]), "open to you")


def _doing(name: str, answer: Answer | None, works: str) -> Finding:
    if answer is None:
        return note(name, "not here" if name == "bwrap" else "can't be told: no unshare here", LATER)
    if answer.code == 0:
        return ok(name, works)
    return note(name, f"refused: {answer.said}", LATER)


def landlock() -> Finding:
    """The kernel's own version of it."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        abi = libc.syscall(
            ctypes.c_long(LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG)
        )
    except (OSError, AttributeError) as error:
        return note("landlock", f"can't be told: {error}", LATER)
    if abi > 0:
        network = "files and TCP" if abi >= 4 else "files"
        return ok("landlock", f"ABI {abi} ({network})")
    return note("landlock", "not in this kernel, or off", LATER)


def everything() -> list[Finding]:
    """All of them, the level first."""
    return [level(), *containers(), bubblewrap(), namespaces(), landlock()]
