"""Gateway: the only way from a sandbox to the driver, in its own process, started by the supervisor. See docs/gateway.md.

It forwards requests and answers unchanged, replaces the run's token by the real key, refuses what would reach beyond the
driver (hosted tools, remote addresses), counts tokens and cost against the budget, and writes driver.jsonl.
"""
