"""Agents: what a definition tells (file.py), where definitions lie (folders.py), those of AutoRL-Bench (reference.py), and whether
an agent's program is here (checks.py)."""

from autorl_hpc.agents.definition import (
    PATH_VARIABLE,
    Agent,
    AgentDriver,
    AgentFile,
    Dialect,
    agent_folders,
    agent_names,
    load_agent,
    put_first,
)

__all__ = [
    "PATH_VARIABLE",
    "Agent",
    "AgentDriver",
    "AgentFile",
    "Dialect",
    "agent_folders",
    "agent_names",
    "load_agent",
    "put_first",
]
