# shellcheck shell=bash
# Shared functions of tpu_vm.sh and tpu_queued.sh: settings, steps on the workers, the run. Sourced,
# not run. The script that sources this file defines how the machine is obtained:
#
#   DELETION  array: the command that deletes the machine
#   ensure    function: return once the machine is ready, or exit
#   taken     function: true if the machine has been preempted

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tpu_settings() { # check the variables; set RUNTIME_VERSION, PLACE, TRAIN, and TRAIN_LINE for workers
  local runtime
  require PROJECT ZONE NAME ACCELERATOR WORKDIR
  whole_number MAX_RESTARTS RETRY_SECONDS CREATE_ATTEMPTS
  case $ACCELERATOR in
    v4-*) runtime=tpu-ubuntu2204-base ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    *) die "ACCELERATOR is '$ACCELERATOR'; accepted: v4-N, v5litepod-N, v5p-N, v6e-N" \
      "(TPU7x and later: launch/gke_xpk.sh)" ;;
  esac
  # On the machine's own disk, the run would be lost with the machine.
  [[ $WORKDIR == /* ]] ||
    die "WORKDIR is '$WORKDIR'; it must be an absolute path that all workers share (Filestore, NFS)"
  RUNTIME_VERSION=${RUNTIME_VERSION:-$runtime}
  PLACE=(--project="$PROJECT" --zone="$ZONE")
  train_words ../venv/bin/python --distributed "$@"
  if [[ -n ${JAX_COMPILATION_CACHE_DIR:-} ]]; then
    TRAIN=(env JAX_COMPILATION_CACHE_DIR="$JAX_COMPILATION_CACHE_DIR" "${TRAIN[@]}")
  fi
  TRAIN_LINE="cd ragen_jax && exec $(quote "${TRAIN[@]}")"
}

node_state() { # print the state of the TPU VM; nothing if it does not exist
  run gcloud compute tpus tpu-vm describe "$NAME" "${PLACE[@]}" --format='value(state)' \
    2>/dev/null || true
}

remove() { run "${DELETION[@]}" || say "$NAME could not be deleted; it may be gone already"; }

on_workers() { # run a command; without keep-alive, ssh would wait for ever for a lost machine
  run gcloud compute tpus tpu-vm ssh "$NAME" "${PLACE[@]}" --worker=all \
    --ssh-flag=-oServerAliveInterval=30 --command="$1"
}

copy_and_install() { # copy the repository to every worker and install it in a virtual environment
  # uv, because the Python of the images is older than required.
  local setup="rm -rf ragen_jax && mkdir ragen_jax && tar -xzf ragen_jax.tar.gz -C ragen_jax"
  setup+=" && cd ragen_jax && python3 -m pip install -q --user uv"
  setup+=" && python3 -m uv venv -q --allow-existing --python 3.12 ../venv"
  setup+=" && python3 -m uv pip install -q --python ../venv/bin/python -e '.[tpu]'"
  {
    run gcloud compute tpus tpu-vm scp "$ARCHIVE" "$NAME:ragen_jax.tar.gz" "${PLACE[@]}" \
      --worker=all && on_workers "$setup"
  } || return 1 # not 2, which would end the retries
}

attempt() { ensure && copy_and_install && on_workers "$TRAIN_LINE"; }

preempted() { [[ $1 == 143 ]] || taken; }

train_on_tpu() { # do the whole run; exit with train's code
  local code=0
  # Packed once, so that a restart runs the code that the run began with.
  ARCHIVE=${TMPDIR:-/tmp}/ragen_jax-$NAME-$$.tar.gz
  if ! on DRY_RUN; then trap 'rm -f "$ARCHIVE"' EXIT; fi
  run tar -czf "$ARCHIVE" -C "$REPOSITORY" --exclude=./.git --exclude='./.venv*' \
    --exclude=./runs --exclude=./build --exclude=__pycache__ .
  # gcloud turns Ctrl-C into an exit code, which the loop would treat as a crash.
  trap 'say "interrupted; $NAME is left unchanged"; exit 130' INT
  trap 'say "terminated; $NAME is left unchanged"; exit 143' TERM
  keep_running attempt preempted remove || code=$?
  if on DELETE; then
    note "when the run has ended:"
    remove
  elif ! on DRY_RUN; then
    say "$NAME is billed until it is deleted: $(quote "${DELETION[@]}")"
  fi
  exit "$code"
}
