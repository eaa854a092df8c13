"""mini-swe-agent's Model over `driver.py`: actions in a code block of the answer, or as calls of a tool."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

from minisweagent.exceptions import FormatError
from minisweagent.models.utils.actions_toolcall import BASH_TOOL, parse_toolcall_actions
from pydantic import BaseModel

from mini_hpc.driver import BudgetOver, Driver, Reply, TooLong
from mini_hpc.window import Message, Window, shortened

NO_BLOCK = """\
Your answer held no command. Answer with one block like this, and nothing behind it:

```bash
ls -la output/
```

If your work is done, the command is `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."""
NO_CALL = """\
Your answer could not be used: {{ error }}
Call the tool `bash` with the argument `command`. If your work is done, the command is
`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."""
CUT = """\
Your answer was cut: it reached the limit of output tokens before its command ended. Think less, and write long files in several steps
(`cat > file <<'EOF'`, then `cat >> file <<'EOF'`)."""
REST_LEFT_OUT = "[only the first command of your answer was run: give one at a time]"

_BLOCK = re.compile(
    r"^[ \t]*```(?:bash|sh|shell|mswea_bash_command)[ \t]*\n(.*?)\n?^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)|\A.*?</think>", re.DOTALL)


class HttpModelConfig(BaseModel):
    """What is kept of it in records; no key among it."""

    model_name: str
    actions: Literal["text", "tools"] = "text"
    """`text`: a code block; works with every model. `tools`: tool calls; the driver must offer them (vLLM: a tool parser)."""


class HttpModel:
    """Model of mini-swe-agent's protocol.

    Args:
        budget_line: what stands below each output.
        max_tokens: asked for at most; None: the driver decides.
    """

    def __init__(
        self,
        driver: Driver,
        window: Window,
        budget_line: Callable[[], str],
        *,
        actions: Literal["text", "tools"],
        max_tokens: int | None,
    ) -> None:
        self.config = HttpModelConfig(model_name=driver.model, actions=actions)
        self.driver, self.window, self.budget_line, self.max_tokens = driver, window, budget_line, max_tokens

    def query(self, messages: list[Message], **kwargs: Any) -> Message:
        """The driver's next message.

        Raises:
            FormatError: it holds no command; its own message comes with it, so that it is kept and its tokens are counted.
            DriverError: the driver does not answer any more.
        """
        tools = [BASH_TOOL] if self.config.actions == "tools" else []
        while True:
            shown = self.window.shown(messages)
            try:
                reply = self.driver.ask(shown, tools=tools, max_tokens=self.max_tokens)
                break
            except TooLong as error:
                self.driver.tell(f"the conversation was too long for the driver and is folded more ({error})")
                if not self.window.tighten(error.limit_tokens):
                    if error.of_budget:
                        raise BudgetOver(str(error)) from None
                    raise
        self.window.learn(shown, reply.tokens_in)
        name = f"mini-{len(messages)}"  # drivers' own ids may be empty, or the same each time
        return self._calls(reply, name) if self.config.actions == "tools" else self._block(reply, name)

    def _message(self, reply: Reply, name: str, content: str | None, actions: list[dict[str, Any]]) -> Message:
        response = {"id": name, "model": reply.model or self.config.model_name, "usage": reply.usage}
        extra = {"actions": actions, "response": response, "finish_reason": reply.finish, "timestamp": time.time()}
        return {"role": "assistant", "content": content, "extra": extra}

    def _block(self, reply: Reply, name: str) -> Message:
        text = _THOUGHT.sub("", reply.text).strip()
        found = _BLOCK.search(text)
        if found is None or not found[1].strip():
            kept = shortened(text, 2000) or "(nothing)"
            said = CUT if reply.finish == "length" else NO_BLOCK
            raise FormatError(self._message(reply, name, kept, []), _advice(said))
        # What a model writes behind its command is often an invented output: it must not be read as a real one.
        message = self._message(reply, name, text[: found.end()], [{"command": found[1], "tool_call_id": name}])
        message["extra"]["rest_left_out"] = _BLOCK.search(text, found.end()) is not None
        return message

    def _calls(self, reply: Reply, name: str) -> Message:
        message = self._message(reply, name, _THOUGHT.sub("", reply.text).strip() or None, [])
        calls = [
            SimpleNamespace(id=call.get("id"), function=SimpleNamespace(**_function(call))) for call in reply.calls
        ]
        try:
            message["extra"]["actions"] = parse_toolcall_actions(calls, format_error_template=NO_CALL)
        except FormatError as error:
            advice = CUT if reply.finish == "length" else error.messages[0]["content"]
            kept = message["content"] or shortened(json.dumps([_function(call) for call in reply.calls]), 2000)
            raise FormatError({**message, "content": kept}, _advice(advice)) from None
        for number, (call, action) in enumerate(zip(reply.calls, message["extra"]["actions"], strict=True)):
            call["id"] = action["tool_call_id"] = call.get("id") or f"{name}-{number}"
        message["tool_calls"] = reply.calls
        return message

    def format_message(self, **kwargs: Any) -> Message:
        """A message as it is."""
        return kwargs

    def format_observation_messages(
        self, message: Message, outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[Message]:
        """What came of each action, and what is left of the budget."""
        made = []
        for action, output in zip(message["extra"]["actions"], outputs, strict=False):
            parts = [f"<exception>{output['exception_info']}</exception>"] if output["exception_info"] else []
            parts.append(f"<returncode>{output['returncode']}</returncode>")
            parts.append(f"<output>\n{shortened(output['output'].strip(), self.window.output_chars)}\n</output>")
            if message["extra"].get("rest_left_out"):
                parts.append(REST_LEFT_OUT)
            parts.append(self.budget_line())
            extra = {
                "raw_output": shortened(output["output"], 2000),
                "returncode": output["returncode"],
                "exception_info": output["exception_info"],
                "timestamp": time.time(),
                **output.get("extra", {}),
            }
            content = "\n".join(part for part in parts if part)
            by_tool = self.config.actions == "tools"
            called = {"tool_call_id" if by_tool else "call_id": action["tool_call_id"]}
            made.append({"role": "tool" if by_tool else "user", **called, "content": content, "extra": extra})
        return made

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """The configuration."""
        return {**self.config.model_dump(), **kwargs}

    def serialize(self) -> dict[str, Any]:
        """For trajectories."""
        return {"info": {"config": {"model": self.config.model_dump(mode="json")}}}


def _advice(text: str) -> Message:
    return {"role": "user", "content": text, "extra": {"interrupt_type": "FormatError", "timestamp": time.time()}}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    given = function if isinstance(function, dict) else {}
    return {"name": given.get("name"), "arguments": given.get("arguments") or ""}
