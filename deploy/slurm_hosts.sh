#!/bin/bash
# One model over all nodes of a job, a stage of the pipeline on each:
# MODEL=FOLDER sbatch --nodes=2 deploy/slurm_hosts.sh
# Clients call port 8000 of the first node. At the end of its time the job drains: B:TERM@120 is above --drain_seconds.
#SBATCH --job-name=shardlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
set -euo pipefail
: "${MODEL:?MODEL=FOLDER says what to serve}"
gpus=${SLURM_GPUS_ON_NODE:?run this by sbatch}

# A signal reaches all processes; the first one lets what runs come to its end, and the others end with it. `wait`
# returns at the signal, before that.
trap 'kill -TERM $(jobs -p) 2>/dev/null || true' TERM INT  # by its list, as a signal may come before $! is kept
srun python -m launch.serve --distributed --model="$MODEL" --pipeline="${SLURM_NNODES:?}" --tensor="$gpus" \
  --host=0.0.0.0 --port=8000 --drain_seconds=75 &
server=$!
wait "$server" || wait "$server"
