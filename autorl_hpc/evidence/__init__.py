"""A run as one file, and its score measured again elsewhere. This room stands above `grading` and `report`: it needs both."""
