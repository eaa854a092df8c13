"""How an episode becomes a prompt, and a completion an action. The recipe in task.yaml holds the same words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autorl_hpc.rollouts.environment import Transcript
from autorl_hpc.rollouts.webshop.environment import parts

WINDOW = 5
"""Exchanges that the prompt repeats."""

SYSTEM = (
    "You are shopping in an online store for a customer. You see the customer's wish, the current page and the actions that are "
    "possible on it. Choose the one action that leads best to buying a product that fits the wish. Answer with that action "
    "alone, for example `search[red shoes]` or `click[buy now]`, and nothing else."
)
PROMPT = """Buy a product in this online store that fits the customer's wish.

Wish: {question}

Available actions:
{actions}

Rules:
- Answer with exactly one of the available actions.
- To search: search[your words]
- To click: click[text as it stands in the list]
- Write nothing but the action.
{history}
Observation {n}: {observation}
Action {n}:"""

_FIELD = re.compile(r"\{([a-z]+)\}")


class Dialogue:
    """A chat of one system and one user message, which repeats the last five exchanges."""

    def prompt(self, transcript: Transcript) -> Sequence[Mapping[str, str]]:
        """The messages. Each action stands under the page that it was done on.

        The reference (AutoRL-Bench) puts it under the page that followed, and drops the first page.
        """
        pages = [transcript.first, *(turn.observation for turn in transcript.turns)]
        first = max(0, len(transcript.turns) - WINDOW)
        history = "".join(
            f"\nObservation {number + 1}: {parts(pages[number])[0]}\nAction {number + 1}: {transcript.turns[number].action}\n"
            for number in range(first, len(transcript.turns))
        )
        text, actions = parts(pages[-1])
        values = {
            "question": str(transcript.goal["question"]),
            "actions": "\n".join(f"  {action}" for action in actions),
            "history": history,
            "n": str(len(pages)),
            "observation": text,
        }
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": filled(PROMPT, values)}]

    def action(self, completion: str) -> str:
        """The completion's first line without `Action:`; `choose[...]`, the paper's older word, is a click."""
        text = completion.strip().split("\n", 1)[0].strip()
        if text.startswith("Action:"):
            text = text[len("Action:") :].strip()
        return f"click[{text[len('choose[') :]}" if text.startswith("choose[") else text


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its fields filled in one pass: a title may hold braces, or what looks like a field."""
    return _FIELD.sub(lambda match: values[match[1]], template)
