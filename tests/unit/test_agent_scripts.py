"""start.sh and resume.sh of agents with a program, run with a stub in the program's place: what reaches it, and by which way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

from autorl_hpc.files.layout import share

AGENTS = share("templates") / "agents"
PROGRAMS = {
    "claude-code": "claude", "codex": "codex", "gemini-cli": "gemini", "opencode": "opencode", "openhands": "openhands",
}  # fmt: skip
SESSIONS = {
    "claude-code": ".claude/projects/x/1.jsonl",
    "codex": ".codex/sessions/2026/1.jsonl",
    "gemini-cli": ".gemini/tmp/x/chats/1.json",
    "opencode": ".local/share/opencode/opencode.db-wal",
    "openhands": ".openhands/conversations/1/base_state.json",
}
GOES_ON = {
    "claude-code": ["--continue"],
    "codex": ["resume", "--last"],
    "gemini-cli": ["--resume", "latest"],
    "opencode": ["--continue"],
    "openhands": ["--resume", "--last"],
}
PROMPT = "Train the model of this workspace, pkill."
MODEL = 'odd"model\\1'

STUB = f"""#!{sys.executable}
import json, os, sys
asked = {{"argv": sys.argv[1:], "env": dict(os.environ), "stdin": sys.stdin.read(), "cwd": os.getcwd()}}
if "--file" in sys.argv:
    asked["file"] = open(sys.argv[sys.argv.index("--file") + 1]).read()
json.dump(asked, open(os.environ["ASKED"], "w"))
sys.exit(7)
"""


def run(tmp: Path, agent: str, script: str = "start.sh", **more: str) -> dict[str, Any]:
    """What the program was asked."""
    workspace = tmp / "work space"
    for folder in (workspace / ".home", tmp / "bin"):
        folder.mkdir(parents=True, exist_ok=True)
    (workspace / "prompt.md").write_text(PROMPT)
    stub = tmp / "bin" / PROGRAMS[agent]
    stub.write_text(STUB)
    stub.chmod(0o755)
    env = {
        "PATH": f"{tmp}/bin:/usr/bin:/bin",
        "HOME": str(workspace / ".home"),
        "WORKSPACE": str(workspace),
        "ASKED": str(tmp / "asked.json"),
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": "token-of-the-run",
        "AUTORL_DRIVER_MODEL": MODEL,
        "AUTORL_DRIVER_CONTEXT_TOKENS": "32768",
        "AUTORL_DRIVER_MAX_OUTPUT_TOKENS": "4096",
        **more,
    }
    words = PROMPT if script == "start.sh" else "Go on."
    done = subprocess.run(
        ["bash", str(AGENTS / agent / script)],
        env=env,
        input=words,
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",
        check=False,
    )
    assert done.returncode == 7, done.stderr  # the program's own exit code
    value: dict[str, Any] = json.loads((tmp / "asked.json").read_text())
    return value


@pytest.mark.parametrize("agent", PROGRAMS)
def test_the_prompt_is_never_on_argv(tmp_path: Path, agent: str) -> None:
    asked = run(tmp_path, agent)
    assert asked.get("file", asked["stdin"]) == PROMPT
    assert not any("pkill" in word for word in asked["argv"]) and "pkill" not in json.dumps(asked["env"])
    assert "token-of-the-run" not in json.dumps(asked["argv"])
    assert asked["cwd"] == asked["env"]["WORKSPACE"]


@pytest.mark.parametrize("agent", PROGRAMS)
def test_a_reprompt_goes_on_with_the_session_if_there_is_one(tmp_path: Path, agent: str) -> None:
    """One that was interrupted before the first word was kept needs the task, not the reprompt."""
    asked = run(tmp_path, agent, "resume.sh")
    assert asked.get("file", asked["stdin"]) == PROMPT
    assert not any(word in asked["argv"] for word in GOES_ON[agent])
    session = tmp_path / "work space" / ".home" / SESSIONS[agent]
    session.parent.mkdir(parents=True, exist_ok=True)
    session.write_text("\0ses_0123456789abABCDEFghijklmn\0")
    asked = run(tmp_path, agent, "resume.sh")
    assert asked.get("file", asked["stdin"]) == "Go on."
    assert all(word in asked["argv"] for word in GOES_ON[agent])


def test_hosted_tools_are_off_unless_the_driver_allows_them(tmp_path: Path) -> None:
    home = tmp_path / "work space" / ".home"
    assert "WebSearch,WebFetch" in run(tmp_path, "claude-code")["argv"]
    assert "WebSearch,WebFetch" not in run(tmp_path, "claude-code", AUTORL_DRIVER_TOOLS="web_search")["argv"]
    for tools, codex, gemini, opencode in (
        ("", "disabled", ["google_web_search", "web_fetch"], "deny"),
        ("web_search,web_fetch", "live", [], "allow"),
    ):
        for agent in ("codex", "gemini-cli", "opencode"):
            run(tmp_path, agent, AUTORL_DRIVER_TOOLS=tools)
        assert tomllib.loads((home / ".codex" / "config.toml").read_text())["web_search"] == codex
        assert json.loads((home / ".gemini" / "settings.json").read_text())["tools"]["exclude"] == gemini
        config = json.loads((home / ".config" / "opencode" / "opencode.json").read_text())
        assert config["permission"]["websearch"] == opencode


def test_the_driver_reaches_the_program(tmp_path: Path) -> None:
    home = tmp_path / "work space" / ".home"
    env = run(tmp_path, "claude-code")["env"]
    assert {env[name] for name in env if name.startswith("ANTHROPIC_") and "MODEL" in name} == {MODEL}
    assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768" and env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"
    run(tmp_path, "codex")
    config = tomllib.loads((home / ".codex" / "config.toml").read_text())
    assert (config["model"], config["model_context_window"]) == (MODEL, 32768)
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["env_key"]) == ("http://127.0.0.1:1/v1", "OPENAI_API_KEY")
    assert "token-of-the-run" not in (home / ".codex" / "config.toml").read_text()
    assert MODEL in run(tmp_path, "gemini-cli")["argv"]
    share = json.loads((home / ".gemini" / "settings.json").read_text())["model"]["compressionThreshold"]
    assert share * 1048576 == pytest.approx(32768 / 2, rel=0.01)
    run(tmp_path, "opencode")
    made = json.loads((home / ".config" / "opencode" / "opencode.json").read_text())
    assert made["model"] == f"autorl/{MODEL}"
    assert made["provider"]["autorl"]["models"][MODEL]["limit"] == {"context": 32768, "output": 4096}
    assert run(tmp_path, "openhands")["env"]["LLM_MODEL"] == f"openai/{MODEL}"


RD_AGENT = {
    "rdagent/app/rl/loop.py": """
