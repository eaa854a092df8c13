"""A leaderboard that strangers can feed: a submission's format, its check, and a static site made out of accepted bundles."""
