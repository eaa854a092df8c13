"""What the supervisor tells a gateway, as one JSON line on its standard input: never in argv, for it holds a token and may hold a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field, ValidationError, model_validator

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.base import Strict
from autorl_hpc.records.ledger import DriverUse
from autorl_hpc.states import Fault

DEFAULT_TIMEOUT_S = 600.0
"""Of silence. Drivers that think say nothing for minutes."""


class Upstream(Strict):
    """Where the driver is: an address, or a file that names the one of now."""

    url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$", description="With `/v1`, without what follows.")
    endpoint_file: Path | None = None
    key_file: Path | None = None
    key: str | None = Field(None, repr=False)
    proxy: str | None = Field(None, repr=False, description="An HTTP proxy; not used for this machine itself.")
    timeout_s: float = Field(DEFAULT_TIMEOUT_S, gt=0, description="Longest silence: before the answer and within it.")
    retries: int = Field(3, ge=0, description="How often a driver that can't be reached is tried again.")

    @model_validator(mode="after")
    def _one_address(self) -> Upstream:
        if (self.url is None) == (self.endpoint_file is None):
            raise ValueError("give one of `url` and `endpoint_file`")
        if self.key is not None and self.key_file is not None:
            raise ValueError("give one of `key` and `key_file`")
        return self


class Prices(Strict):
    """Dollars for a million tokens. Without a price of cached input it costs what other input does."""

    price_in: float = Field(ge=0, validation_alias=AliasChoices("price_in", "in"))
    price_out: float = Field(ge=0, validation_alias=AliasChoices("price_out", "out"))
    price_cached: float | None = Field(None, ge=0, validation_alias=AliasChoices("price_cached", "cached"))


class RunLimits(Strict):
    """Of the run, all attempts together. None: none."""

    tokens: int | None = Field(None, ge=0, description="In and out, cached input among them.")
    cost_usd: float | None = Field(None, ge=0)


class Settings(Strict):
    """One gateway.

    Attributes:
        unix: where its Unix socket is made; None: none.
        port: 0 for a free port of the loopback; None: none.
        listening: descriptors of sockets that listen already, the port's first. They outlive this process with who made them.
        token: what clients show as their key.
        model: the one that may be asked; `aliases` are other names of it that the driver knows.
        used: what the supervisor last heard that the run has used. Where `log` tells less, this counts.
        log: driver.jsonl of the run.
        bodies: folder for request and answer bodies; None: they are not kept.
        tools: hosted tools, fields and `remote_urls` that are not refused.
        attempt, elapsed_s: of the run as this process begins, for the log.
        max_output_tokens: what an answer is taken for whose request sets no limit.
    """

    unix: Path | None = None
    port: int | None = Field(None, ge=0, le=65535)
    listening: tuple[int, ...] = ()
    token: str = Field(min_length=16, repr=False)
    upstream: Upstream
    model: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    prices: Prices | None = None
    limits: RunLimits | None = None
    used: DriverUse = DriverUse()
    log: Path
    bodies: Path | None = None
    tools: tuple[str, ...] = ()
    attempt: int = Field(1, ge=1)
    elapsed_s: float = Field(0.0, ge=0)
    max_output_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _cost_needs_prices(self) -> Settings:
        if self.limits is not None and self.limits.cost_usd is not None and self.prices is None:
            raise ValueError("a limit of cost needs prices")
        return self


def told(value: Any) -> Settings:
    """The settings in a line that was read.

    Raises:
        AutorlError: naming the wrong field, without its value.
    """
    if isinstance(value, dict) and value.get("prices") is not None:
        prices = value["prices"]
        if isinstance(prices, dict) and not any(each is not None for each in prices.values()):
            value = {**value, "prices": None}
    try:
        return Settings.model_validate(value)
    except ValidationError as error:  # values are not quoted: they are secrets
        first = error.errors(include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(all of it)"
        raise AutorlError(
            f"field `{field}`: {first['msg'].removeprefix('Value error, ')}",
            where="the gateway's standard input",
            fault=Fault.CLUSTER,
            next_step="this is a defect of the suite or of the experiment's `drivers`: see what the supervisor logged",
            exit_code=Exit.USAGE,
        ) from None
