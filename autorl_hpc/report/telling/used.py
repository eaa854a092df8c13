"""Samples of usage as the report reads them: of each line only what figures are made of, as plain dictionaries.

A run has five hundred of them or twenty thousand. As records, with all of their fields, they take twice the time.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

Figure = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class UsedGpu(TypedDict):
    """As in `GpuSample`."""

    __pydantic_config__ = ConfigDict(extra="ignore", allow_inf_nan=False)  # type: ignore[misc]

    name: NotRequired[str]
    used_share: NotRequired[Annotated[float, Field(ge=0, le=1)] | None]


class Used(TypedDict):
    """As in `UsageSample`, by the same bounds; null or absent: it could not be measured."""

    __pydantic_config__ = ConfigDict(extra="ignore", allow_inf_nan=False)  # type: ignore[misc]

    elapsed_s: Figure
    attempt: NotRequired[Annotated[int, Field(ge=1)]]
    cpu_s: NotRequired[Figure | None]
    memory_bytes: NotRequired[Count | None]
    disk_bytes: NotRequired[Count | None]
    gpus: NotRequired[tuple[UsedGpu, ...] | None]
