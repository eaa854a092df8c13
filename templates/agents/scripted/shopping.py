"""Experts for wishes in a shop and for questions that are answered by searching, which know the training goal's solution.

They do what a player could do who reads well: search for the wish's own words, and take what the goal names only where the page
shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

ACTIONS_HEADING = "Available actions:\n"
PAGES = 5  # of results: a search shows fifty products, ten a page
_PRICE = re.compile(r",? and price lower than .*$")
_WITH = re.compile(r" with (?:[^:]{1,40}): .*$")
_WORDS = re.compile(r"[A-Z][\w'-]*(?: (?:of |the )?[A-Z][\w'-]*)*")

Turns = Sequence[tuple[str, str]]


class Shopper:
    """Buys the product that the wish was made from, with its options, if a search by the wish's words shows it."""

    def act(self, goal: Mapping[str, Any], first: str, turns: Turns) -> str | None:
        """The next action; None where the product isn't found."""
        page = turns[-1][1] if turns else first
        possible = [line.strip() for line in page.split(ACTIONS_HEADING, 1)[-1].splitlines()]
        product = f"click[{goal['product'].lower()}]"
        if not turns:
            return f"search[{self._query(goal)}]"
        if product in possible:
            return product
        if "click[buy now]" in possible:
            since = next(n for n in range(len(turns) - 1, -1, -1) if turns[n][0] == product)
            clicked = {action for action, _ in turns[since + 1 :]}
            wanted = [f"click[{value.lower()}]" for value in goal["options"].values()]
            return next((one for one in wanted if one in possible and one not in clicked), "click[buy now]")
        pages = sum(action == "click[next >]" for action, _ in turns)
        return "click[next >]" if "click[next >]" in possible and pages + 1 < PAGES else None

    def _query(self, goal: Mapping[str, Any]) -> str:
        wish = _WITH.sub("", _PRICE.sub("", str(goal["question"])))
        return " ".join(re.sub(r"[^\w\s$.%'-]", " ", wish).split())


class Searcher:
    """Searches for the question, then for the names in it and in what was found, until the results hold the whole answer."""

    def __init__(self, steps: int, thoughts: bool) -> None:
        self._steps, self._thoughts = steps, thoughts

    def act(self, goal: Mapping[str, Any], first: str, turns: Turns) -> str | None:
        """The next action, behind a thought where the task wants one; None where the answer isn't found."""
        del first
        seen = "\n".join(observation for _, observation in turns)
        items = [part.strip() for part in re.split(r"[;,]", str(goal["answer"])) if part.strip()]
        if turns and all(item.lower() in seen.lower() for item in items):
            return self._with_thought("The results give the answer.", f"answer[{goal['answer']}]")
        tried = "\n".join(action for action, _ in turns)
        question = " ".join(str(goal["question"]).split())
        candidates = [question, *_WORDS.findall(question)[1:], *_WORDS.findall(seen)]
        query = next((one for one in candidates if f"search[{one}]" not in tried), None)
        if query is None or len(turns) + 1 >= self._steps:
            return None
        return self._with_thought("I need to look this up.", f"search[{query}]")

    def _with_thought(self, thought: str, action: str) -> str:
        return f"{thought}\nAction: {action}" if self._thoughts else action


class Walkthrough:
    """Plays the plan that stands beside the goal."""

    def act(self, goal: Mapping[str, Any], first: str, turns: Turns) -> str | None:
        """The plan's next action; None behind its end."""
        del first
        plan = goal["walkthrough"]
        return str(plan[len(turns)]) if len(turns) < len(plan) else None
