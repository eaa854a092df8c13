"""The grader daemon: claims queue entries, scores them with a warm engine, commits scores, closes runs."""
