"""Another suite's reading of GSM8K answers, bit for bit and with its faults, so that scores can be laid beside published
ones (scorer `gsm8k-opencompass`). Pure functions, standard library only, linear in the text's length."""

from __future__ import annotations

import re
from collections import deque
from typing import Final

from autorl_hpc.scoring.thinking import without_closed_thinking

VERSION: Final = "a5acc4bb"
"""Of the scorer: the revision of the other suite that it repeats."""


def opencompass_extract(text: str) -> str:
    """The answer as the reference extracts it, faults included on purpose (scorer `gsm8k-opencompass`).

    Source: open-compass/opencompass @ a5acc4bb, opencompass/datasets/gsm8k.py (`gsm8k_postprocess`), after
    the model-level `extract-non-reasoning-content` of opencompass/utils/text_postprocessors.py. The last
    match of `\\-?\\d+\\.\\d+|\\-?\\d+` before the first `Question:`, else `NULL`. Known faults: `8,000` gives
    `000`, "18. (9 - 3 = 6 left)" gives `6`, "10-3" gives `-3`, a text that begins with `Question:` gives
    `NULL`.
    """
    if "<think>" not in text and "</think>" in text:
        text = text.rsplit("</think>", maxsplit=1)[-1].strip()
    else:
        text = without_closed_thinking(text).strip()
    last = deque(re.finditer(r"\-?\d+\.\d+|\-?\d+", text.split("Question:")[0]), maxlen=1)
    return last[0].group() if last else "NULL"


def opencompass_correct(pred: str, gold_answer: str) -> bool:
    """Whether an extracted answer counts as right in the reference; `gold_answer` is the row's `answer`.

    Source: as for `opencompass_extract` (`gsm8k_dataset_postprocess` and `Gsm8kEvaluator.is_equal`). Equal
    strings, or floats within 1e-6 of the integer. ValueError if the gold answer has no `#### `.
    """
    parts = gold_answer.split("#### ")
    if len(parts) < 2:
        raise ValueError(f"gold answer has no '#### ': {gold_answer[-80:]!r}; check the task's data")
    gold = parts[1].replace(",", "")
    try:
        return pred == gold or abs(float(pred) - int(gold)) < 1e-6
    except (ValueError, OverflowError):
        return False
