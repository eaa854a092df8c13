"""Scores one answer."""

import re


def evaluate(question, model_answer, reference, near=0, **kw):
    numbers = re.findall(r"-?\d+", model_answer)
    if not numbers:
        return 0.0
    missed_by = abs(int(numbers[0]) - int(reference))
    if missed_by == 0:
        return 1.0
    return 0.5 if missed_by <= near else 0.0
