#!/bin/sh
# CUDA's MPS control daemon in the foreground, until SIGTERM or SIGINT: then it is asked to quit, and the exit code is 0.
# Ended by itself it is 1, so that its supervisor starts it again. No root and no capability is needed; every client must
# be of the same user. In containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility brings the driver's two programs along.
#
#   CUDA_MPS_PIPE_DIRECTORY             where clients find it [/run/penstock/mps]; they need the same variable
#   CUDA_MPS_LOG_DIRECTORY              for drivers that write files; 580 tells all on standard output [logs in that directory]
#   CUDA_MPS_ACTIVE_THREAD_PERCENTAGE   percent of a GPU's threads for each client, 1 to 100; empty or 0: no limit. From Volta on
#   CUDA_MPS_PINNED_DEVICE_MEM_LIMIT    memory for each client: 4G, or 0=4G,1=2G for each GPU number; empty: no limit. From Volta on
#   MPS_QUIT_SECONDS                    that clients get to end before they are cut off [10]
set -eu

control=nvidia-cuda-mps-control
pipes=${CUDA_MPS_PIPE_DIRECTORY:-/run/penstock/mps}
logs=${CUDA_MPS_LOG_DIRECTORY:-$pipes/logs}
threads=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-0}
memory=${CUDA_MPS_PINNED_DEVICE_MEM_LIMIT:-}
quit_seconds=${MPS_QUIT_SECONDS:-10}
start_seconds=20
user=$(id -u)

fail() {
    echo "mps: $*" >&2
    exit 1
}

is_number() { case $1 in '' | *[!0-9]*) return 1 ;; esac; }

# $1: a command for the daemon. Its answer, if any, on standard output.
ask() { echo "$1" | timeout 5 "$control" 2>&1; }

is_alive() { kill -0 "$daemon" 2>/dev/null; }

is_running() { ask get_default_active_thread_percentage >/dev/null; }

require_programs() {
    for program in "$control" nvidia-cuda-mps-server; do
        command -v "$program" >/dev/null || fail "$program is not on PATH; it comes with NVIDIA's driver, and into a" \
            "container with NVIDIA's runtime and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    done
}

require_limits() {
    is_number "$quit_seconds" || fail "MPS_QUIT_SECONDS is '$quit_seconds'; it takes whole seconds"
    is_number "$threads" && [ "$threads" -le 100 ] ||
        fail "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is '$threads'; it takes a whole number from 1 to 100, or 0 for no limit"
    for limit in $(echo "$memory" | tr , ' '); do
        echo "$limit" | grep -Eq '^([0-9]+=)?[1-9][0-9]*[MG]?$' ||
            fail "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT has '$limit'; use 4G or 4096M, or 0=4G,1=2G for each GPU number"
    done
}

require_directory() { # $1: path, $2: its variable
    mkdir -p "$1" 2>/dev/null && [ -w "$1" ] && [ -x "$1" ] && return
    owner=$(stat -c %u "$1" 2>/dev/null || echo nobody)
    fail "user $user may not write to $1 (its owner: $owner); chown it to $user, or name another in $2"
}

# A daemon that was killed leaves its files behind, and clients then wait at a dead socket.
remove_stale() {
    for name in control control_lock control_privileged log nvidia-cuda-mps-control.pid; do
        [ -e "$pipes/$name" ] || continue
        rm -f "$pipes/$name" 2>/dev/null ||
            fail "user $user may not remove $pipes/$name, left by user $(stat -c %u "$pipes/$name"); remove it, or run as that user"
    done
}

cards() { # their numbers, as clients see them
    count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    seq 0 $((count > 1 ? count - 1 : 0))
}

tell() {
    answer=$(ask "$1") || fail "the daemon refused '$1': $answer"
}

set_limits() {
    if [ "$threads" -gt 0 ]; then tell "set_default_active_thread_percentage $threads"; fi
    for limit in $(echo "$memory" | tr , ' '); do
        case $limit in
        *=*) tell "set_default_device_pinned_mem_limit ${limit%%=*} ${limit#*=}" ;;
        *) for card in $(cards); do tell "set_default_device_pinned_mem_limit $card $limit"; done ;;
        esac
    done
}

end_daemon() {
    echo "quit -t $quit_seconds" | timeout $((quit_seconds + 5)) "$control" >/dev/null 2>&1 || true
    # The second signal of an ignored stop; it ends the servers, too.
    kill -TERM "$daemon" 2>/dev/null || true
}

until_it_answers() {
    tries=$((start_seconds * 5))
    until is_running; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "$control did not answer within $start_seconds s; its lines above say why, or those in $logs"
        if [ -n "$asked" ] || ! is_alive; then return 0; fi
        sleep 0.2
    done
}

require_programs
require_limits
require_directory "$pipes" CUDA_MPS_PIPE_DIRECTORY
require_directory "$logs" CUDA_MPS_LOG_DIRECTORY
export CUDA_MPS_PIPE_DIRECTORY="$pipes" CUDA_MPS_LOG_DIRECTORY="$logs"
# Told below, where a wrong value is refused aloud; the daemon takes them from its environment silently.
unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_MPS_PINNED_DEVICE_MEM_LIMIT
if is_running; then fail "a control daemon runs at $pipes already; end it, or name another CUDA_MPS_PIPE_DIRECTORY"; fi
remove_stale

asked='' daemon=''
trap 'asked=1; if [ -n "$daemon" ]; then end_daemon; fi' TERM INT
trap 'if [ -n "$daemon" ]; then kill -TERM "$daemon" 2>/dev/null || true; fi' EXIT
"$control" -f &
daemon=$!
if [ -n "$asked" ]; then end_daemon; fi # a signal between the two lines above
until_it_answers
if [ -z "$asked" ] && is_alive; then
    set_limits
    echo "mps: ready at $pipes for user $user"
fi
code=0
while is_alive; do wait "$daemon" || code=$?; done # a signal ends the wait
wait "$daemon" 2>/dev/null || code=$?
daemon=
remove_stale
if [ -n "$asked" ]; then exit 0; fi
fail "$control ended by itself with code $code; its lines above say why, or those in $logs"
