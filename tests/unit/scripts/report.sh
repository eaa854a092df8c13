#!/bin/bash

# Parameters
#SBATCH --account=proj42
#SBATCH --comment='autorl-hpc 0123456789ab number 5'
#SBATCH --dependency=afterany:101:103:104
#SBATCH --job-name=exp.report.0123456789ab
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/autorl/runs/exp/jobs/%j_0_log.out
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --time=30

# setup
trap '' USR2
export PYTHONPATH=/shared/autorl/runs/exp/code/cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd
export PYTHONDONTWRITEBYTECODE=1
export AUTORL_ROOT=/shared/autorl
cd /shared/autorl/runs/exp

# command
export SUBMITIT_EXECUTOR=slurm
exec "/shared/venv/bin/python" -m autorl_hpc job finish /shared/autorl/runs/exp
