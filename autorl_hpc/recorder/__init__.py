"""The recorder: what an agent did, seen from outside. A process of its own: whatever becomes of it, the agent works on."""
