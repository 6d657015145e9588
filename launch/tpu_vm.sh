#!/usr/bin/env bash
# Train on a Cloud TPU VM (v4 to v6e). The script creates the VM if it does not exist, copies this
# repository to every worker, installs it in a virtual environment and runs train on all workers. If
# the machine is preempted or the run crashes, it deletes the VM, creates it again and resumes from
# WORKDIR.
#
#   PROJECT          Google Cloud project; required
#   ZONE             zone; required
#   NAME             name of the TPU VM; required
#   ACCELERATOR      v4-N, v5litepod-N, v5p-N or v6e-N; required
#   WORKDIR          folder of the run: a mount that all workers share (Filestore, NFS); required
#   CONFIG           config file[:PRESET]; needed for a new run
#   RUNTIME_VERSION  software on the TPU VM; default: the version for ACCELERATOR
#   SPOT             1: spot capacity, cheaper, may be preempted; default 0
#   DELETE           1: delete the TPU VM when the run has ended; default 0 (billing continues)
#   CREATE_ATTEMPTS  number of attempts to create the machine before giving up; default 100
#   JAX_COMPILATION_CACHE_DIR  gs:// folder of compiled programs, for faster restarts; default: none
#   MAX_RESTARTS     maximum number of restarts after crashes, not counting preemptions; default 10
#   RETRY_SECONDS    pause before each retry; default 30
#   DRY_RUN          1: print the commands and run none; default 0
#
# Further arguments are passed to train. Exit code: train's (0 done, 2 bad input, 3 stopped by a
# rule), or 1 if no machine could be obtained. gcloud must be logged in. With more than one worker,
# add the key to the SSH agent: ssh-add ~/.ssh/google_compute_engine. Tokens (Hugging Face, W&B) are
# not passed on.
#
# Example:
#   PROJECT=my-project ZONE=us-east5-b NAME=sokoban ACCELERATOR=v6e-16 SPOT=1 \
#     WORKDIR=/mnt/shared/sokoban CONFIG=configs/sokoban.py:qwen2.5-3b \
#     launch/tpu_vm.sh --config.rollout.groups=16

# tpu_common.sh calls the functions and reads the arrays that are defined here.
# shellcheck disable=SC2329,SC2034
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=tpu_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/tpu_common.sh"
CREATE_ATTEMPTS=${CREATE_ATTEMPTS:-100}
tpu_settings "$@"
CREATION=(gcloud compute tpus tpu-vm create "$NAME" "${PLACE[@]}"
  --accelerator-type="$ACCELERATOR" --version="$RUNTIME_VERSION")
if on SPOT; then CREATION+=(--spot); fi
DELETION=(gcloud compute tpus tpu-vm delete "$NAME" "${PLACE[@]}" --quiet)

ensure() {
  local state code tries=0
  while true; do
    state=$(node_state)
    case $state in
      READY) return ;;
      PREEMPTED | TERMINATED) remove ;; # such a machine never returns
      STOPPED | STOPPING) die "$NAME is $state; start it or delete it first" ;;
      "")
        code=0
        run "${CREATION[@]}" || code=$?
        if ((code == 0)); then return; fi
        tries=$((tries + 1))
        if ((code == 2 || tries >= CREATE_ATTEMPTS)); then # 2: gcloud refused the command itself
          say "$NAME could not be created ($tries tries, exit code $code)"
          exit $((code == 2 ? 2 : 1))
        fi
        sleep "$RETRY_SECONDS" ;;
      *) # CREATING, STARTING, REPAIRING, DELETING, ...
        say "$NAME is $state; waiting"
        sleep "$RETRY_SECONDS" ;;
    esac
  done
}

taken() { [[ $(node_state) != READY ]]; }

train_on_tpu
