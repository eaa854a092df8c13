"""The shop of `webshop` with a prompt that fits a context of 512 tokens: the wish, the page, and what was done so far."""

from __future__ import annotations

from autorl_hpc.rollouts.environment import Transcript
from autorl_hpc.rollouts.webshop import Environment, shop_environment
from autorl_hpc.rollouts.webshop.shop_environment import SEPARATOR, parts

__all__ = ["Dialogue", "Environment"]

PROMPT = """Wish: {question}
Page: {page}
Done: {done}
Do:"""
"""Filled as task.yaml's, which holds the same words."""
REMEMBERED = 3
"""Actions that the prompt repeats."""


class Dialogue(shop_environment.Dialogue):
    """One plain text."""

    def prompt(self, transcript: Transcript) -> str:
        """The page without what the wish says already; the actions are not listed: all of them can be seen on the page."""
        question = str(transcript.goal["question"])
        text, _ = parts(transcript.turns[-1].observation if transcript.turns else transcript.first)
        values = {
            "question": question,
            "page": text.replace(f"Instruction:{SEPARATOR}{question}{SEPARATOR}", "").replace(SEPARATOR, " | "),
            "done": " ".join(turn.action for turn in transcript.turns[-REMEMBERED:]) or "nothing",
        }
        return shop_environment.filled(PROMPT, values)
