"""Prompts, answers and rewards of the scripted trainers. Standard library only."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

_MARKS = re.compile(r"<<[^<>]*>>")
_FINAL = re.compile(r"####\s*(-?\$?[\d,]*\.?\d+)")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a JSON Lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def prompt_text(recipe: Mapping[str, Any], question: str, tokenizer: Any) -> str:
    """The text that the grader will put before the answer."""
    text = _filled(recipe, question)
    if not wears_template(recipe, tokenizer):
        return text
    return _rendered(recipe, tokenizer, _turns(recipe, text), add_generation_prompt=True)


def completion_text(recipe: Mapping[str, Any], question: str, answer: str, tokenizer: Any) -> str:
    """The answer as the model should write it after the prompt; trl adds the end token where it is not there yet.

    Code keeps its indentation: behind a prompt that asks for a block it is a whole function in one, else the body alone.
    """
    code = answer.startswith((" ", "\t"))
    if code and "```" in str(recipe["prompt"]):
        clean = f"```python\n{question}{answer.rstrip()}\n```"
    else:
        clean = answer.rstrip() if code else strip_marks(answer)
    if not wears_template(recipe, tokenizer):
        return clean if code else f" {clean}"
    prompt = prompt_text(recipe, question, tokenizer)
    turns = [*_turns(recipe, _filled(recipe, question)), {"role": "assistant", "content": clean}]
    whole = _rendered(recipe, tokenizer, turns, add_generation_prompt=False)
    return whole.removeprefix(prompt).rstrip() if whole.startswith(prompt) else clean


def held_out(row: Mapping[str, Any]) -> bool:
    """Whether a training row belongs to the validation part: one in ten, by its question."""
    return hashlib.sha256(str(row["question"]).encode()).digest()[0] % 10 == 0


def wears_template(recipe: Mapping[str, Any], tokenizer: Any) -> bool:
    """Whether prompts go through the chat template."""
    return recipe.get("chat", "none") == "auto" and bool(getattr(tokenizer, "chat_template", None))


def strip_marks(answer: str) -> str:
    """The answer without GSM8K's calculator marks such as `<<48/2=24>>`."""
    return _MARKS.sub("", answer).strip()


def final_number(text: str) -> Decimal | None:
    """The number after the first `####`; thousands separators and a dollar sign are allowed.

    >>> final_number("so #### -$1,200.50"), final_number("#### none")
    (Decimal('-1200.50'), None)
    """
    match = _FINAL.search(text)
    return None if match is None else Decimal(match[1].replace(",", "").replace("$", ""))


def _filled(recipe: Mapping[str, Any], question: str) -> str:
    return str(recipe["prompt"]).replace("{question}", question)


def _turns(recipe: Mapping[str, Any], text: str) -> list[dict[str, str]]:
    system = recipe.get("system")
    first = [{"role": "system", "content": str(system)}] if system else []
    return [*first, {"role": "user", "content": text}]


def dated(recipe: Mapping[str, Any], tokenizer: Any) -> str:
    """The tokenizer's chat template, for which today is the recipe's date, as it is for graders."""
    template = str(tokenizer.get_chat_template())
    if "strftime_now" not in template or not recipe.get("date"):
        return template
    now = datetime.datetime.fromisoformat(recipe["date"])
    codes = {f"%{flag}{letter}" for letter in "aAbBcdDeFHIjmMpSTuUwWxXyYZz" for flag in ("-", "")}
    steps = "".join(f"|replace({code!r}, {now.strftime(code)!r})" for code in sorted(codes))
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{steps} }}}}{{%- endmacro %}}\n{template}"


def _rendered(
    recipe: Mapping[str, Any], tokenizer: Any, turns: list[dict[str, str]], add_generation_prompt: bool
) -> str:
    template = dated(recipe, tokenizer)
    text = tokenizer.apply_chat_template(
        turns, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    begun = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("").input_ids
    return str(text).removeprefix(tokenizer.bos_token if begun else "")  # tokenizing adds it again
