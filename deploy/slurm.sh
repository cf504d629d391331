#!/bin/bash
#SBATCH --job-name=dlmserve
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --mem=0
# The head on the first node, with that node's devices; the other nodes join it. Keys: `dlmserve keygen keys`, once.
#   sbatch deploy/slurm.sh --model llada-8b
# Arguments are the head's. In the environment: DEVICES of each node (default: its GPUs as asked for), TP_LAYOUT
# (default: an instance per device), KEYS (folder; default: keys), PORT for the nodes, PYTHON. To stop it, with its
# nodes there until running requests are done:
#   scancel --batch --signal=TERM JOB
set -euo pipefail
# As asked for, which may be a100:4: an exclusive node has more, but srun gives the others no more than that.
gpus=${SLURM_GPUS_PER_NODE:-1}
devices=${DEVICES:-${gpus##*:}}
ones=$(printf ',1%.0s' $(seq $((devices * SLURM_JOB_NUM_NODES))))
layout=${TP_LAYOUT:-${ones:1}}
keys=${KEYS:-keys}
port=${PORT:-5570}
python=${PYTHON:-python}

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --relative=1 --nodes=$others --ntasks=$others bash -c 'exec "$@" --name "$SLURMD_NODENAME"' join \
    "$python" -m dlmserve join "tcp://$(hostname):$port" --devices "$devices" --keys "$keys/node.key" &
fi
# The head takes the script's place: it gets the signal, and the job ends with it. Slurm kills KillWait (30 s) after a
# plain scancel or the time limit, and draining is over before that.
exec "$python" -m dlmserve --host 0.0.0.0 --listen "tcp://0.0.0.0:$port" --keys "$keys/head.key" --drain-s 20 \
  --devices "$devices" --tp-layout "$layout" "$@"
