#!/bin/sh
# Exit code 0 while the MPS control daemon of CUDA_MPS_PIPE_DIRECTORY [/run/penstock/mps] answers; else 1, and why.
# Each question leaves two lines in the daemon's log: ask it every ten seconds, not every one.
set -eu

export CUDA_MPS_PIPE_DIRECTORY="${CUDA_MPS_PIPE_DIRECTORY:-/run/penstock/mps}"

fail() {
    echo "mps: $*" >&2
    exit 1
}

command -v nvidia-cuda-mps-control >/dev/null || fail "nvidia-cuda-mps-control is not on PATH; it comes with NVIDIA's driver"
[ -S "$CUDA_MPS_PIPE_DIRECTORY/control" ] || fail "no control daemon at $CUDA_MPS_PIPE_DIRECTORY: it has not started, or the directory is another"
answer=$(echo get_default_active_thread_percentage | timeout 3 nvidia-cuda-mps-control 2>&1) ||
    fail "the control daemon at $CUDA_MPS_PIPE_DIRECTORY does not answer: ${answer:-no word within 3 s}"
