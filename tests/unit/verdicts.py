"""A judge's verdict as it is read, and the JSON that it is written in."""

from __future__ import annotations

from autorl_hpc.scoring.deepsearchqa import ParsedVerdict

WHOLE = ParsedVerdict({"Belgium": True, "France": False}, ("Italy",))


def wrapped(details: str, excessive: str = "[]", explanation: str = '"x"') -> str:
    return (
        f'{{"Answer Correctness": {{"Explanation": {explanation}, "Correctness Details": {details}, '
        f'"Excessive Answers": {excessive}}}}}'
    )
