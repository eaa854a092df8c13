"""Every state word of the suite, in one place."""

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:  # Python 3.10 has no StrEnum; this is the part of it that we use.
    from enum import Enum

    class StrEnum(str, Enum):
        """A str that is also an enum member."""

        def __str__(self) -> str:
            return str(self.value)


class Fault(StrEnum):
    """Who is to blame when something did not work."""

    AGENT = "agent"
    ARTIFACT = "artifact"
    GRADER = "grader"
    CLUSTER = "cluster"


class RunState(StrEnum):
    """Where a run stands; derived from its ledger, never stored beside it."""

    QUEUED = "queued"  # no attempt has started
    RUNNING = "running"  # an attempt has started, nothing is sealed
    INTERRUPTED = "interrupted"  # an attempt ended without sealing and no other has started
    CLOSING = "closing"  # sealed; scores are still due
    FINISHED = "finished"  # closed by a grader
    DAMAGED = "damaged"  # its ledger does not verify


class SubmissionState(StrEnum):
    """Where one submission stands."""

    REFUSED = "refused"
    ACCEPTED = "accepted"  # queued, no score yet
    SCORED = "scored"
    FAILED = "failed"  # evaluated to null, with a fault


class EndedBy(StrEnum):
    """What ended a run."""

    AGENT_EXIT = "agent_exit"
    BUDGET = "budget"  # its time
    GPU_HOURS = "gpu_hours"
    TOKENS = "tokens"  # of its driver
    COST = "cost"  # of its driver
    CANCELLED = "cancelled"
    OUT_OF_MEMORY = "out_of_memory"  # more memory than its budget, or its job's, which took the supervisor with it
    DISK = "disk"  # more disk than its budget
    PROCESSES = "processes"  # more processes than its budget
    CRASHED = "crashed"  # the supervisor died more often than it may be restarted


class Split(StrEnum):
    """The two held-out splits."""

    FEEDBACK = "feedback"
    REPORT = "report"


class SandboxLevel(StrEnum):
    """How an agent is kept from the rest of the machine, strongest first; see docs/threat-model.md."""

    APPTAINER = "apptainer"
    BWRAP = "bwrap"
    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    NONE = "none"


class Network(StrEnum):
    """What an agent reaches beyond its sandbox."""

    NONE = "none"  # the submission bridge alone
    DRIVER = "driver"  # the bridge, and its driver through the supervisor
    OPEN = "open"  # everything that the node reaches


class Protocol(StrEnum):
    """How scores are given out during a run; see docs/statistics.md."""

    TWO_SPLIT = "two-split"
    PAPER = "paper"


class EntryKind(StrEnum):
    """The kinds of ledger entries."""

    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_ENDED = "attempt_ended"
    SANDBOX = "sandbox"
    SUBMISSION = "submission"
    SCORE = "score"
    FINGERPRINT = "fingerprint"
    CONTAMINATION = "contamination"
    SEALED = "sealed"
    CLOSED = "closed"


class Route(StrEnum):
    """How a checkpoint came about."""

    NONE = "none"  # nothing was trained
    COPY = "copy"  # of the base model or of another one
    SFT = "sft"
    REJECTION_SAMPLING = "rejection-sampling"  # SFT on the model's own answers, kept by a reward or a check
    DPO = "dpo"
    PREFERENCE = "preference"  # relatives of DPO: KTO, ORPO, CPO, SimPO, IPO, ...
    GRPO = "grpo"
    PPO = "ppo"
    RL = "rl"  # RLOO, REINFORCE, online DPO, own policy gradients
    SFT_RL = "sft+rl"
    AVERAGING = "model-averaging"
    DISTILLATION = "distillation"  # from another model's outputs or logits
    UNKNOWN = "unknown"  # it was trained, and nothing tells how

    @property
    def is_rl(self) -> bool:
        """Whether a policy learned from rewards of its own samples."""
        return self in (Route.GRPO, Route.PPO, Route.RL, Route.SFT_RL)


class FailureKind(StrEnum):
    """Why a run, or one of its submissions, did not help. The first five are the paper's."""

    ROLLOUT_CONSTRUCTION = "rollout construction"
    REWARD_OR_DATA = "reward or data design"
    TRAINING_COLLAPSE = "training collapse"
    EARLY_CODING = "early coding failure"
    STATIC_SHORTCUT = "static shortcut without transfer"
    NO_SUBMISSION = "no submission"
    BUDGET_OUT = "budget out"
    ARTIFACT_REFUSED = "artifact refused"
    INFRASTRUCTURE = "infrastructure"
    NO_GAIN = "no gain beyond noise"  # nothing above explains it


class QueueKind(StrEnum):
    """What a queue entry asks of a grader."""

    BASELINE = "baseline"
    FEEDBACK = "feedback"
    FINGERPRINT = "fingerprint"
    CLOSE = "close"


class JobState(StrEnum):
    """Where a job of the scheduler stands, in our words."""

    WAITING = "waiting"  # queued, or about to be queued again
    RUNNING = "running"  # has a place; may be starting, stopped or ending
    HELD = "held"  # somebody has to release it
    DONE = "done"  # ended with exit code 0
    ENDED = "ended"  # ended otherwise
    GONE = "gone"  # the scheduler doesn't know it any more
    UNKNOWN = "unknown"  # a word that this version doesn't know: kept as it is, and taken for alive

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self in (JobState.DONE, JobState.ENDED, JobState.GONE)


SLURM_STATES: dict[str, JobState] = {
    # base states
    "PENDING": JobState.WAITING,
    "RUNNING": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "COMPLETED": JobState.DONE,
    "CANCELLED": JobState.ENDED,
    "FAILED": JobState.ENDED,
    "TIMEOUT": JobState.ENDED,
    "NODE_FAIL": JobState.ENDED,
    "PREEMPTED": JobState.ENDED,
    "BOOT_FAIL": JobState.ENDED,
    "DEADLINE": JobState.ENDED,
    "OUT_OF_MEMORY": JobState.ENDED,
    "LAUNCH_FAILED": JobState.ENDED,
    "RECONFIG_FAIL": JobState.ENDED,
    # flags that stand in the place of a base state
    "COMPLETING": JobState.RUNNING,
    "CONFIGURING": JobState.RUNNING,
    "EXPEDITING": JobState.WAITING,
    "POWER_UP_NODE": JobState.RUNNING,
    "REQUEUED": JobState.WAITING,
    "REQUEUE_FED": JobState.WAITING,
    "REQUEUE_HOLD": JobState.HELD,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.HELD,
    "REVOKED": JobState.ENDED,
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.HELD,
    "STAGE_OUT": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "UPDATE_DB": JobState.RUNNING,
}
"""Every job state of Slurm's manuals (squeue, sacct, scontrol; 20.11 to 25.05), as ours."""


def job_state(word: str) -> JobState:
    """Ours for a state as Slurm prints it, which may carry more: `CANCELLED by 1001`, `CANCELLED+`, `RUNNING,COMPLETING`.

    Of several words, one of which something may still come counts: a job that is `NODE_FAIL,REQUEUED` comes back.
    """
    words = word.replace("+", " ").replace(",", " ").upper().split()
    if not words or words[0] not in SLURM_STATES:
        return JobState.UNKNOWN
    states = [SLURM_STATES[part] for part in words if part in SLURM_STATES]
    return next((state for state in states if not state.over), states[0])


EXIT_RESUME = 75
"""Of a supervisor, and of the job around it: this attempt stopped without sealing, another one goes on (EX_TEMPFAIL)."""

EXIT_TROUBLE = 3
"""Of a grader that could not score anything on its node."""
