#!/bin/bash

# Parameters
#SBATCH --account=proj42
#SBATCH --comment='autorl-hpc 0123456789ab number 1'
#SBATCH --cpus-per-task=4
#SBATCH --dependency=singleton
#SBATCH --gres=gpu:a100:1
#SBATCH --job-name=exp.grader-0.0123456789ab
#SBATCH --mem=32G
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/autorl/runs/exp/jobs/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --time=468

# setup
trap '' USR2
export PYTHONPATH=/shared/autorl/runs/exp/code/cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd
export PYTHONDONTWRITEBYTECODE=1
export AUTORL_ROOT=/shared/autorl
cd /shared/autorl/runs/exp

# command
export SUBMITIT_EXECUTOR=slurm
exec "/shared/venv/bin/python" -m autorl_hpc job grader /shared/autorl/runs/exp
