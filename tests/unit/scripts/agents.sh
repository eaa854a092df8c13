#!/bin/bash

# Parameters
#SBATCH --account=proj42
#SBATCH --array=0-2%2
#SBATCH --comment='autorl-hpc 0123456789ab number 2'
#SBATCH --cpus-per-task=16
#SBATCH --dependency=after:101
#SBATCH --gres=gpu:a100:2
#SBATCH --job-name=exp.agents-2.0123456789ab
#SBATCH --mem=64G
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/autorl/runs/exp/jobs/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --time=102

# setup
trap '' USR2
export PYTHONPATH=/shared/autorl/runs/exp/code/cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd
export PYTHONDONTWRITEBYTECODE=1
export AUTORL_ROOT=/shared/autorl
cd /shared/autorl/runs/exp

# command
export SUBMITIT_EXECUTOR=slurm
exec "/shared/venv/bin/python" -m autorl_hpc job task /shared/autorl/runs/exp 2
