"""The state words of the suite as enums; Slurm's job states mapped to ours; the exit codes of jobs."""

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:  # Python 3.10 has no StrEnum.
    from enum import Enum

    class StrEnum(str, Enum):
        """Stand in for `enum.StrEnum`."""

        def __str__(self) -> str:
            return str(self.value)


class Fault(StrEnum):
    AGENT = "agent"
    ARTIFACT = "artifact"
    GRADER = "grader"
    CLUSTER = "cluster"


class RunState(StrEnum):
    """State of a run, derived from its ledger and never stored."""

    QUEUED = "queued"  # no attempt has started
    RUNNING = "running"  # an attempt has started, nothing is sealed
    INTERRUPTED = "interrupted"  # an attempt ended without sealing and no other has started
    CLOSING = "closing"  # sealed; scores are still due
    FINISHED = "finished"  # closed by a grader
    DAMAGED = "damaged"  # its ledger does not verify


class SubmissionState(StrEnum):
    REFUSED = "refused"
    ACCEPTED = "accepted"  # queued, no score yet
    SCORED = "scored"
    FAILED = "failed"  # evaluated to null, with a fault


class EndedBy(StrEnum):
    AGENT_EXIT = "agent_exit"
    BUDGET = "budget"  # its wall time is used up
    GPU_HOURS = "gpu_hours"
    TOKENS = "tokens"  # its driver's token budget
    COST = "cost"  # its driver's cost budget
    CANCELLED = "cancelled"
    OUT_OF_MEMORY = "out_of_memory"  # over the memory budget, or the job's limit killed the supervisor too
    DISK = "disk"  # over the disk budget
    PROCESSES = "processes"  # over the process budget
    CRASHED = "crashed"  # the supervisor died more often than it may be restarted


class Split(StrEnum):
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

    NONE = "none"  # only the submission bridge
    DRIVER = "driver"  # the bridge, and the driver through the supervisor
    OPEN = "open"  # everything that the node can reach


class Protocol(StrEnum):
    """How scores are given out during a run; see docs/statistics.md."""

    TWO_SPLIT = "two-split"
    PAPER = "paper"


class EntryKind(StrEnum):
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
    """How a checkpoint was made."""

    NONE = "none"  # nothing was trained
    COPY = "copy"  # a copy of the base model or of another model
    SFT = "sft"
    REJECTION_SAMPLING = "rejection-sampling"  # SFT on the model's own answers, filtered by a reward or a check
    DPO = "dpo"
    PREFERENCE = "preference"  # variants of DPO: KTO, ORPO, CPO, SimPO, IPO, ...
    GRPO = "grpo"
    PPO = "ppo"
    RL = "rl"  # RLOO, REINFORCE, online DPO, hand-written policy gradients
    SFT_RL = "sft+rl"
    AVERAGING = "model-averaging"
    DISTILLATION = "distillation"  # from another model's outputs or logits
    UNKNOWN = "unknown"  # it was trained, but the evidence does not show how


class FailureKind(StrEnum):
    """Why a run, or one of its submissions, did not help: the cause with the strongest evidence, else the outcome alone."""

    # The paper's five (its Table 13), in its sense and no other
    ROLLOUT_CONSTRUCTION = "rollout construction"
    REWARD_OR_DATA = "reward or data design"
    TRAINING_COLLAPSE = "training collapse"  # only where the training shows it: loss, KL, gradients, degenerate outputs
    EARLY_CODING = "early coding failure"
    STATIC_SHORTCUT = "static shortcut without transfer"  # it gains on static tasks and not on interactive ones
    # This suite's own: causes
    COPIED_WEIGHTS = "copied weights"  # the base model's or another model's
    HELD_OUT_ITEMS = "held-out items used"
    FEEDBACK_ONLY = "gain on feedback alone"  # fitted to the split whose scores are told
    OUT_OF_MEMORY = "out of memory"
    ENGINE_CRASH = "engine crash"  # of vLLM, CUDA or NCCL
    FORMAT_MISMATCH = "format mismatch"  # of prompts, templates, columns or answers
    REWARD_WITHOUT_SCORE = "reward without score"  # the training reward rose and the score did not
    BUDGET_OUT = "budget out"
    ARTIFACT_REFUSED = "artifact refused"
    INFRASTRUCTURE = "infrastructure"
    # This suite's own: outcomes, where nothing shows a cause
    NO_SUBMISSION = "no submission"
    WORSE = "significantly worse"  # the whole interval of the gain is below zero
    NO_GAIN = "no gain beyond noise"


OF_THE_PAPER = tuple(FailureKind)[:5]  # the kinds of failure that the paper names


class QueueKind(StrEnum):
    """What a queue entry asks of a grader."""

    BASELINE = "baseline"
    FEEDBACK = "feedback"
    FINGERPRINT = "fingerprint"
    CLOSE = "close"


class JobState(StrEnum):
    """State of a scheduler job, in our words."""

    WAITING = "waiting"  # queued, or will be queued again
    RUNNING = "running"  # has nodes; may be starting, suspended or ending
    HELD = "held"  # someone has to release it
    DONE = "done"  # ended with exit code 0
    ENDED = "ended"  # ended in any other way
    GONE = "gone"  # the scheduler no longer knows it
    UNKNOWN = "unknown"  # a state word that this version does not know; counts as alive

    @property
    def over(self) -> bool:
        return self in (JobState.DONE, JobState.ENDED, JobState.GONE)


_WORDS = {
    JobState.WAITING: "PENDING EXPEDITING REQUEUED REQUEUE_FED",
    JobState.RUNNING: "RUNNING SUSPENDED COMPLETING CONFIGURING POWER_UP_NODE RESIZING SIGNALING STAGE_OUT STOPPED UPDATE_DB",
    JobState.HELD: "REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
    JobState.ENDED: "CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY LAUNCH_FAILED RECONFIG_FAIL REVOKED",
    JobState.DONE: "COMPLETED",
}
SLURM_STATES = {word: state for state, words in _WORDS.items() for word in words.split()}
"""Every job state in Slurm's manuals (squeue, sacct, scontrol; 20.11 to 25.05), flags among them, mapped to a JobState."""


def job_state(word: str) -> JobState:
    """Return the JobState for a state as Slurm prints it, such as `CANCELLED by 1001` or `CANCELLED+`. Of several words a live state
    wins: a job that is `NODE_FAIL,REQUEUED` comes back."""
    words = word.replace("+", " ").replace(",", " ").upper().split()
    if not words or words[0] not in SLURM_STATES:
        return JobState.UNKNOWN
    states = [SLURM_STATES[part] for part in words if part in SLURM_STATES]
    return next((state for state in states if not state.over), states[0])


EXIT_RESUME = 75  # exit code of a supervisor (EX_TEMPFAIL): it stopped without sealing the run; another attempt follows
EXIT_TROUBLE = 3  # exit code of a grader that could not score anything on its node
