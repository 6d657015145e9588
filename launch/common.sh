# shellcheck shell=bash
# Shared functions of the launch scripts: dry runs, quoting, checks of variables, the restart loop.
# Sourced, not run. Works with bash 3.2 and later (macOS has 3.2).
#
#   DRY_RUN=1      print the commands, quoted, one per line, and run none
#   MAX_RESTARTS   maximum number of restarts after crashes; default 10
#   RETRY_SECONDS  pause before a restart and between two checks of a cloud resource; default 30

set -euo pipefail

exec 3>&1 # a dry run prints to this descriptor, so that commands inside $( ) are printed as well
# shellcheck disable=SC2034 # read by the scripts
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MAX_RESTARTS=${MAX_RESTARTS:-10}
RETRY_SECONDS=${RETRY_SECONDS:-30}

say() { echo "launch: $*" >&2; }

die() { # bad input: one line, exit code 2
  echo "error: $*" >&2
  exit 2
}

on() { [[ ${!1:-0} != 0 ]]; } # true if the variable named $1 is set to something other than 0

require() {
  local variable missing=""
  for variable in "$@"; do
    [[ -n ${!variable:-} ]] || missing+=" $variable"
  done
  [[ -z $missing ]] || die "set$missing (the head of $0 says what each variable means)"
}

whole_number() { # names of variables
  local variable
  for variable in "$@"; do
    [[ ${!variable} =~ ^[0-9]+$ ]] || die "$variable is '${!variable}'; it must be a whole number"
  done
}

quote() { # print the words as a line of POSIX shell (printf %q may write $'...', which is not POSIX)
  local word rest line="" safe='^[A-Za-z0-9_@%+=:,./-]+$'
  for word in "$@"; do
    if [[ ! $word =~ $safe ]]; then
      rest=$word word="'"
      while [[ $rest == *"'"* ]]; do
        word+="${rest%%"'"*}'\\''" rest=${rest#*"'"}
      done
      word+="$rest'"
    fi
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

run() {
  if on DRY_RUN; then quote "$@" >&3; else "$@"; fi
}

note() { # print a comment between the commands of a dry run
  if on DRY_RUN; then echo "# $*" >&3; fi
}

train_words() { # PYTHON, arguments: set TRAIN to the training command, with WORKDIR and CONFIG
  TRAIN=("$1" -m ragen_jax.train --workdir="$WORKDIR")
  if [[ -n ${CONFIG:-} ]]; then TRAIN+=(--config="$CONFIG"); fi
  shift
  TRAIN+=("$@")
}

# keep_running ATTEMPT PREEMPTED RECOVER: run ATTEMPT until its exit code is final: 0 done, 2 bad
# input, 3 stopped by a stopping rule. After any other exit code, run RECOVER and try again: without
# limit if `PREEMPTED CODE` is true (the machine was taken away), otherwise MAX_RESTARTS times.
keep_running() {
  local code crashes=0
  while true; do
    code=0
    "$1" || code=$?
    case $code in 0 | 2 | 3) break ;; esac
    if "$2" "$code"; then
      say "preempted (exit code $code); resuming in $RETRY_SECONDS s"
    elif ((crashes < MAX_RESTARTS)); then
      crashes=$((crashes + 1))
      say "exit code $code; restart $crashes of $MAX_RESTARTS in $RETRY_SECONDS s"
    else
      say "exit code $code; no restart left (MAX_RESTARTS=$MAX_RESTARTS)"
      break
    fi
    sleep "$RETRY_SECONDS"
    "$3"
  done
  if on DRY_RUN; then
    note "after a preemption or a crash:"
    "$3"
    note "and all of the above again"
  fi
  return "$code"
}
