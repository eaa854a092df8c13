"""Recorder: observes from outside what an agent does. It runs in its own process, so its failures never stop the agent."""
