"""Traces that agents' programs write: one parser file per format, and the code that follows them. See docs/traces.md."""
