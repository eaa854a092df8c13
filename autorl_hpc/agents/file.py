"""agent.yaml: what an agent's definition tells."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, StringConstraints

from autorl_hpc.records.base import Record
from autorl_hpc.records.names import Name
from autorl_hpc.records.parts import Table

RESTART = "restart"
UNTESTED = "untested"
TraceFormat = Literal["claude-code", "codex", "gemini-cli", "opencode", "openhands", "mini"]
Dialect = Literal["openai-chat", "openai-responses", "anthropic", "gemini", "any"]
"""What an agent's program speaks to its driver: /v1/chat/completions, /v1/responses, /v1/messages, /v1beta/models/M:generateContent.
`any`: the definition doesn't know."""

ScriptName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
ScriptPath = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63}/){0,4}[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
]
"""Below the agent's folder; no part begins with a dot."""

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Words = Annotated[str, StringConstraints(max_length=1000)]


def _text(value: Any) -> Any:
    """YAML's numbers and truth values as a shell would have them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else value


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _no_driver(value: Any) -> Any:
    return None if value == "none" else value


Value = Annotated[str, BeforeValidator(_text), StringConstraints(max_length=10_000, pattern=r"^[^\x00]*$")]


class AgentDriver(Table):
    """How an agent uses its driver."""

    dialect: Dialect = Field(description="What its program speaks; the driver must answer it.")
    required: bool = Field(True, description="False: it runs without a driver too.")
    set_by: Words = Field("", description="How `start` tells the program its driver, in words: variables, a file.")


class AgentFile(Record):
    """agent.yaml."""

    name: Name
    description: str
    start: ScriptPath = "start.sh"
    resume: ScriptName = Field(
        RESTART,
        description="What runs after an interruption or for a reprompt: `restart`, the start script again, or another script "
        "beside it.",
    )
    include: tuple[Name, ...] = ()
    needs: tuple[str, ...] = ()
    secrets: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")], ...] = Field(
        (), description="Variables of the launching environment that the agent gets, API keys for one."
    )
    env: dict[Variable, Value] = Field(
        default_factory=dict, description="Further variables of its process. The suite's own go before them."
    )
    prompt: bool = Field(
        False, description="The suite writes `prompt.md` into the workspace and gives it to `start` on standard input."
    )
    driver: Annotated[AgentDriver | None, BeforeValidator(_no_driver)] = Field(
        None, description="How it uses its driver; null or `none`: it calls none."
    )
    program: Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], BeforeValidator(_one_or_more)] = (
        Field((), description="The program and the arguments that make it tell its version; empty: it needs none.")
    )
    versions: Annotated[tuple[Words, ...], BeforeValidator(_one_or_more)] = Field(
        (UNTESTED,),
        validation_alias=AliasChoices("versions", "version_tested"),
        min_length=1,
        description="Versions that are known to work, or `untested`. May be written `version_tested`.",
    )
    check: ScriptName | None = Field(
        None,
        description="A script beside `start` that `doctor` and `launch` run where they are: exit code 0, or its words are shown.",
    )
    install: Words = Field("", description="How its program is installed, in words.")
    trace: TraceFormat | None = Field(
        None, description="In which format it tells what it does; else its lines are recognised. See docs/traces.md."
    )
