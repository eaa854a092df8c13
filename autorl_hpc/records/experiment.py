"""The experiment file: a YAML file with a matrix of runs, budget, graders, judge, sandbox and drivers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from autorl_hpc.errors import did_you_mean
from autorl_hpc.records.base import (
    Duration,
    KeyFile,
    ModelName,
    Name,
    Pause,
    Record,
    Resources,
    Revision,
    Table,
    Visible,
    parse_duration_s,
)
from autorl_hpc.records.driver import NO_DRIVER, DriverSpec, checked_url
from autorl_hpc.records.task import task_name
from autorl_hpc.states import Network, Protocol


def _as_tuple(value: Any) -> Any:
    """One value for a list of one. YAML reads a bare `null` as nothing: inside a list it means the agent of that name."""
    if isinstance(value, list):
        value = ["null" if entry is None else entry for entry in value]
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, (str, int, float)) else value


def _task_names(value: Any) -> Any:
    value = _as_tuple(value)
    return (
        tuple(task_name(name) if isinstance(name, str) else name for name in value)
        if isinstance(value, tuple)
        else value
    )


Names = Annotated[tuple[Name, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
ModelNames = Annotated[tuple[ModelName, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]  # a seed that every generator accepts; numpy's has 32 bits
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


GIVE_BACK_SHARE = 0.5  # share of the budget that may be given back; with more, runs would differ too much
LAST_GRACE_SHARE = 0.05  # share of the wall clock; more would be a budget of its own
LATER_FIELDS = ("gpu_hours", "tokens", "cost_usd", "grace_s")
"""Fields of a budget that are left out of run ids at their defaults."""


class Matrix(Table):
    """Every combination is a run. A single value may stand for a list of one."""

    task: Annotated[Names, BeforeValidator(_task_names)]
    agent: Names
    base_model: ModelNames
    driver: Names = (NO_DRIVER,)
    mode: Annotated[tuple[Literal["free", "sft-only", "rl-only"], ...], BeforeValidator(_as_tuple)] = ("free",)
    seed: Seeds = (0,)


class Budget(Table):
    wall_clock_s: Duration = Field(
        validation_alias=AliasChoices("wall_clock_s", "wall_clock"),
        description="Time the agent runs, over all attempts; queue time doesn't count. May be written `wall_clock`.",
    )
    give_back_after_s: float = Field(60.0, ge=0, description="Waiting for a grader beyond this is given back.")
    give_back_cap_s: float = Field(3600.0, ge=0, description="At most this much is given back in a run.")
    max_submissions: int | None = Field(None, ge=1, description="Accepted ones of different content; null: no limit.")
    memory_gib: float | None = Field(None, gt=0, description="Of its processes, as measured; null: the job's.")
    disk_gib: float | None = Field(None, gt=0, description="Of workspace and output, as measured; null: no limit.")
    processes: int | None = Field(None, ge=8, description="Of the agent at once, as measured; null: no limit.")
    gpu_hours: float | None = Field(None, gt=0, description="Time times the GPUs of its job; null: no limit.")
    tokens: int | None = Field(None, ge=1, description="Of the driver, in requests and answers; null: no limit.")
    cost_usd: float | None = Field(None, gt=0, description="Of the driver, in US dollars; null: no limit.")
    grace_s: Pause = Field(
        60.0,
        validation_alias=AliasChoices("grace_s", "grace"),
        description="After a budget is used up, for a last submission; never more than 5 % of the wall clock.",
    )

    @property
    def given_back_at_most_s(self) -> float:
        """Time that waiting for graders may add to a run."""
        return min(self.give_back_cap_s, self.wall_clock_s * GIVE_BACK_SHARE)

    @property
    def last_grace_s(self) -> float:
        """Time between the end of a budget and the agent's TERM, in which submissions still count."""
        return min(self.grace_s, self.wall_clock_s * LAST_GRACE_SHARE)

    def without_later_fields(self) -> dict[str, Any]:
        """As JSON, without the fields that came after the first run ids where they say what was so before."""
        value = self.model_dump(mode="json")
        for name in LATER_FIELDS:
            if value[name] == type(self).model_fields[name].default:
                del value[name]
        return value


class AllResources(Table):
    agent: Resources = Resources()
    grader: Resources = Resources()


