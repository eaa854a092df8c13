"""The scheduler: Slurm's clients, the state of our jobs, a site's limits and cluster profiles; and where vLLM is."""
