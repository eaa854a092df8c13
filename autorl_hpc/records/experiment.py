"""An experiment: one YAML file, a matrix of runs."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from autorl_hpc.records.base import Record, Strict
from autorl_hpc.records.names import ModelName, Name
from autorl_hpc.states import Protocol

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration_s(value: Any) -> float:
    """Seconds from a number (seconds) or text such as `90s`, `20m`, `1h30m`, `2d`."""
    if isinstance(value, bool):
        raise ValueError("a duration is a number of seconds or text such as 20m or 1h30m")
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        text = value.strip().lower().replace(" ", "")
        if re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
            return sum(float(n) * _UNITS_S[u] for n, u in re.findall(r"(\d+(?:\.\d+)?)([smhd])", text))
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
    raise ValueError("a duration is a number of seconds or text such as 20m or 1h30m")


def _as_tuple(value: Any) -> Any:
    """One value for a list of one. YAML reads a bare `null` as nothing: inside a list it means the agent of that name."""
    if isinstance(value, list):
        value = ["null" if entry is None else entry for entry in value]
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, (str, int, float)) else value


Duration = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0, le=30 * 86400)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
ModelNames = Annotated[tuple[ModelName, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
"""What every generator takes: numpy's has 32 bits."""
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class Table(Strict):
    """A field that holds fields."""

    @model_validator(mode="before")
    @classmethod
    def _is_table(cls, value: Any) -> Any:
        if not isinstance(value, (dict, BaseModel)):
            raise ValueError("must be a table of fields")
        return value


class Matrix(Table):
    """Every combination is a run. A single value may stand for a list of one."""

    task: Names
    agent: Names
    base_model: ModelNames
    driver: Names = ("none",)
    mode: Annotated[tuple[Literal["free", "sft-only", "rl-only"], ...], BeforeValidator(_as_tuple)] = ("free",)
    seed: Seeds = (0,)

    @field_validator("driver")
    @classmethod
    def _no_drivers_yet(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        other = next((name for name in value if name != "none"), None)
        if other is not None:
            raise ValueError(
                f"there is no driver `{other}`: drivers come with a later version; leave it out, or `none`"
            )
        return value


class Budget(Table):
    """What an agent may use."""

    wall_clock_s: Duration = Field(
        validation_alias=AliasChoices("wall_clock_s", "wall_clock"),
        description="Time the agent runs, over all attempts; queue time doesn't count. May be written `wall_clock`.",
    )
    give_back_after_s: float = Field(60.0, ge=0, description="Waiting for a grader beyond this is given back.")
    give_back_cap_s: float = Field(3600.0, ge=0, description="At most this much is given back in a run.")


class Resources(Table):
    """What one kind of job asks of a cluster; left out: what the cluster's profile says."""

    gpus: int | None = Field(None, ge=0, le=64)
    cpus: int | None = Field(None, ge=1, le=1024)
    memory: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[KMGT]$")] | None = Field(
        None, description="Such as 64G."
    )


class AllResources(Table):
    """By kind of job."""

    agent: Resources = Resources()
    grader: Resources = Resources()


class GraderSpec(Table):
    """The grader daemons of an experiment."""

    placement: Literal["job", "step"] = Field(
        "job",
        description="`job`: graders are jobs of their own. `step`: one runs in each agent's job, on GPUs of its own, "
        "where a site grants only one job at a time.",
    )
    count: int = Field(1, ge=1, le=64)
    chain: int = Field(3, ge=1, le=100, description="How many jobs stand in line to take over from a dead one.")
    engine: Literal["transformers"] = "transformers"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(
        1, ge=0, description="torch threads on the CPU; 0 leaves torch's default. One is best for tiny models."
    )
    batch_tokens: int = Field(131072, ge=256, description="Upper limit of prompt plus answer tokens in one batch.")
    idle_exit_s: float = Field(600.0, gt=0)
    watch_every_s: float = Field(
        10.0, ge=0.5, le=600, description="On a cluster: how often the scheduler is asked about the jobs."
    )
    stale_after_s: float = Field(
        60.0, gt=0, description="A claim whose grader shows no heartbeat for this long is taken over."
    )


class Retention(Table):
    """Which accepted checkpoints stay on disk when a run is closed."""

    artifacts: Literal["selected", "all"] = "selected"


class ExperimentSpec(Record):
    """jobs/<name>.yaml as a user writes it."""

    name: Name
    description: str = ""
    matrix: Matrix
    exclude: tuple[dict[str, Any], ...] = ()
    budget: Budget
    protocol: Protocol = Protocol.TWO_SPLIT
    recipe: dict[Name, Name] = Field(
        default_factory=dict, description="Task name to recipe name; the default is the task's first."
    )
    grader: GraderSpec = GraderSpec()
    parallel: int = Field(1, ge=1, le=10000, description="How many agents run at once.")
    resources: AllResources = AllResources()
    attempts: int = Field(3, ge=1, le=20, description="How often the supervisor of a run may be started over.")
    retention: Retention = Retention()
    cluster: Name = "local"
