"""The story of a run from its files: ledger, recorder files, code.git, events, agent.log. Nothing here enters a score."""
