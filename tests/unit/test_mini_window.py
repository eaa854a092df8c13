"""mini's window: whatever a conversation holds, what is sent fits, keeps the task, and is a conversation that drivers take."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from miniparts import parts

parts()

from mini_hpc.window import Message, Window  # noqa: E402


def step(number: int, output: str, *, tools: bool = False, command: str = "ls") -> list[Message]:
    name = f"mini-{number}"
    said: Message = {
        "role": "assistant",
        "content": None if tools else f"step {number}\n```bash\n{command}\n```",
        "extra": {"actions": [{"command": command, "tool_call_id": name}]},
    }
    if tools:
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        said["tool_calls"] = [{"id": name, "type": "function", "function": function}]
    seen = {"role": "tool" if tools else "user", "tool_call_id" if tools else "call_id": name, "content": output}
    return [said, {**seen, "extra": {"returncode": 0, "raw_output": output[-500:]}}]


def talk(*steps: list[Message]) -> list[Message]:
    first = [{"role": "system", "content": "SYSTEM " * 20}, {"role": "user", "content": "TASK " * 40}]
    return [*first, *(message for each in steps for message in each)]


def acceptable(shown: list[Message]) -> None:
    """As strict as the strictest templates: roles alternate, calls are answered, arguments are JSON."""
    assert shown[0]["role"] == "system" and shown[1]["role"] == "user"
    waiting: set[str] = set()
    for before, message in itertools.pairwise(shown):
        if message["role"] == "tool":
            assert message["tool_call_id"] in waiting
            waiting.remove(message["tool_call_id"])
        else:
            assert not waiting, "a call without its answer"
            assert message["role"] != before["role"]
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"])["command"], str)
            waiting.add(call["id"])
        assert set(message) <= {"role", "content", "tool_calls", "tool_call_id"}
    assert not waiting


def test_the_oldest_outputs_are_folded_first_and_say_what_they_were() -> None:
    window = Window(8000, 2000)
    messages = talk(*(step(n, f"begins {n} " + "x" * 2500 + f" ends {n}") for n in range(8)))
    shown = window.shown(messages)
    assert window.estimate(shown) <= window.limit
    assert "<returncode>0</returncode>" in shown[3]["content"] and "ends 0" in shown[3]["content"]
    assert "begins 0" not in shown[3]["content"] and "folded" in shown[3]["content"]
    assert shown[-1]["content"] == messages[-1]["content"], "the newest stay whole"
    assert "begins 0" in messages[3]["content"], "the conversation itself is left as it is"


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_fits(seed: int, tools: bool) -> None:
    chance = random.Random(seed)
    window = Window(chance.choice([3000, 8000, 32_000]), 1000)
    messages = talk()
    for n in range(40):
        size = chance.choice([0, 10, 500, 3000, 9000])
        messages += step(
            n, "ä€x"[n % 3] * size, tools=tools, command="echo '\"\\" + "c" * chance.choice([5, 200, 4000])
        )
        if chance.random() < 0.1:
            messages.append({"role": "exit", "content": "", "extra": {}})
            messages.append({"role": "user", "content": "go on", "extra": {}})
        if chance.random() < 0.1:
            assert window.tighten(None) or window.limit == 500
        shown = window.shown(messages)
        acceptable(shown)
        assert "TASK" in shown[1]["content"] and shown[0]["content"].startswith("SYSTEM")
        # Below this nothing more can be left out: the prompt's own two messages, and the newest steps cut short.
        assert window.estimate(shown) <= max(window.limit, 2600)