from rdagent.scenarios.rl.scen.scenario import RLPostTrainingScen
def main(base_model: str = "", benchmark: str = ""):
    scen = RLPostTrainingScen()
    print(base_model, benchmark, scen.rich_style_description, scen.get_scenario_all_desc(None, simple_background=True))
""",
    "rdagent/scenarios/rl/scen/scenario.py": """
from abc import ABC, abstractmethod
class Scenario(ABC):
    @property
    @abstractmethod
    def rich_style_description(self): ...
    @abstractmethod
    def get_scenario_all_desc(self, task=None, filtered_tag=None, simple_background=None): ...
class RLPostTrainingScen(Scenario):
    background = "do sums"
""",
}
"""As in its repository at 471eb30 and on PyPI: a scenario that can't be made."""


def test_rd_agents_scenario_is_completed(tmp_path: Path) -> None:
    for name, text in RD_AGENT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = tmp_path / "bin" / "rdagent"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "WORKSPACE": str(tmp_path / "w")}
    env |= {"AUTORL_DRIVER_MODEL": "m", "OPENAI_BASE_URL": "http://x/v1", "BASE_MODEL": "tiny", "TASK": "mini"}

    def says(script: str) -> tuple[int, str]:
        argv = ["bash", str(AGENTS / "rd-agent" / script)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stdout

    assert says("check.sh") == (0, "")
    assert says("start.sh") == (0, "tiny mini do sums do sums\n")
    scenario = tmp_path / "rdagent/scenarios/rl/scen/scenario.py"
    scenario.write_text(
        scenario.read_text().replace("class RLPost", "    @abstractmethod\n    def more(self): ...\nclass RLPost")
    )
    assert says("check.sh")[0] == 1
