"""What a program is, what it may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from autorl_hpc.states import StrEnum

MIB = 1024 * 1024


@dataclass(frozen=True)
class Program:
    """One program with its test.

    Attributes:
        source: defines the function `entry_point`; untrusted.
        test: defines `check(candidate)`, which raises if the function is wrong; trusted.
        helpers: definitions that the test uses beside it, such as other functions of the prompt; trusted, and never the
            program's own.
    """

    source: str
    test: str
    entry_point: str
    helpers: str = ""


@dataclass(frozen=True)
class Limits:
    """What one program may use, all calls of its test together.

    Attributes:
        cpu_s: seconds of CPU time. The slowest right solution of HumanEval takes 0.12; the official harness stops the clock
            on the wall after 3, which a loaded machine makes shorter.
        wall_s: seconds from start to end; long, so that load decides nothing.
        idle_s: seconds in which it neither works nor waits for a core (idleness.py), for those that sleep: a grader may get
            thousands of them. The official harness, whose clock stops after 3, passes none that sleeps for longer.
        memory_bytes: address space.
        file_bytes: what it prints, and each file.
        folder_bytes, files: the private folder.
        answer_bytes: one answer, as JSON.
    """

    cpu_s: int = 4
    wall_s: float = 20.0
    idle_s: float = 3.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = MIB
    folder_bytes: int = 16 * MIB
    files: int = 64
    answer_bytes: int = 8 * MIB


class Reason(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    WRONG = "wrong"  # an assertion of the test failed
    RAISED = "raised"  # it raised, when it was defined or when it was called
    SYNTAX = "syntax"  # it does not compile
    UNDEFINED = "undefined"  # it defines no such function
    ANSWER = "answer"  # what it answered is too long, or no data
    ENDED = "ended"  # its process ended before it had answered
    KILLED = "killed"  # by a signal that no limit explains, twice
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"  # it printed or stored too much


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        isolation: the layers that were around it, `namespaces+landlock+seccomp`, or `none`.
    """

    reason: Reason
    isolation: str

    @property
    def passed(self) -> bool:
        """Whether its test ran to the end."""
        return self.reason is Reason.PASSED


@dataclass(frozen=True)
class Isolation:
    """What confines programs on this host, found by doing.

    Attributes:
        layers: those that work, outermost first.
        open_to: what a program could do all the same: `read` a file of its user's, `write` outside its folder, `connect`,
            `fork`, `signal` another process.
    """

    layers: tuple[str, ...]
    open_to: frozenset[str]

    @property
    def name(self) -> str:
        """`namespaces+landlock+seccomp`, or `none`."""
        return "+".join(self.layers) or "none"
