"""Launch an experiment: expand the matrix to runs, plan the jobs, submit them here or to Slurm, cancel them."""
