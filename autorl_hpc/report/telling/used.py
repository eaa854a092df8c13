"""Samples of usage as the report reads them: of each line only what figures are made of, as plain dictionaries.

A run has five hundred of them or twenty thousand. As records, with all of their fields, they take twice the time.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

MOST_S = 1e9
"""Thirty years. No sound line says more, but a damaged one may, and a figure that is believed is the run's peak."""

MOST_CPU_S = 1e13
MOST_MEMORY_BYTES, MOST_DISK_BYTES = 1 << 50, 1 << 60

Figure = Annotated[float, Field(ge=0, le=MOST_S)]


class UsedGpu(TypedDict):
    """As in `GpuSample`."""

    __pydantic_config__ = ConfigDict(extra="ignore", allow_inf_nan=False)  # type: ignore[misc]

    name: NotRequired[str]
    used_share: NotRequired[Annotated[float, Field(ge=0, le=1)] | None]


class Used(TypedDict):
    """As in `UsageSample`, by the same bounds and those above; null or absent: it could not be measured."""

    __pydantic_config__ = ConfigDict(extra="ignore", allow_inf_nan=False)  # type: ignore[misc]

    elapsed_s: Figure
    attempt: NotRequired[Annotated[int, Field(ge=1)]]
    cpu_s: NotRequired[Annotated[float, Field(ge=0, le=MOST_CPU_S)] | None]
    memory_bytes: NotRequired[Annotated[int, Field(ge=0, le=MOST_MEMORY_BYTES)] | None]
    disk_bytes: NotRequired[Annotated[int, Field(ge=0, le=MOST_DISK_BYTES)] | None]
    gpus: NotRequired[tuple[UsedGpu, ...] | None]
