"""Pure scorers shared by tasks, and the statistics of one score."""
