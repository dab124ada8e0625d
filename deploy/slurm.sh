#!/bin/bash
# A replica on each node and the router on the first: MODEL=FOLDER sbatch deploy/slurm.sh
# deploy/README.md says where the keys come from. At the end of its time the job drains: B:TERM@180 is above the drains.
#SBATCH --job-name=shardlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --signal=B:TERM@180
set -euo pipefail
: "${MODEL:?MODEL=FOLDER says what to serve}"
gpus=${SLURM_GPUS_ON_NODE:?run this by sbatch}
drain=75  # seconds, first of the router, then of the replicas

# The router, which is started last, ends first: its streams need the replicas. `wait` returns at the signal, before what
# it waits for has ended; so each is waited for again.
finish() {
  trap '' TERM INT
  for process in $(jobs -p | tac); do
    kill -TERM "$process" 2>/dev/null || true
    wait "$process" || true
  done
  exit 0
}
trap finish TERM INT  # before there is anything that a signal would leave behind

# One that dies takes no other along; the router leaves it out.
srun --kill-on-bad-exit=0 python -m launch.serve --model="$MODEL" --tensor="$gpus" \
  --host=0.0.0.0 --port=8000 --drain_seconds="$drain" &
replicas=$!

words=()
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  words+=(--replica="http://$node:8000")
done
python -m launch.router "${words[@]}" --host=0.0.0.0 --port=8080 --drain_seconds="$drain" &
router=$!
wait "$router"
kill -TERM "$replicas" 2>/dev/null || true
wait "$replicas" || true
