"""Export a run to a bundle, verify, anchor and rescore it. May import `grading` and `report`."""