MOST_WORKERS = 16  # workers on one GPU


class GraderSpec(Table):
    placement: Literal["job", "step"] = Field("job", description="`step`: one in each agent's job, on GPUs of its own.")
    count: int = Field(1, ge=1, le=64)
    chain: int = Field(3, ge=1, le=100, description="How many jobs stand in line to take over from one that ends.")
    engine: Literal["transformers", "vllm"] = Field("transformers", description="Who answers; see docs/engines.md.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(1, ge=0, description="torch threads on the CPU; 0: torch's own. One is best for tiny models.")
    batch_tokens: int = Field(131072, ge=256, description="Of `transformers`: tokens of a batch, answers included.")
    cache_gib: float | None = Field(None, ge=0, description="Host memory for checkpoints; default: an eighth.")
    tensor_parallel: int = Field(1, ge=1, le=64, description="Of `vllm`: GPUs for one model; further ones hold copies.")
    workers_per_gpu: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | Literal["auto"] = Field(
        "auto", description="Of `vllm`: workers that share one GPU. `auto`: several for small models and many cores."
    )
    gpu_memory: float = Field(0.85, gt=0, le=0.95, description="Of `vllm`: share of each GPU, all workers together.")
    context_tokens: int | None = Field(None, ge=64, description="Of `vllm`; default: the model's own window.")
    sleep_after_s: float = Field(300.0, ge=0, description="Of `vllm`: then it gives GPU memory back; 0: never.")
    rating_limit_s: float = Field(3600.0, gt=0, description="Of rating one submission; longer, it is tried again.")
    idle_exit_s: float = Field(600.0, gt=0)
    watch_every_s: float = Field(10.0, ge=0.5, le=600, description="How often the scheduler is asked about the jobs.")
    stale_after_s: float = Field(60.0, gt=0, description="A claim without a heartbeat for this long is taken over.")

    @field_validator("workers_per_gpu", mode="before")
    @classmethod
    def _is_number_or_auto(cls, value: Any) -> Any:
        if value != "auto" and (type(value) is not int or not 1 <= value <= MOST_WORKERS):
            raise ValueError(f"a number from 1 to {MOST_WORKERS}, or `auto`")
        return value

    @model_validator(mode="after")
    def _shares_whole_models(self) -> GraderSpec:
        if self.tensor_parallel > 1 and self.workers_per_gpu not in ("auto", 1):
            raise ValueError("`workers_per_gpu` above 1 needs `tensor_parallel: 1`")
        return self


class JudgeSpec(Table):
    """The judge model of tasks that ask one: an OpenAI-compatible endpoint, be it across the internet or a local vLLM."""

    BUILTIN: ClassVar[str] = "builtin:length-and-words"
    FIXED: ClassVar[frozenset[str]] = frozenset(("model", "messages", "stream", "n", "logprobs", "top_logprobs"))

    url: str = Field(max_length=500, description="Without `/chat/completions`; `builtin:length-and-words` is a toy.")
    model: Visible | None = Field(None, description="As the endpoint calls it; part of the recipe hash.")
    revision: Revision | None = Field(None, description="Which weights answer, in any words; part of the recipe hash.")
    answers_as: Visible | None = Field(None, description="The name in answers, where a gateway has another.")
    key_file: KeyFile | None = Field(None, description="The key alone, readable by its owner; none: no key is sent.")
    concurrency: int = Field(8, ge=1, le=256, description="Requests under way at once, of one grader.")
    retries: int = Field(6, ge=0, le=20, description="Of one request, beside the first try.")
    timeout_s: Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0, le=3600)] = 120.0
    max_requests: int | None = Field(None, ge=1, description="Of one grader; tries count, cached answers don't.")
    price_in: float | None = Field(None, ge=0, description="For a million prompt tokens, in any currency.")
    price_out: float | None = Field(None, ge=0, description="For a million tokens of the judge's answers.")
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further or other fields of a request; null takes one out. In the recipe hash.",
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return value if value == cls.BUILTIN else checked_url(value)

    @field_validator("parameters")
    @classmethod
    def _leaves_the_rest(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(cls.FIXED & set(value))
        if taken:
            raise ValueError(f"`{taken[0]}` is set by the recipe and the other fields")
        return value

    @model_validator(mode="after")
    def _has_model(self) -> JudgeSpec:
        if self.model is None and self.url != self.BUILTIN:
            raise ValueError("`model` is missing: the endpoint's name for the judge")
        return self

    @property
    def name(self) -> str:
        """What recipes call it: the model, or the built-in judge's address."""
        return self.BUILTIN if self.url == self.BUILTIN else str(self.model)


class SandboxSpec(Table):
    level: Literal["auto", "apptainer", "bwrap", "namespaces", "landlock", "none"] = Field(
        "auto", description="`auto`: the strongest that works on the node, if any; another one is demanded."
    )
    network: Network | None = Field(None, description="Default: `driver` or `none`, if the level can. Given: demanded.")
    readable: tuple[Annotated[str, StringConstraints(pattern=r"^/[^\n]+$", max_length=1000)], ...] = Field(
        (), description="Further folders that agents may read: software that lies outside the usual places."
    )

    @model_validator(mode="after")
    def _can_be_had(self) -> SandboxSpec:
        if self.level == "none" and self.network not in (None, Network.OPEN):
            raise ValueError(f"level `none` can't keep the network at `{self.network}`: choose another level")
        return self


class FeedbackSpec(Table):
    """How much of the feedback split is asked for each submission. The report split is always whole."""

    items: int | None = Field(None, ge=1, description="Drawn once for all runs, clusters whole. Null: the whole split.")
    seed: Seed = Field(0, description="Of the draw: another seed, another part.")


class Retention(Table):
    artifacts: Literal["selected", "all"] = "selected"


class ExperimentSpec(Record):
    """jobs/<name>.yaml as a user writes it."""

    name: Name
    description: str = ""
    drivers: dict[Name, DriverSpec] = Field(default_factory=dict, description="LLMs, as `matrix.driver` names them.")
    matrix: Matrix
    exclude: tuple[dict[str, Any], ...] = ()
    budget: Budget
    reprompts: int = Field(0, ge=0, le=1000, description="How often an agent that ended early is started again.")
    protocol: Protocol = Protocol.TWO_SPLIT
    feedback: FeedbackSpec = FeedbackSpec()
    evaluate_script: bool = Field(False, description="Agents get `./evaluate`: scores on training rows, no submission.")
    recipe: dict[Name, Name] = Field(default_factory=dict, description="Of each task; default: the task's first.")
    grader: GraderSpec = GraderSpec()
    judge: JudgeSpec | None = Field(None, description="For tasks whose recipe asks a judge model.")
    environment: Name | None = Field(None, description="The staged one that agents train in; none: the suite's own.")
    sandbox: SandboxSpec = SandboxSpec()
    parallel: int = Field(1, ge=1, le=10000, description="How many agents run at once.")
    resources: AllResources = AllResources()
    attempts: int = Field(3, ge=1, le=20, description="How often the supervisor of a run may be started over.")
    retention: Retention = Retention()
    cluster: Name = "local"

    @field_validator("drivers")
    @classmethod
    def _none_is_none(cls, value: dict[str, DriverSpec]) -> dict[str, DriverSpec]:
        if NO_DRIVER in value:
            raise ValueError(f"`{NO_DRIVER}` is the name for no driver: choose another one")
        return value

    @field_validator("matrix")
    @classmethod
    def _drivers_are_known(cls, value: Matrix, info: ValidationInfo) -> Matrix:
        known = [NO_DRIVER, *info.data.get("drivers", {})]
        other = next((name for name in value.driver if name not in known), None)
        if other is not None and "drivers" in info.data:
            hint = did_you_mean(other, known, f"; known are {', '.join(known)}")
            raise ValueError(f"`driver` names `{other}`, which is none of `drivers`{hint}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> ExperimentSpec:
        if self.protocol is Protocol.PAPER and self.feedback.items is not None:
            raise ValueError("`feedback.items` needs `protocol: two-split`: the paper's one split is asked whole")
        if self.budget.cost_usd is not None:
            for name in self.matrix.driver:
                if name != NO_DRIVER and not self.drivers[name].fully_priced:
                    both = f"`drivers.{name}.price_in` and `price_out` (0 is a price)"
                    raise ValueError(f"`budget.cost_usd` needs both prices: give {both}")
        return self

    def driver(self, name: str) -> DriverSpec | None:
        return None if name == NO_DRIVER else self.drivers[name]
