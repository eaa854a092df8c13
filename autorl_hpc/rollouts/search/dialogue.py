"""ReAct's loop as plain text: thought, action, observation.

The reference stops the model at `\\nAction:` and then looks for an action in what it wrote: an action on a line of its own, as
its own instructions ask for, is cut off before it is seen, and no model that follows them ever searches. Here the stop string
is `\\nObservation:` alone, so that a completion ends behind its action.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autorl_hpc.rollouts.environment import Transcript

STOP = ("\nObservation:",)
"""The recipe's stop strings: what a model makes up in place of the environment."""

SYSTEM = """Answer the question by searching. You take turns: you write a thought and one action, and then you are shown what was observed.

Write exactly this form:
Thought: what you know, and what you need next
Action: search[words to look for]

When you know the answer, end with:
Thought: why this is the answer
Action: answer[the answer]

Rules:
- One action a turn, on a line of its own.
- For a "Single Answer" give one answer; for a "Set Answer" give all of them and no others, with commas between them.
- Write the answer alone between the brackets, without explanation.
- You have {steps} actions; the last one must be an answer."""
PROMPT = "Question: {question}\nAnswer type: {answer_type}\n\n"
THOUGHT = "Thought:"
LAST = "(This is your last action: answer now.)\n"
STEPS = 6

_ACTION = re.compile(r"Action[ \t*]*:[ \t*]*(search|answer)[ \t]*\[", re.IGNORECASE)
_BARE = re.compile(r"\s*(search|answer)[ \t]*\[", re.IGNORECASE)


class Dialogue:
    """Turns an episode into a prompt and a completion into thought and action. The option `max_steps` is the recipe's."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.steps = int((options or {}).get("max_steps") or STEPS)

    def prompt(self, transcript: Transcript) -> str:
        """Instructions, question, and everything said so far."""
        turns = "".join(f"{THOUGHT} {action}\nObservation: {seen}\n" for action, seen in transcript.turns)
        last = LAST if len(transcript.turns) + 1 >= self.steps else ""
        head = SYSTEM.replace("{steps}", str(self.steps))
        return f"{head}\n\n{asked(transcript.goal)}{turns}{last}{THOUGHT}"

    def action(self, completion: str) -> str:
        """Thought and first action; what comes behind the action is dropped. Without one, the completion as it stands."""
        text = completion.strip().removeprefix(THOUGHT).strip()
        match = _ACTION.search(text)
        end = None if match is None else _closing(text, match.end())
        return text if end is None else text[: end + 1]


def asked(goal: Mapping[str, Any]) -> str:
    """The question as the prompt holds it."""
    kind = str(goal.get("answer_type", ""))
    # In one pass: a question may hold braces.
    return re.sub(
        r"\{(question|answer_type)\}",
        lambda field: kind if field[1] == "answer_type" else str(goal["question"]),
        PROMPT,
    )


def parse(action: str) -> tuple[str, str]:
    """Name and argument of the first action: `search` or `answer` and what stands in its brackets; ("", "") where there is none.

    `search[...]` without `Action:` before it is taken where it begins what was written.
    """
    match = _ACTION.search(action) or _BARE.match(action)
    end = None if match is None else _closing(action, match.end())
    if match is None or end is None:
        return "", ""
    argument = " ".join(action[match.end() : end].split())
    return (match[1].lower(), argument) if argument else ("", "")


def _closing(text: str, start: int) -> int | None:
    """Where the bracket closes that was opened before `start`, brackets inside it counted; the line's last one where they don't
    balance; None where there is none: the completion was cut off."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "[") - (text[place] == "]")
        if depth == 0:
            return place
    end = text.find("\n", start)
    place = text.rfind("]", start, len(text) if end < 0 else end)
    return None if place < 0 else place
