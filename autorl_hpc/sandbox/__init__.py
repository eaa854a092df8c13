"""Restricts an agent to its workspace. See docs/threat-model.md."""
