#!/usr/bin/env bash
# Train on a GKE cluster with XPK (`pip install xpk`); use this for TPU7x and later. The script
# checks the number of chips and creates one workload. GKE restarts its pods, which resume from
# WORKDIR. The script builds and pushes no image: IMAGE must contain this repository as its working
# folder, installed with its TPU extra, for example by this Dockerfile:
#
#   FROM python:3.12
#   COPY . /ragen_jax
#   WORKDIR /ragen_jax
#   RUN pip install -e .[tpu]
#
#   PROJECT        Google Cloud project; required
#   ZONE           zone of the cluster; required
#   CLUSTER        name of the GKE cluster; required
#   NAME           name of the workload; required
#   ACCELERATOR    XPK's --tpu-type, e.g. tpu7x-16, tpu7x-2x2x2, v6e-16, v5p-8, v5litepod-16;
#                  required. The number is that of chips for v5litepod and v6e, of cores (two per
#                  chip) for others
#   IMAGE          container image, pushed where the cluster can pull it; required
#   WORKDIR        folder of the run: a mount that all pods share (Filestore, NFS); required
#   CONFIG         config file[:PRESET], a path inside IMAGE; needed for a new run
#   NUM_SLICES     number of slices; default 1
#   MAX_RESTARTS   maximum number of restarts of the workload; default 10; none after bad input or a
#                  stopping rule
#   GRACE_SECONDS  seconds after a pod's SIGTERM to finish the step and save; default 120
#   DRY_RUN        1: print the command and run nothing; default 0
#
# Further arguments are passed to train. Exit code: xpk's, once the workload is queued.
#
# Example:
#   PROJECT=my-project ZONE=us-central1-c CLUSTER=my-cluster NAME=sokoban ACCELERATOR=tpu7x-16 \
#     IMAGE=us-docker.pkg.dev/my-project/images/ragen_jax:1 WORKDIR=/mnt/shared/sokoban \
#     CONFIG=configs/sokoban.py:qwen2.5-3b launch/gke_xpk.sh

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
require PROJECT ZONE CLUSTER NAME ACCELERATOR IMAGE WORKDIR
NUM_SLICES=${NUM_SLICES:-1} GRACE_SECONDS=${GRACE_SECONDS:-120}
whole_number NUM_SLICES MAX_RESTARTS GRACE_SECONDS

# ---- chips --------------------------------------------------------------------------------------
case ${ACCELERATOR%%-*} in
  v5litepod | v6e) cores_per_chip=1 devices_per_chip=1 ;;
  v4 | v5p) cores_per_chip=2 devices_per_chip=1 ;; # JAX sees a chip's two cores as one device
  tpu7x) cores_per_chip=2 devices_per_chip=2 ;;
  *) die "ACCELERATOR is '$ACCELERATOR'; accepted: v4, v5p, v5litepod, v6e, tpu7x, then -SIZE" ;;
esac
size=${ACCELERATOR#*-}
if [[ $size =~ ^[1-9][0-9]*$ ]] && ((size % cores_per_chip == 0)); then
  chips=$((size / cores_per_chip))
elif [[ $size =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]]; then
  chips=$((${size//x/*}))
else
  die "ACCELERATOR is '$ACCELERATOR'; its size must be AxB, AxBxC or a multiple of $cores_per_chip"
fi
((chips == 1 || chips % 4 == 0)) ||
  die "ACCELERATOR is '$ACCELERATOR', $chips chips a slice; accepted: 1, or hosts of 4"
((NUM_SLICES > 0)) || die "NUM_SLICES is 0; it must be at least 1"
devices=$((chips * devices_per_chip * NUM_SLICES)) mesh=1
for argument in "$@"; do
  if [[ $argument =~ ^--?config\.mesh\.(data|fsdp|tensor)=([1-9][0-9]*)$ ]]; then
    mesh=$((mesh * BASH_REMATCH[2]))
  fi
  # xpk writes the command into a YAML file, as one line.
  [[ $argument != *$'\n'* ]] || die "an argument holds a line break, which xpk cannot pass on"
done
((devices % mesh == 0)) ||
  die "the mesh sizes given multiply to $mesh, but $NUM_SLICES x $ACCELERATOR has $devices devices"

# ---- workload -----------------------------------------------------------------------------------
train_words python --distributed "$@"
say "$NUM_SLICES x $ACCELERATOR: $((chips * NUM_SLICES)) chips, $devices JAX devices"
# xpk restarts after exit codes 42 and 127 to 255, which include 143; 1 is an exception in Python.
# exec: train must receive the pod's SIGTERM, so that it saves.
run xpk workload create --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" \
  --workload="$NAME" --tpu-type="$ACCELERATOR" --num-slices="$NUM_SLICES" \
  --docker-image="$IMAGE" --max-restarts="$MAX_RESTARTS" --restart-on-exit-codes=1 \
  --termination-grace-period-seconds="$GRACE_SECONDS" --command="exec $(quote "${TRAIN[@]}")"
