"""The search environment and its ReAct dialogue. A scorer rates the answers; see `Environment.step`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.environment import Step, Transcript
from autorl_hpc.rollouts.search.backends import Result, Setup, make_backend
from autorl_hpc.rollouts.search.matching import SINGLE, compare

# --- ReAct dialogue in plain text: thought, action, observation
# AutoRL-Bench's reference stops the model at `\\nAction:`, so an action on its own line, as its instructions ask for, is cut off
# and such a model never searches. Here the only stop string is `\\nObservation:`, so that a completion ends after its action.

STOP = ("\nObservation:",)  # The recipe's stop strings, so that the model does not invent observations
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
    """Turns an episode into a prompt, and a completion into thought and action. The option `max_steps` is the recipe's."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.steps = int((options or {}).get("max_steps") or STEPS)

    def prompt(self, transcript: Transcript) -> str:
        """Return instructions, question, and all turns so far."""
        turns = "".join(f"{THOUGHT} {action}\nObservation: {seen}\n" for action, seen in transcript.turns)
        last = LAST if len(transcript.turns) + 1 >= self.steps else ""
        head = SYSTEM.replace("{steps}", str(self.steps))
        return f"{head}\n\n{asked(transcript.goal)}{turns}{last}{THOUGHT}"

    def action(self, completion: str) -> str:
        """Return thought and first action without the text after it; the unchanged completion if there is no action."""
        text = completion.strip().removeprefix(THOUGHT).strip()
        match = _ACTION.search(text)
        end = None if match is None else _closing(text, match.end())
        return text if end is None else text[: end + 1]


def asked(goal: Mapping[str, Any]) -> str:
    """Return the question as the prompt holds it."""
    kind = str(goal.get("answer_type", ""))
    # In one pass, because a question may hold braces.
    return re.sub(
        r"\{(question|answer_type)\}",
        lambda field: kind if field[1] == "answer_type" else str(goal["question"]),
        PROMPT,
    )


def parse(action: str) -> tuple[str, str]:
    """Return name and argument of the first action, `search` or `answer` and the text in brackets; ("", "") if there is none.
    `search[...]` without `Action:` is accepted at the beginning of the text."""
    match = _ACTION.search(action) or _BARE.match(action)
    end = None if match is None else _closing(action, match.end())
    if match is None or end is None:
        return "", ""
    argument = " ".join(action[match.end() : end].split())
    return (match[1].lower(), argument) if argument else ("", "")


def _closing(text: str, start: int) -> int | None:
    """Return the position of the bracket that closes the one before `start`, counting nested ones; the line's last bracket if
    they don't balance; None if there is none because the completion was cut off."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "[") - (text[place] == "]")
        if depth == 0:
            return place
    end = text.find("\n", start)
    place = text.rfind("]", start, len(text) if end < 0 else end)
    return None if place < 0 else place


TRAIN = "train.jsonl"
RESULTS = 3  # Results per search, as in the reference
MAX_RESULT_CHARS = 600  # Limit of one result with its title, because online engines may send more
NOTHING = "Nothing was found."
NO_ACTION = "That is no action. Write `Action: search[words]` or `Action: answer[the answer]`."


def goals(data: Path) -> Iterator[dict[str, Any]]:
    """Yield the training questions with their answers, which the environment's reward needs."""
    with open(Path(data) / TRAIN, "rb") as file:
        for line in file:
            yield json.loads(line)


class Environment:
    """Serves one question after another. Options: `search` and those of the back end (see backends.py); `results`: results per
    search, default 3."""

    def __init__(self, data: Path, *, held_out: bool = False, options: Mapping[str, Any] | None = None) -> None:
        """Open the search. Raises OSError, ValueError: the back end can't be created; see `make_backend`."""
        options = options or {}
        self._backend = make_backend(Setup(options, Path(data), held_out))
        self._results = int(options.get("results", RESULTS))
        self._goal: Mapping[str, Any] = {}

    def reset(self, goal: Mapping[str, Any], seed: int = 0) -> str:
        """Begin with a question. `seed` is not used, because nothing is random."""
        del seed
        self._goal = goal
        return asked(goal).strip()

    def step(self, action: str) -> Step:
        """Perform a search, or end the episode with the answer, which is then the last observation, for the scorer. The reward
        is the F1 of exactly matching items if the goal holds its `answer`, as training goals do. Raises SearchFailed."""
        name, argument = parse(action)
        if name == "answer":
            return Step(argument, True, self._reward(argument))
        if name == "search":
            return Step(shown(self._backend.search(argument, self._results)))
        return Step(NO_ACTION)

    def close(self) -> None:
        """Do nothing: other environments of this process share the corpus."""

    def _reward(self, answer: str) -> float:
        if "answer" not in self._goal:
            return 0.0
        return compare(answer, str(self._goal["answer"]), str(self._goal.get("answer_type", SINGLE))).f1


def shown(results: list[Result]) -> str:
    """Return results as the model sees them, numbered, one per line. Line ends inside could look like the environment's text."""
    lines = (f"[{number}] {row.title}: {row.snippet}" for number, row in enumerate(results, start=1))
    return "\n".join(" ".join(line.split())[:MAX_RESULT_CHARS] for line in lines) or NOTHING
