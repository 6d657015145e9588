#!/usr/bin/env bash
# Run train in several processes on this machine, each with virtual CPU devices. This imitates a pod
# for tests and debugging. Process 0 writes to the console, the others to files.
#
#   NUM_PROCESSES        number of processes; default 2
#   DEVICES_PER_PROCESS  virtual CPU devices per process; default 1
#   WORKDIR              folder of the run, passed on as --workdir if set; train needs a folder
#   CONFIG               config file[:PRESET], passed on as --config if set; needed for a new run
#   PORT                 port of the coordinator on 127.0.0.1; default: random, 20000 to 29999
#   LOG_DIR              folder for process_I.log; default runs/processes-DATE-TIME
#   GRACE_SECONDS        seconds between Ctrl-C or SIGTERM, which the processes get as SIGTERM, and
#                        SIGKILL; default 120
#   PYTHON               interpreter; default python
#   MODULE               module to run instead of ragen_jax.train, e.g. ragen_jax.evaluate
#   COMMAND              shell command to run instead of `PYTHON -m MODULE --distributed`
#   DRY_RUN              1: print the commands and run none; default 0
#
# Further arguments are passed to every process. When a process fails, the others are ended. The
# exit code is that of the process that failed first, or 0. Run it from the repository's root.
#
# Example:
#   NUM_PROCESSES=2 DEVICES_PER_PROCESS=2 WORKDIR=runs/two launch/local_multiprocess.sh \
#     --config.mesh.fsdp=2

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NUM_PROCESSES=${NUM_PROCESSES:-2} DEVICES_PER_PROCESS=${DEVICES_PER_PROCESS:-1}
PORT=${PORT:-$((20000 + RANDOM % 10000))} GRACE_SECONDS=${GRACE_SECONDS:-120}
LOG_DIR=${LOG_DIR:-runs/processes-$(date +%Y%m%d-%H%M%S)}
whole_number NUM_PROCESSES DEVICES_PER_PROCESS PORT GRACE_SECONDS
((NUM_PROCESSES > 0)) || die "NUM_PROCESSES is 0; it must be at least 1"

if [[ -n ${COMMAND:-} ]]; then
  words=(bash -c "$COMMAND \"\$@\"" bash) # bash becomes the command, which then receives signals
else
  words=("${PYTHON:-python}" -m "${MODULE:-ragen_jax.train}" --distributed)
  if [[ -n ${WORKDIR:-} ]]; then words+=(--workdir="$WORKDIR"); fi
  if [[ -n ${CONFIG:-} ]]; then words+=(--config="$CONFIG"); fi
fi
words+=("$@")
# NPROC: with fewer threads than devices, XLA's collectives on CPU can deadlock.
setting=(env JAX_PLATFORMS=cpu NPROC=32 JAX_COORDINATOR_ADDRESS="127.0.0.1:$PORT"
  XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$DEVICES_PER_PROCESS"
  JAX_NUM_PROCESSES="$NUM_PROCESSES")

run mkdir -p "$LOG_DIR"
if on DRY_RUN; then
  for ((i = 0; i < NUM_PROCESSES; i++)); do
    log=$LOG_DIR/process_$i.log redirect=""
    if ((i > 0)); then redirect=" >$(quote "$log") 2>&1"; fi
    echo "$(quote "${setting[@]}" JAX_PROCESS_ID="$i" "${words[@]}")$redirect &"
  done
  exit
fi

asked=0
trap 'asked=$((asked + 1))' INT TERM
pids=() codes=()
for ((i = 0; i < NUM_PROCESSES; i++)); do
  if ((i == 0)); then
    "${setting[@]}" JAX_PROCESS_ID="$i" "${words[@]}" 3>&- &
  else
    "${setting[@]}" JAX_PROCESS_ID="$i" "${words[@]}" >"$LOG_DIR/process_$i.log" 2>&1 3>&- &
  fi
  pids+=($!) codes+=("")
done

signal_rest() {
  local i
  for i in "${!pids[@]}"; do
    if [[ -z ${codes[i]} ]]; then kill "-$1" "${pids[i]}" 2>/dev/null || true; fi
  done
}

deadline="" # when running processes are killed, in seconds since the start
end_rest() { # SECONDS
  if [[ -z $deadline ]]; then
    signal_rest TERM
    deadline=$((SECONDS + $1))
  fi
}

first=0 running=$NUM_PROCESSES
while ((running > 0)); do
  for i in "${!pids[@]}"; do
    if [[ -n ${codes[i]} ]] || kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
    code=0
    wait "${pids[i]}" || code=$?
    codes[i]=$code running=$((running - 1))
    if ((code == 0 || first != 0)); then continue; fi
    first=$code
    say "process $i ended with exit code $code"
    if ((i > 0)); then tail -n 5 "$LOG_DIR/process_$i.log" >&2; fi
    # After 143, the others are saving as well; after a failure, they only wait for that process.
    if ((code == 143)); then end_rest "$GRACE_SECONDS"; else end_rest 5; fi
  done
  if ((asked > 0)); then end_rest "$GRACE_SECONDS"; fi
  if [[ -n $deadline ]] && ((SECONDS >= deadline || asked > 1)); then signal_rest KILL; fi
  sleep 0.1 || true # Ctrl-C ends the sleep early
done
exit "$first"
