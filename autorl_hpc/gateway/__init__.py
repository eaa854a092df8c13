"""Gateway: the only way from a sandbox to the driver, in a process of its own. See docs/gateway.md."""
