"""What the tables of experiments and of clusters' profiles are made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, model_validator

from autorl_hpc.records.base import Strict

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


Duration = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0, le=30 * 86400)]
Pause = Annotated[float, BeforeValidator(parse_duration_s), Field(ge=0, le=86400)]
"""A duration that may be none at all."""


class Table(Strict):
    """A field that holds fields."""

    @model_validator(mode="before")
    @classmethod
    def _is_table(cls, value: Any) -> Any:
        if not isinstance(value, (dict, BaseModel)):
            raise ValueError("must be a table of fields")
        return value


class Resources(Table):
    """What one kind of job asks of a cluster; left out: what the cluster's profile says."""

    gpus: int | None = Field(None, ge=0, le=64)
    cpus: int | None = Field(None, ge=1, le=1024)
    memory: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[KMGT]$")] | None = Field(
        None, description="Such as 64G."
    )
