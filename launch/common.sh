# shellcheck shell=bash
# What the launch scripts share: dry runs, quoting, checks of variables, the restart loop. Sourced,
# not run. Works with bash 3.2 and later (macOS has 3.2).
#
#   DRY_RUN=1      print the commands, quoted, one a line, and run none
#   MAX_RESTARTS   restarts after a crash; default 10
#   RETRY_SECONDS  pause before a restart and between two looks at a cloud resource; default 30

set -euo pipefail

exec 3>&1 # a dry run prints here, also from within $( )
# shellcheck disable=SC2034 # read by the scripts
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MAX_RESTARTS=${MAX_RESTARTS:-10}
RETRY_SECONDS=${RETRY_SECONDS:-30}

say() { echo "launch: $*" >&2; }

die() { # bad input: one line, exit code 2
  echo "error: $*" >&2
  exit 2
}

on() { [[ ${!1:-0} != 0 ]]; } # is the switch named $1 set, and not to 0

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

quote() { # the words as one line of POSIX shell (printf %q is not: it may write $'...')
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

note() { # a comment between the commands of a dry run
  if on DRY_RUN; then echo "# $*" >&3; fi
}

train_words() { # PYTHON, arguments: the training command of WORKDIR and CONFIG, in TRAIN
  TRAIN=("$1" -m ragen_jax.train --workdir="$WORKDIR")
  if [[ -n ${CONFIG:-} ]]; then TRAIN+=(--config="$CONFIG"); fi
  shift
  TRAIN+=("$@")
}

# keep_running ATTEMPT PREEMPTED RECOVER: runs ATTEMPT until its exit code is final: 0 done, 2 bad
# input, 3 stopped by a stopping rule. After any other, RECOVER and again: without limit where
# `PREEMPTED CODE` says that the machine was taken away, else MAX_RESTARTS times.
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
