"""Runs mini in a workspace: `python3 run.py < prompt`. Exit codes are in `EXIT_CODES`; see docs/agents.md."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXIT_CODES = {
    "Submitted": 0,
    "BudgetOver": 0,
    "Unreachable": 3,
    "Rejected": 4,
    "TooLong": 5,
    "RepeatedFormatError": 6,
}
WRONG_USE = 2
TERMINATED = 128 + signal.SIGTERM

CONTEXT_TOKENS = 32_768
"""Where nothing tells the driver's window."""
OUTPUT_TOKENS = 4096
NOTHING_YET = """\
You have submitted no checkpoint that was accepted: your work would count as the base model unchanged. Submit one with `./submit output/NAME`
({left}). If nothing can be submitted, give the same command again."""


class Terminated(BaseException):
    """The supervisor ends the run, or the LLM its own process; no Exception, so that nothing on the way takes it for a failure."""


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def main() -> int:
    """Runs the agent to its end."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    prompt = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    missing = [name for name in ("OPENAI_BASE_URL", "AUTORL_DRIVER_MODEL") if not os.environ.get(name)]
    if missing:
        print(f"mini: {', '.join(missing)} is not set: mini needs a driver (`driver:` in the experiment's matrix)")
        return WRONG_USE
    try:
        import minisweagent  # noqa: F401
    except ImportError as error:
        print(f"mini: {error}: mini needs the package mini-swe-agent 2.x in the Python that runs it, {sys.executable}")
        return WRONG_USE
    try:
        parameters, options = _options()
    except ValueError as error:
        print(f"mini: AUTORL_DRIVER_PARAMETERS: {error}")
        return WRONG_USE
    return _run(prompt, parameters, options)


def _options() -> tuple[dict[str, Any], Any]:
    """Fields of each request, and mini's own options, which are the parameter `mini`."""
    from mini_hpc.options import Options

    parameters = json.loads(os.environ.get("AUTORL_DRIVER_PARAMETERS") or "{}")
    if not isinstance(parameters, dict):
        raise ValueError("it is not a JSON object")
    return parameters, Options.model_validate(parameters.pop("mini", {}))


def _run(prompt: str, parameters: dict[str, Any], options: Any) -> int:
    from mini_hpc import last
    from mini_hpc.agent import INTERRUPTED, BudgetedAgent
    from mini_hpc.budget import Budget
    from mini_hpc.conversation import Conversation
    from mini_hpc.driver import Driver
    from mini_hpc.model import HttpModel
    from mini_hpc.shell import Shell
    from mini_hpc.window import Window

    workspace = Path(os.environ.get("WORKSPACE") or os.getcwd()).resolve()
    conversation = Conversation(Path(os.environ.get("HOME") or workspace) / ".mini" / "conversation.jsonl")
    budget = Budget(workspace)
    output_tokens = _positive("AUTORL_DRIVER_MAX_OUTPUT_TOKENS")
    tokens = _positive("AUTORL_DRIVER_CONTEXT_TOKENS") or CONTEXT_TOKENS
    reserve = min(output_tokens or OUTPUT_TOKENS, tokens // 3)
    driver = Driver(
        os.environ["OPENAI_BASE_URL"],
        os.environ.get("OPENAI_API_KEY", ""),
        os.environ["AUTORL_DRIVER_MODEL"],
        parameters,
        over=budget.over,
        tell=conversation.fail,
        patience_s=options.patience_s,
        idle_s=options.idle_s,
    )
    limit = reserve if output_tokens or os.environ.get("AUTORL_DRIVER_CONTEXT_TOKENS") else None
    model = HttpModel(driver, Window(tokens, reserve), budget.line, actions=options.actions, max_tokens=limit)
    told_once: list[bool] = []

    def refuse_end() -> str | None:
        if told_once or last.any_accepted(workspace):
            return None
        told_once.append(True)
        found = last.unsubmitted(workspace)
        return NOTHING_YET.format(
            left=f"{found.relative_to(workspace)} is there" if found else "there is none in output/"
        )

    first = conversation.saved[1]["content"] if len(conversation.saved) > 1 else ""
    agent = BudgetedAgent(
        model,
        Shell(workspace, budget, options.command_timeout_s, refuse_end),
        conversation,
        budget,
        again=prompt if prompt and prompt != first else INTERRUPTED,
    )
    conversation.begin(driver.model)
    if os.environ.get("AUTORL_START", "1") == "1":
        task = prompt or _task(workspace)
    else:  # started again: the prompt says why, and where nothing was saved the task comes first
        task = f"{_task(workspace)}\n\n{prompt}".strip()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = str(agent.run(task, system_text=_system(options)).get("exit_status"))
    except Terminated:
        if Budget(workspace).over():  # read anew; a few seconds are left, in which a manifest still counts
            last.submit_last(workspace, wait_s=1.0)
        return TERMINATED
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if status != "Submitted" or not last.any_accepted(workspace):
        told = last.submit_last(workspace)
        if told is not None:
            conversation.note(f"last submission: {told}")
    return EXIT_CODES.get(status, 1)


def _positive(name: str) -> int | None:
    try:
        return max(1, int(os.environ.get(name) or ""))
    except ValueError:
        return None


def _task(workspace: Path) -> str:
    """What lies in the workspace."""
    for name in ("prompt.md", "instructions.md"):
        try:
            return (workspace / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return "Read what lies in this folder, and do what it says."


def _system(options: Any) -> str:
    from mini_hpc.budget import duration

    text = (HERE / "system.md").read_text(encoding="utf-8").strip()
    actions = (HERE / f"actions-{options.actions}.md").read_text(encoding="utf-8").strip()
    return text.replace("{actions}", actions).replace("{timeout}", duration(options.command_timeout_s))


if __name__ == "__main__":
    sys.exit(main())
