"""The observer: what runs inside the agent's own Python processes. Laid into workspaces as a folder; imports nothing of the suite."""
