"""The published results of Agent² RL-Bench (docs/paper-results.yaml), shown beside ours and never mixed with them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.share import share
from autorl_hpc.records.base import Record, Strict, parse_record

FILE = "paper-results.yaml"


class PaperRow(Strict):
    """One published line."""

    agent: str
    driver: str | None = None
    mode: str | None = None
    scores: tuple[float | None, ...] = Field(description="Points, by task; null: not published.")


class PaperTable(Strict):
    """One published table, or a part of one."""

    name: str
    base_model: str
    base: tuple[float | None, ...] = Field(description="The base model's scores, by task.")
    rows: tuple[PaperRow, ...]


class PaperResults(Record):
    """Facts with their source."""

    TITLE: ClassVar[str] = "paper results"

    title: str
    source: str
    read_in: str = Field(description="The text that the figures were read in.")
    protocol: Literal["paper"]
    budget: str
    tasks: tuple[str, ...]
    caveats: tuple[str, ...] = ()
    tables: tuple[PaperTable, ...]

    @model_validator(mode="after")
    def _one_score_a_task(self) -> PaperResults:
        for table in self.tables:
            for scores in (table.base, *(row.scores for row in table.rows)):
                if len(scores) != len(self.tasks):
                    raise ValueError(f"{table.name}: {len(scores)} scores for {len(self.tasks)} tasks")
        return self


def read_paper() -> PaperResults:
    """The file that ships with the package.

    Raises:
        AutorlError: it is missing or wrong.
    """
    import yaml

    path = share("docs") / FILE
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise AutorlError(f"the published results can't be read: {error}", where=path) from error
    return parse_record(PaperResults, value, path)
