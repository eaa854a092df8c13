"""Agents: their definitions and folders (definition.py), and checks of their programs (program_check.py)."""

from autorl_hpc.agents.definition import PATH_VARIABLE, Agent, AgentFile, agent_names, load_agent, put_first

__all__ = ["PATH_VARIABLE", "Agent", "AgentFile", "agent_names", "load_agent", "put_first"]
