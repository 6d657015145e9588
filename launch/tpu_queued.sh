#!/usr/bin/env bash
# Train on a TPU VM (v4 to v6e) that is requested as a queued resource. The script queues the
# request, waits until it is ACTIVE, then copies, installs and runs as tpu_vm.sh does. If the
# resource is preempted or the run crashes, it deletes the request, queues a new request and resumes
# from WORKDIR.
#
#   PROJECT          Google Cloud project; required
#   ZONE             zone; required
#   NAME             name of the request and of its TPU VM; required
#   ACCELERATOR      v4-N, v5litepod-N, v5p-N or v6e-N; required
#   WORKDIR          folder of the run: a mount that all workers share (Filestore, NFS); required
#   CONFIG           config file[:PRESET]; needed for a new run
#   RUNTIME_VERSION  software on the TPU VM; default: the version for ACCELERATOR
#   SPOT             1: spot capacity, cheaper, may be preempted; default 0
#   DELETE           1: delete request and TPU VM when the run has ended; default 0 (billing
#                    continues)
#   CREATE_ATTEMPTS  number of requests that may fail before giving up; default 10
#   JAX_COMPILATION_CACHE_DIR  gs:// folder of compiled programs, for faster restarts; default: none
#   MAX_RESTARTS     maximum number of restarts after crashes, not counting preemptions; default 10
#   RETRY_SECONDS    pause between checks of the queue and before each retry; default 30
#   DRY_RUN          1: print the commands and run none; default 0
#
# Further arguments are passed to train. Exit code: train's (0 done, 2 bad input, 3 stopped by a
# rule), or 1 if no machine could be obtained. gcloud must be logged in. With more than one worker,
# add the key to the SSH agent: ssh-add ~/.ssh/google_compute_engine. Tokens (Hugging Face, W&B) are
# not passed on.
#
# Example:
#   PROJECT=my-project ZONE=us-central2-b NAME=sokoban ACCELERATOR=v4-32 \
#     WORKDIR=/mnt/shared/sokoban CONFIG=configs/sokoban.py:qwen2.5-3b launch/tpu_queued.sh

# tpu_common.sh calls the functions and reads the arrays that are defined here.
# shellcheck disable=SC2329,SC2034
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=tpu_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/tpu_common.sh"
CREATE_ATTEMPTS=${CREATE_ATTEMPTS:-10}
tpu_settings "$@"
CREATION=(gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" "${PLACE[@]}"
  --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME_VERSION")
if on SPOT; then CREATION+=(--spot); fi
# --force: delete its TPU VM as well.
DELETION=(gcloud compute tpus queued-resources delete "$NAME" "${PLACE[@]}" --force --quiet)

request_state() { # print the state of the request; nothing if it does not exist
  run gcloud compute tpus queued-resources describe "$NAME" "${PLACE[@]}" \
    --format='value(state.state)' 2>/dev/null || true
}

ensure() {
  local state last="" code tries=0
  while true; do
    state=$(request_state)
    case $state in
      ACTIVE) return ;;
      "" | FAILED | SUSPENDED) # SUSPENDED: its machine was preempted and does not return
        if ((tries >= CREATE_ATTEMPTS)); then
          say "$NAME was not granted ($tries requests; state: ${state:-none})"
          exit 1
        fi
        if [[ -n $state ]]; then
          say "$NAME is $state; requesting it again"
          remove
        fi
        if ((tries > 0)); then sleep "$RETRY_SECONDS"; fi
        tries=$((tries + 1)) code=0
        run "${CREATION[@]}" || code=$?
        if ((code == 2)); then exit 2; fi # gcloud refused the command itself
        if on DRY_RUN; then
          note "every $RETRY_SECONDS s until it is ACTIVE:"
          request_state
          return
        fi ;;
      *) # WAITING_FOR_RESOURCES, PROVISIONING, ACCEPTED, CREATING, SUSPENDING, DELETING
        if [[ $state != "$last" ]]; then say "$NAME is $state"; fi
        sleep "$RETRY_SECONDS" ;;
    esac
    last=$state
  done
}

# The node may be gone while the request still says ACTIVE.
taken() { [[ $(request_state) != ACTIVE || $(node_state) != READY ]]; }

train_on_tpu
