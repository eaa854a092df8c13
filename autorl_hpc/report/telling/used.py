"""Samples of usage as the report reads them: of each line only what figures are made of, as plain dictionaries.

A run has five hundred of them or twenty thousand. As records, with all of their fields, they take twice the time.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

MOST_S = 1e12
"""A million cores for eleven days. No sample says more, but a damaged one may: a figure that was believed would be the run's peak."""

MOST_BYTES = 1 << 60

Figure = Annotated[float, Field(ge=0, le=MOST_S)]
Count = Annotated[int, Field(ge=0, le=MOST_BYTES)]


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
    gpus: NotRequired[tuple[UsedGpu, ...]]
