"""The gateway: the one way from a sandbox to the driver. A process of its own, started by the supervisor.

It passes requests and answers as they are, replaces the run's token by the real key, refuses what would reach beyond the driver
(hosted tools, remote addresses), counts tokens and cost, keeps their budgets and writes driver.jsonl. See docs/gateway.md.
"""
