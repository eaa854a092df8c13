"""Keeps an agent from everything but its workspace. See docs/threat-model.md."""
