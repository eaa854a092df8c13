"""Records of a cluster: its profile (ClusterProfile), and its jobs as submitted and as seen (SlurmJobs, SeenJobs)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, StringConstraints, field_validator

from autorl_hpc.records.base import Duration, Memory, Name, Record, Resources, Strict, Table


def _one_line(value: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ValueError("must be one line without control characters")
    return value


def _no_escape(value: str) -> str:
    if "\\" in value:
        raise ValueError("must not hold a backslash: sbatch takes it for an escape, in quotes too")
    return value


def _lines(value: Any) -> Any:
    if isinstance(value, str):
        value = [line for line in value.splitlines() if line.strip()]
    return tuple(value) if isinstance(value, list) else value


Line = Annotated[str, StringConstraints(min_length=1, max_length=2000), AfterValidator(_one_line)]
Option = Annotated[Line, AfterValidator(_no_escape)]  # value of an sbatch option
Lines = Annotated[tuple[Line, ...], BeforeValidator(_lines)]
OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,40}$")]
Options = dict[OptionName, Option | int | bool]

OWN_OPTIONS = {
    **dict.fromkeys(("partition", "account", "qos", "constraint", "reservation", "requeue", "time")),
    **{"mem": "memory", "cpus-per-task": "cpus", "no-requeue": "requeue", "signal": "signal_before_end"},
}
"""Options of sbatch that the profile has a field for, with the field's name."""

_RESERVED = """job-name comment array dependency output error open-mode cluster clusters parsable quiet test-only time-min wait
wrap"""
RESERVED_OPTIONS = frozenset(_RESERVED.split())  # options of sbatch that the suite sets itself


class Wording(Table):
    """The fields of sbatch that sites differ in; those of a kind of job come before the profile's."""

    partition: Option | None = None
    account: Option | None = None
    qos: Option | None = None
    constraint: Option | None = None
    reservation: Option | None = None
    gpu_type: Option | None = Field(None, description="Such as a100: `gpu:a100:2`.")
    sbatch: Options = Field(default_factory=dict, description="Further ones, as `mail-type: END`; true: a bare flag.")

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name in value:
            if name in OWN_OPTIONS:
                raise ValueError(f"`{name}` has a field of its own: `{OWN_OPTIONS[name] or name}`")
            if name in RESERVED_OPTIONS:
                raise ValueError(f"`{name}` can't be changed: the suite sets it, or needs it as it is")
        return value


class JobKind(Wording):
    gpus: int | None = Field(None, ge=0, le=64)
    cpus: int | None = Field(None, ge=1, le=1024)
    memory: Memory | None = Field(None, description="Such as 64G; left out: the partition's default.")
    time: Duration | None = Field(None, description="Time limit of a job; for longer budgets a chain of jobs.")

    def resources(self, wanted: Resources | None) -> JobKind:
        """This kind with what an experiment asks for in its place."""
        given = {} if wanted is None else {k: v for k, v in wanted.model_dump().items() if v is not None}
        return self.model_copy(update=given)


class Container(Table):
    image: Line = Field(description="Path of the image; $VARS are those of the job, ~/ is $HOME.")
    runtime: Literal["apptainer", "singularity"] = "apptainer"
    options: tuple[Line, ...] = ("--nv",)
    python: Line = "python3"


class Limits(Table):
    """What the site allows, where Slurm's own answer is wrong or missing."""

    max_time: Duration | None = Field(None, description="Of one job; left out: the partition's, as Slurm tells it.")
    max_array_size: int | None = Field(None, ge=1, description="MaxArraySize: the highest index is one less.")


def _one_gpu(value: Any) -> Any:
    """A table that says nothing of GPUs means one, as no table does."""
    return {"gpus": 1, **value} if isinstance(value, dict) else value


class ClusterProfile(Record, Wording):
    """jobs/clusters/<name>.yaml: how jobs are asked for on one cluster."""

    name: Name
    description: str = ""
    scheduler: Literal["slurm", "local"] = "slurm"
    gpu_wording: Literal["gres", "gpus", "gpus-per-node", "none"] = Field("gres", description="How GPUs are asked for.")
    modules: Lines = ()
    setup: Lines = Field((), description="Lines of bash before the payload, after the modules.")
    python: Line | None = Field(None, description="Of jobs, with $VARS of the job; default: the launching one.")
    vllm: Line | None = Field(None, description="`vllm` of driver jobs; default: beside the Python, or on PATH.")
    agent_variables: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*\*?$")], ...] = Field(
        (),
        description="Variables of jobs that agents get too, by name or by beginning: NCCL_*. Graders' engines have all of them.",
    )
    container: Container | None = None
    scratch: Line | None = Field(None, description="Folder of the workspaces, with $VARS of the login node.")
    limits: Limits = Limits()
    signal_before_end_s: Duration = Field(
        90.0,
        validation_alias=AliasChoices("signal_before_end_s", "signal_before_end"),
        description="How long before a job's end it is told. Slurm may be up to a minute early.",
    )
    requeue: bool = Field(True, description="Whether Slurm puts jobs of a dead node, or preempted ones, back in line.")
    agent: Annotated[JobKind, BeforeValidator(_one_gpu)] = JobKind(gpus=1)
    grader: Annotated[JobKind, BeforeValidator(_one_gpu)] = JobKind(gpus=1)
    driver: Annotated[JobKind, BeforeValidator(_one_gpu)] = JobKind(gpus=1)
    report: JobKind = JobKind(gpus=0, cpus=1)


class Submitted(Strict):
    """One sbatch call. `name` is our own id of it: the scheduler may give a job number out again."""

    name: str
    role: str = Field(description="agents, grader-<i>, driver-<name> or report.")
    link: int = Field(1, ge=1, description="Its place in a chain.")
    last_link: bool = True
    runs: tuple[str, ...] = Field((), description="Of an array: the run of each index.")
    number: int = Field(ge=1, description="Counts the sbatch calls of an experiment: tells links of one name apart.")
    job_id: str | None = Field(None, description="What sbatch answered; null: it was not called, or never answered.")
    submitted_at: str = ""
    asked_back: bool = Field(False, description="A launch that failed is taking it back: how it ends says nothing.")
    taken_back: bool = Field(False, description="It was taken back, and is gone.")


class SlurmJobs(Record):
    """slurm.json: every job that launches submitted; written by `launch` alone."""

    uid: str = Field(pattern=r"^[0-9a-f]{12}$", description="In the name of each of the experiment's jobs.")
    cluster: Name
    submitted: tuple[Submitted, ...] = ()


class SeenJob(Strict):
    """One job, or one task of an array, as the scheduler last told it."""

    name: str
    number: int | None = Field(None, description="Of the sbatch call, from the job's comment.")
    job_id: str = Field(description="As people write it: 123, or 123_4 for a task of an array.")
    index: int | None = None
    state: str = Field(description="Slurm's word, as it is.")
    reason: str | None = None
    nodes: str | None = None
    restarts: int = 0
    exit_code: str | None = Field(None, description="code:signal of an ended job, once scontrol or sacct was asked.")
    submitted_at: str | None = None


class SeenJobs(Record):
    """seen.json: what the watcher last saw; written by the grader that holds the watcher's claim."""

    counter: int = Field(ge=0, description="Counts what was written.")
    jobs: tuple[SeenJob, ...] = ()
    trouble: str | None = Field(None, description="Why the scheduler could not be asked.")
