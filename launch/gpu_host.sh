#!/usr/bin/env bash
# Train on all GPUs of this host. The script creates a virtual environment with the CUDA build of
# JAX, if absent, and runs train in one process that uses every GPU (the config's mesh.data=-1 means
# all of them; --config.mesh.* arguments are passed on). If train crashes, or saves and stops after
# a SIGTERM sent to it alone, it is started again and resumes from WORKDIR.
#
#   WORKDIR        folder of the run; default runs/gpu-DATE-TIME
#   CONFIG         config file[:PRESET]; needed for a new run
#   VENV           virtual environment, created if absent; default .venv in the repository
#   PYTHON         interpreter that creates it, 3.11 to 3.13; default python3
#   MAX_RESTARTS   maximum number of restarts; default 10
#   RETRY_SECONDS  pause before each restart; default 30
#   DRY_RUN        1: print the commands and run none; default 0
#   CUDA_VISIBLE_DEVICES, HF_TOKEN, ...  passed to train unchanged
#
# Further arguments are passed to train. After Ctrl-C or a SIGTERM to this script, train finishes
# its step and saves, and is not restarted. Exit code: train's (0 done, 2 bad input, 3 stopped by a
# rule, 143 saved after SIGTERM). Run it from the repository's root.
#
# Example:
#   CONFIG=configs/sokoban.py:qwen2.5-3b WORKDIR=runs/sokoban-3b launch/gpu_host.sh --config.seed=1

# keep_running and trap call functions by name.
# shellcheck disable=SC2329
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
whole_number MAX_RESTARTS RETRY_SECONDS
WORKDIR=${WORKDIR:-runs/gpu-$(date +%Y%m%d-%H%M%S)} # the same folder for every restart
VENV=${VENV:-$REPOSITORY/.venv}
train_words "$VENV/bin/python" "$@"

if [[ ! -x $VENV/bin/python ]]; then
  run "${PYTHON:-python3}" -m venv "$VENV"
  run "$VENV/bin/pip" install -q -e "${REPOSITORY}[cuda]" || {
    say "delete $VENV before the next try: it is incomplete"
    exit 1
  }
fi

asked="" child=""
stop() {
  asked=1
  if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi
}
trap stop INT TERM

attempt() {
  if on DRY_RUN; then
    run "${TRAIN[@]}"
    return
  fi
  if [[ -n $asked ]]; then exit 143; fi # during the pause
  local code
  "${TRAIN[@]}" 3>&- & # in the background: bash delays a trap while a foreground command runs
  child=$!
  while true; do # a signal ends `wait`, but not the child
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  if [[ -n $asked ]]; then exit "$code"; fi
  return "$code"
}

taken() { false; } # this host is never preempted: every restart counts
code=0
keep_running attempt taken true || code=$?
exit "$code"
