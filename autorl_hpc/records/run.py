"""Records run.json (RunRecord, the frozen run with its Science) and experiment.json (ExperimentRecord, as resolved)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from autorl_hpc.records import canonical_json
from autorl_hpc.records.base import ModelName, Name, Record, Sha256, Strict
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.driver import DriverScience
from autorl_hpc.records.experiment import Budget, ExperimentSpec, GraderSpec
from autorl_hpc.records.task import Recipe, SplitPin
from autorl_hpc.states import Network, Protocol, Split


def ids_sha256(ids: Iterable[str]) -> str:
    """Of the ids of the items of a part, one a line, in the order of the split."""
    return hashlib.sha256("".join(f"{each}\n" for each in ids).encode()).hexdigest()


class FeedbackPart(Strict):
    """The part of the feedback split that every submission and the base model are asked. Drawn at the launch; see tasks/parts.py."""

    items: int = Field(ge=1, description="As many as the spec asks for.")
    seed: int = Field(ge=0)
    n: int = Field(ge=1, description="Items that were drawn: clusters are drawn whole.")
    sha256: Sha256 = Field(description="Of their ids, one a line, in the order of the split.")


class Science(Strict):
    """What makes a run another run. Its digest gives the 8 hex digits of the run_id."""

    task: Name
    agent: Name
    driver: Name
    base_model: ModelName
    mode: str
    seed: int
    budget: Budget
    protocol: Protocol
    recipe: Recipe
    splits: dict[str, SplitPin]
    base_model_content_hash: Sha256
    base_model_prompting_hash: Sha256 | None = Field(None, description="Of prompts and decoding; null: not kept yet.")
    environment_hash: Sha256 | None = Field(None, description="Of the agent's environment; null: the suite's own.")
    network: Network = Field(Network.OPEN, description="What may be reached; the ledger says what was enforced.")
    driver_spec: DriverScience | None = Field(None, description="What answers the agent; null: no driver.")
    reprompts: int = Field(0, ge=0, description="How often an agent that ended early is started again.")
    evaluate_script: bool = Field(False, description="Whether the agent had `./evaluate`.")
    feedback_part: FeedbackPart | None = Field(None, description="Null: the whole feedback split is asked.")

    def part(self, split: str) -> FeedbackPart | None:
        """The part of a split that is asked; None: all of it, as always on the report split."""
        return self.feedback_part if split == Split.FEEDBACK else None

    def asked(self, split: str) -> int:
        part = self.part(split)
        return self.splits[split].n if part is None else part.n

    def split_hash(self, split: str) -> str:
        """Scores on a split compare only where this is equal."""
        part = self.part(split)
        return self.splits[split].sha256 if part is None else part.sha256

    def canonical(self) -> bytes:
        """See `Strict`; fields that came later are left out where they say what was so before there were any."""
        value = {**self.model_dump(mode="json"), "budget": self.budget.without_later_fields()}
        later = "driver_spec reprompts evaluate_script feedback_part environment_hash base_model_prompting_hash network"
        unset = [name for name in later.split() if getattr(self, name) == type(self).model_fields[name].default]
        return canonical_json({name: each for name, each in value.items() if name not in unset})

    def run_id(self) -> str:
        """`<task>-<agent>-<model>-<mode>-s<seed>-<8 hex>`: readable and unique."""
        model = self.base_model.rsplit("/", 1)[-1]
        return f"{self.task}-{self.agent}-{model}-{self.mode}-s{self.seed}-{self.digest()[:8]}"


class RunEnvironment(Strict):
    name: Name
    kind: Literal["venv", "image"]
    content_hash: Sha256


class RunRecord(Record):
    """run.json. The hash of its bytes is what the first ledger entry links to."""

    run_id: str
    experiment: Name
    index: int = Field(ge=0, description="The run's place in the experiment's array of agent jobs.")
    science: Science
    recipe_hash: Sha256
    task_hash: Sha256
    agent_hash: Sha256
    environment: RunEnvironment | None = None
    code_hash: Sha256
    created_at: str
    sandbox: str = Field("none", description="The level asked for; the ledger says which one an attempt had.")
    versions: dict[str, str] = Field(default_factory=dict)


class BaseModelPin(Strict):
    """A base model as the experiment was launched with it."""

    content_hash: Sha256
    prompting_hash: Sha256


class ExperimentRecord(Record):
    """experiment.json: the experiment as resolved."""

    spec: ExperimentSpec
    spec_sha256: Sha256
    root: str = Field(description="The folder with store/ and vault/ when the experiment was launched.")
    code_hash: Sha256
    base_models: dict[str, BaseModelPin] = Field(default_factory=dict, description="By name; empty: not kept yet.")
    git_revision: str | None = None
    created_at: str
    runs: tuple[str, ...]
    grader: GraderSpec
    cluster: ClusterProfile | None = Field(None, description="The profile of the last launch; null: this machine.")
    scratch: str | None = Field(None, description="The folder of the workspaces; null: scratch/ of the root.")
    versions: dict[str, str] = Field(default_factory=dict)
    host: dict[str, Any] = Field(default_factory=dict)
