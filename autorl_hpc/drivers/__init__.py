"""The job that serves a driver (`vllm serve`): start, watch and restart it; and how supervisors wait for it."""
