"""The task file task.yaml: sources, splits, and the recipes with prompts, sampling and scoring."""

from __future__ import annotations

import datetime
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from autorl_hpc.records.base import Name, Record, Sha256, Strict


def task_name(text: str) -> str:
    """Return a task's name; of `inspect:PACKAGE/TASK`, `inspect:FILE.py@TASK`, `lm-eval:TASK` and `lm-eval:FILE.yaml` the one that it is staged under."""
    kind, colon, rest = text.partition(":")
    return (
        f"{kind}-{rest.rpartition('/')[2].replace('.py@', '-').removesuffix('.yaml')}"
        if colon and kind in HARNESSES
        else text
    )


HARNESSES: Final = ("inspect", "lm-eval")
"""Evaluation libraries whose tasks are tasks here."""


class Sampling(Strict):
    """How tokens are drawn. Greedy is temperature 0."""

    temperature: float = Field(0.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_new_tokens: int = Field(gt=0, le=32768)
    stop: tuple[str, ...] = ()


HOW_REACHED = frozenset({"search_key_file", "search_key_header", "search_record"})
"""Options that are not part of the recipe_hash, because search results do not depend on whose key is used."""

Judge = Literal["none", "discrete", "logprob", "json"]
USUAL_DATE: Final = datetime.date(2026, 1, 1)


class Recipe(Strict):
    """What is asked of a model, and how its answer is scored. Its digest is the `recipe_hash` of every score."""

    name: Name
    version: int = Field(ge=1)
    prompt: str = Field(description="The user's text; {question} stands for the item's question.")
    chat: Literal["none", "auto"] = Field("none", description="auto: a user turn in the chat template, if any.")
    system: str | None = None
    shots_file: str | None = Field(None, description="A staged JSON file with `messages`, put before the prompt.")
    shots_sha256: Sha256 | None = None
    sampling: Sampling
    date: datetime.date = Field(USUAL_DATE, description="Today, for a chat template that writes it (`strftime_now`).")
    samples: int = Field(1, ge=1, le=100, description="Answers drawn for each item; above 1 the scorer sees them all.")
    max_steps: int | None = Field(None, ge=1, le=1000, description="Of an episode, in tasks with an environment.")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    scorer: Name = Field(description="One of the package, or `task`: the task folder's own evaluate.py.")
    scorer_version: str
    judge: Judge = Field("none", description="Whether a judge model is asked, and how its word is read.")
    options: dict[Name, str | int | float | bool] = Field(
        default_factory=dict, description="What else decides a score; the judge's model is filled in at launch."
    )

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The usual date is left out, so that hashes of older recipes stay what they were."""
        value: dict[str, Any] = handler(self)
        if self.date == USUAL_DATE:
            value.pop("date", None)
        return value

    def hash(self) -> str:
        """The recipe_hash, without how search results are reached: a replayed score compares with the recorded one."""
        options = {name: value for name, value in self.options.items() if name not in HOW_REACHED}
        if options.get("search") == "replay":
            options["search"] = "online"
        return self.model_copy(update={"options": options}).digest()


class SplitPin(Strict):
    """A held-out split: how many items, and the sha256 of its items.jsonl."""

    n: int = Field(gt=0)
    sha256: Sha256
    folder: Name | None = Field(None, description="Of the vault, where it is not the split's name.")


class Derived(Strict):
    """How a source file is made of one that is served; stage/derive.py has the ways."""

    url: str = Field(description="Of the file that is served, at a whole commit.")
    make: Literal["first_rows_jsonl_gz"]
    n: int = Field(gt=0, description="Rows.")
    sha256: Sha256 = Field(description="Of the text that is made, before it is packed.")


class SourceFile(Strict):
    """A file that `stage` takes in, with the hash that the task pins."""

    file: str
    sha256: Sha256
    url: str | None = None
    optional: bool = False
    derived: Derived | None = Field(None, description="In the place of an address: what it is made of.")


class TaskFile(Record):
    name: Name
    title: str
    level: Literal[1, 2, 3] = Field(1, description="The benchmark's level: static data, judge, interaction.")
    unit: Literal["item", "cluster"] = "item"
    source: str
    licence: str
    sources: tuple[SourceFile, ...] = ()
    train_files: dict[str, Sha256]
    splits: dict[Literal["feedback", "report"], SplitPin]
    paper: SplitPin | None = Field(None, description="What the paper asks, if not the report split.")
    vault_files: dict[str, Sha256] = Field(default_factory=dict, description="What graders need beside the items.")
    environment: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9_]*\.py:[A-Za-z][A-Za-z0-9_]*$",
        description="Interactive tasks: its file and class.",
    )
    needs: tuple[str, ...] = Field((), description="Python modules that graders need for it; checked by `launch`.")
    cluster_field: Name | None = Field(None, description="Field of an item that names its cluster, for the statistics.")
    stratum_field: Name | None = Field(None, description="Field of an item by which splits and parts are stratified.")
    recipes: tuple[Recipe, ...] = Field(min_length=1, description="The first is the default.")

    def recipe(self, name: str | None) -> Recipe | None:
        if name is None:
            return self.recipes[0]
        return next((recipe for recipe in self.recipes if recipe.name == name), None)
