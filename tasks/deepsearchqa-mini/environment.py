"""The search of `deepsearchqa` with a prompt that fits a context of 512 tokens: no instructions, and only the last results."""

from __future__ import annotations

from autorl_hpc.rollouts.environment import Transcript
from autorl_hpc.rollouts.search import Environment, goals
from autorl_hpc.rollouts.search.search_environment import parse

__all__ = ["Dialogue", "Environment", "goals"]

PROMPT = """Question: {question}
Answer type: {answer_type}
{history}>"""
"""Filled as task.yaml's, which holds the same words."""
SHOWN = 2
"""Turns whose results the prompt repeats; of earlier ones the action alone."""


class Dialogue:
    """One plain text; an action is one line: `search[words]` or `answer[text]`."""

    def prompt(self, transcript: Transcript) -> str:
        """The question, what was done, and what was found last."""
        turns = transcript.turns
        first = len(turns) - SHOWN
        history = "".join(
            f"> {turn.action}\n" + (f"{turn.observation}\n" if number >= first else "")
            for number, turn in enumerate(turns)
        )
        goal = transcript.goal
        return f"Question: {goal['question']}\nAnswer type: {goal['answer_type']}\n{history}>"

    def action(self, completion: str) -> str:
        """The first line; an action in it without what stands around it."""
        line = completion.strip().split("\n", 1)[0].strip()
        name, argument = parse(line)
        return f"{name}[{argument}]" if name else line
