#!/usr/bin/env bash
# Train on the hosts of a Slurm job: one task on each, in which torchrun starts the ranks.
#
#     sbatch --nodes 2 examples/slurm.sh --steps 100
#
# RANKS_PER_HOST (default: 2) is best the number of NUMA nodes, or of GPUs. The arguments go to the
# program. The hosts need the same Python environment on PATH, and this folder.
#SBATCH --job-name=pipekernels
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00
set -euo pipefail

ranks=${RANKS_PER_HOST:-2}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks > 0 ? SLURM_CPUS_PER_TASK / ranks : 1))

# Two jobs on one host need different ports.
port=$((20000 + SLURM_JOB_ID % 20000))
exec srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
  --nnodes "${#hosts[@]}" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${hosts[0]}:$port" \
  examples/hosts.py "$@"
