"""Trusted side of an agent job: workspace, clock, agent process, intake, bridge."""
