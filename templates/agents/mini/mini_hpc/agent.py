"""mini-swe-agent's agent with a conversation that outlives its process, and with ends that a budget brings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import InterruptAgentFlow, LimitsExceeded

from mini_hpc.budget import Budget
from mini_hpc.conversation import Conversation, Message
from mini_hpc.driver import BudgetOver, DriverError
from mini_hpc.model import HttpModel
from mini_hpc.shell import Shell

MAX_FORMAT_ERRORS = 10
"""In a row. Small models need more than three tries to find the form again."""

INTERRUPTED = """\
Your process was interrupted and started again, perhaps on another node. Programs that you left running may be gone; files are as they
were. Look first: `ps aux | head -30; ./time; ./scores; ls -la output/`. Then go on."""
ENDED = "You had ended your work here."
LOST = "<exception>The process was interrupted before this command's outcome was known.</exception>"


class BudgetedAgent(DefaultAgent):
    """Goes on with a saved conversation, and ends when the budget or the driver does."""

    def __init__(self, model: HttpModel, env: Shell, conversation: Conversation, budget: Budget, again: str) -> None:
        """`again`: what an agent that goes on is told."""
        super().__init__(
            model,
            env,
            system_template="{{ system_text }}",
            instance_template="{{ task }}",
            cost_limit=0.0,
            max_consecutive_format_errors=MAX_FORMAT_ERRORS,
        )
        self.conversation, self.budget, self.again = conversation, budget, again

    def add_messages(self, *messages: Message) -> list[Message]:
        """Adds and keeps messages. `run` begins with the first two: a saved conversation takes their place."""
        if not self.messages and self.conversation.saved:
            self.messages.extend(self.conversation.saved)
            self.n_calls = sum(message["role"] == "assistant" for message in self.messages)
            messages = (*_unanswered(self.messages), {"role": "user", "content": self.again, "extra": _now()})
        for message in messages:
            self.conversation.add(message)
        return super().add_messages(*messages)

    def query(self) -> Message:
        """The driver's next message. Raises minisweagent's exceptions at the budget's end and the driver's."""
        try:
            over = self.budget.over()
            if over is not None:
                raise BudgetOver(over)
            return super().query()
        except BudgetOver as error:
            raise LimitsExceeded(_exit("BudgetOver", str(error))) from None
        except DriverError as error:
            raise InterruptAgentFlow(_exit(type(error).__name__, str(error))) from None

    def save(self, path: Path | None, *extra_dicts: Any) -> dict[str, Any]:
        """Nothing: each message was kept when it was added."""
        return {}


def _unanswered(messages: list[Message]) -> list[Message]:
    """An answer for each action whose outcome was lost: a driver takes no call without one."""
    answered = {message.get("tool_call_id") or message.get("call_id") for message in messages}
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), {})
    made, text = [], ENDED if messages[-1]["role"] == "exit" else LOST
    for action in (last.get("extra") or {}).get("actions") or []:
        if action["tool_call_id"] not in answered:
            by_tool = bool(last.get("tool_calls"))
            called = {"tool_call_id" if by_tool else "call_id": action["tool_call_id"]}
            made.append({"role": "tool" if by_tool else "user", **called, "content": text, "extra": _now()})
    return made


def _exit(status: str, text: str) -> Message:
    return {"role": "exit", "content": text, "extra": {"exit_status": status, "submission": "", **_now()}}


def _now() -> dict[str, Any]:
    return {"timestamp": time.time()}
