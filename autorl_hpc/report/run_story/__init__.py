"""The story of a run from its files: ledger, recorder's lines, code.git, events, log. Nothing here is a score."""
