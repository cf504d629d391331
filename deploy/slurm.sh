#!/bin/bash
#SBATCH --job-name=dlmserve
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
# The head on the first node, with that node's GPUs; the others join it. Keys: `dlmserve keygen keys`, once.
#   sbatch deploy/slurm.sh
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head

srun bash -c '
if [ "$(hostname -s)" = "${head%%.*}" ]; then
  exec python -m dlmserve --host 0.0.0.0 --listen tcp://0.0.0.0:5570 --keys keys/head.key \
    --devices 4 --model llada-8b --tp-layout 1,1,1,1,1,1,1,1,1,1,1,1
else
  exec python -m dlmserve join "tcp://$head:5570" --devices 4 --keys keys/node.key
fi'
