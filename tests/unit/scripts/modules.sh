#!/bin/bash

# Parameters
#SBATCH --account=proj42
#SBATCH --array=0-2%2
#SBATCH --comment='autorl-hpc 0123456789ab number 2'
#SBATCH --constraint='a100|h100'
#SBATCH --cpus-per-task=16
#SBATCH --dependency=after:101
#SBATCH --exclusive
#SBATCH --gpus-per-node=a100:2
#SBATCH --job-name=exp.agents-2.0123456789ab
#SBATCH --licenses=scratch:1
#SBATCH --mail-type=END,FAIL
#SBATCH --mem=64G
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/autorl/runs/exp/jobs/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --signal=B:USR2@90
#SBATCH --time=102

# setup
trap '' USR2
command -v module >/dev/null || source /etc/profile
module load cuda/12.4
module load python/3.11.6
ulimit -c 0
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=8
export PYTHONPATH=/shared/autorl/runs/exp/code/cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1
export AUTORL_ROOT=/shared/autorl
cd /shared/autorl/runs/exp

# command
export SUBMITIT_EXECUTOR=slurm
exec "$HOME/my venv/bin/python" -m autorl_hpc job task /shared/autorl/runs/exp 2
