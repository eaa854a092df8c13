"""Copies of records that take little room: a merged report holds a hundred of them for each of thousands of runs.

pydantic keeps with every record which of its fields were given: two kilobytes of the three that an iteration takes. In a report
no one asks that, and all fields are written: so the copies share one such set, and equal parts are one object.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

from autorl_hpc.records.base import Strict

StrictT = TypeVar("StrictT", bound=Strict)

_set: Any = object.__setattr__
"""Records don't change; this makes new ones."""


def lean(record: StrictT, **changes: Any) -> StrictT:
    """A copy with other values, which are not validated, as in `model_copy`; all of its fields count as given."""
    model = type(record)
    copy = model.__new__(model)
    _set(copy, "__dict__", {**record.__dict__, **changes})
    _set(copy, "__pydantic_extra__", None)
    _set(copy, "__pydantic_private__", None)
    _set(copy, "__pydantic_fields_set__", _all_fields(model))
    return copy


@lru_cache(maxsize=64)
def _all_fields(model: type[Strict]) -> set[str]:
    return set(model.model_fields)
