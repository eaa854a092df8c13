"""Traces that agents' programs write of themselves: one file a format, and what follows them. See docs/traces.md."""
