"""mini's own options: the object `mini` among the driver's `parameters`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mini_hpc.driver import IDLE_S, PATIENCE_S


class Options(BaseModel):
    """What an experiment may set."""

    model_config = ConfigDict(extra="forbid")

    actions: Literal["text", "tools"] = Field("text", description="Commands in a code block, or as tool calls.")
    command_timeout_s: int = Field(600, ge=1, description="Of one command in the foreground.")
    patience_s: float = Field(PATIENCE_S, ge=0, description="How long a driver may be away.")
    idle_s: float = Field(IDLE_S, gt=0, description="How long a connection may be silent.")
