"""Base classes of all records, parsing with errors that name file and field, and shared name, hash and duration types."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from autorl_hpc.errors import AutorlError, Exit, did_you_mean
from autorl_hpc.records import canonical_json
from autorl_hpc.states import Fault

SCHEMA_VERSION = 1  # increased when a change would make an older reader misread a record


class Strict(BaseModel):
    """A part of a record: unknown fields are errors, values don't change, NaN is not a number."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def canonical(self) -> bytes:
        """The bytes that hashes of this record are taken over."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        """sha256 of the canonical bytes, in hex."""
        return hashlib.sha256(self.canonical()).hexdigest()


class Record(Strict):
    """A file of its own on disk."""

    schema_version: int = Field(SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION)


class NewerVersion(AutorlError):
    """A record that a newer autorl-hpc wrote: not damaged, only not for this one to read."""


RecordT = TypeVar("RecordT", bound=Strict)


def parse_record(model: type[RecordT], value: Any, where: str | Path, *, next_step: str | None = None) -> RecordT:
    """`value` as a `model`. Raises NewerVersion: a newer autorl-hpc wrote it; AutorlError: names the first wrong field."""
    version = value.get("schema_version", SCHEMA_VERSION) if isinstance(value, dict) else SCHEMA_VERSION
    if isinstance(version, int) and version > SCHEMA_VERSION:
        what = f"a newer autorl-hpc wrote this file (schema_version {version}, this one reads {SCHEMA_VERSION})"
        raise NewerVersion(what, where=where, next_step="use the newer autorl-hpc to read it")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(model, error, where, next_step) from None


MAX_TOLD = 12  # wrong fields that one message names


def _explain(model: type[Strict], error: ValidationError, where: str | Path, next_step: str | None) -> AutorlError:
    unknown = [each for each in error.errors() if each["type"] == "extra_forbidden"]
    misspelt = {each["loc"][:-1] for each in unknown}  # tables in which a missing field is most likely the misspelt one
    others = (each for each in error.errors() if each["type"] != "extra_forbidden")
    found = [*unknown, *(each for each in others if each["type"] != "missing" or each["loc"][:-1] not in misspelt)]
    told = [_explained(model, each) for each in found[:MAX_TOLD]]
    more = [f"and {len(found) - MAX_TOLD} more"] if len(found) > MAX_TOLD else []
    advice = (
        next_step or f"correct {'this field' if len(found) == 1 else 'these fields'} and run the same command again"
    )
    return AutorlError("; ".join(told + more), where=where, fault=None, next_step=advice, exit_code=Exit.USAGE)


def _explained(model: type[Strict], wrong: Any) -> str:
    field = ".".join(str(part) for part in wrong["loc"]) or "(the whole file)"
    message = wrong["msg"].removeprefix("Value error, ")
    if wrong["type"] == "extra_forbidden":
        return f"field `{field}`: unknown field{_suggestion(model, wrong['loc'])}"
    if wrong["type"] == "missing":
        return f"field `{field}`: this field is missing"
    if wrong["type"] == "string_pattern_mismatch":
        message = PATTERNS_IN_WORDS.get(wrong["ctx"]["pattern"], "it has a form that is not allowed here")
    if "input" in wrong and wrong["type"] != "value_error" and not isinstance(wrong["input"], (dict, list)):
        message = f"{message}, but it is {wrong['input']!r}"[:300]
    return f"field `{field}`: {message}"


def _suggestion(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    fields: dict[str, Any] = dict(model.model_fields)
    path = iter(location[:-1])
    for part in path:
        given = getattr(fields.get(str(part)), "annotation", None)
        if get_origin(given) is dict:
            next(path, None)  # the key of a field with tables by name, such as `drivers`
        tables = [each for each in (given, *get_args(given)) if isinstance(each, type) and issubclass(each, BaseModel)]
        if not tables:
            return ""
        fields = dict(tables[0].model_fields)
    names = sorted(_written(name, info) for name, info in fields.items())
    known = f"; known are {', '.join(name for name in names if name != 'schema_version')}"
    return did_you_mean(str(location[-1]), names, known)


def _written(name: str, info: Any) -> str:
    """Return a field's name as users write it: `wall_clock` for `wall_clock_s`."""
    choices = getattr(getattr(info, "validation_alias", None), "choices", ())
    return min((str(each) for each in (name, *choices)), key=len)


def damaged(what: str, where: str | Path) -> AutorlError:
    """A file of ours that no longer says what we wrote."""
    advice = "run `autorl-hpc verify` on its run; the other runs are not touched by this"
    return AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.FAILED)


# --- names and hashes

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""Name of a task, agent, driver, mode, experiment or manifest; safe as a file name."""

MODEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"
ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME_PATTERN)]  # `name` or `org/name`
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Memory = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[KMGT]$")]
Visible = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,200}$")]
Revision = Annotated[str, StringConstraints(pattern=r"^[^\n]{1,200}$")]
KeyFile = Annotated[str, StringConstraints(pattern=r"^(/|~/)[^\n]+$", max_length=1000)]


PATTERNS_IN_WORDS = {
    NAME_PATTERN: "letters, digits, `.`, `_` and `-`, 64 at most, beginning with a letter or digit",
    MODEL_NAME_PATTERN: "NAME or ORG/NAME, of letters, digits, `.`, `_` and `-`",
    r"^[0-9a-f]{64}$": "a sha256: 64 digits of 0-9 and a-f",
    r"^[1-9][0-9]*[KMGT]$": "an amount of memory such as 64G",
    r"^(/|~/)[^\n]+$": "a path that begins with / or ~/",
}


def is_name(text: str) -> bool:
    """Whether `text` may stand as a file name of ours."""
    return re.fullmatch(NAME_PATTERN, text) is not None and ".." not in text


def printable(text: str) -> str:
    """`text` with everything escaped that is not a plain character: names and notes of agents hold terminal escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


# --- building blocks for tables of experiments and cluster profiles

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration_s(value: Any) -> float:
    """Seconds from a number (seconds) or text such as `90s`, `20m`, `1h30m`, `2d`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        text = value.strip().lower().replace(" ", "")
        if re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
            return sum(float(n) * _UNITS_S[u] for n, u in re.findall(r"(\d+(?:\.\d+)?)([smhd])", text))
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
    raise ValueError("a duration is a number of seconds or text such as 20m or 1h30m")


Duration = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0, le=30 * 86400)]
Pause = Annotated[float, BeforeValidator(parse_duration_s), Field(ge=0, le=86400)]  # a duration that may be zero


class Table(Strict):
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
    memory: Memory | None = Field(None, description="Such as 64G.")
