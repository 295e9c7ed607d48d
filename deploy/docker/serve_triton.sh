#!/bin/sh
# Becomes tritonserver with the arguments given, but without --allow-client-shm where this release does not know it: releases
# from 26.04 on need it to share memory with the gateway, and earlier ones refuse to start with it. And it removes what a Triton
# with the same shm-region-prefix-name left in a /dev/shm that outlives its container.
set -eu

asks_for_shm=
for argument in "$@"; do
    case $argument in
    --allow-client-shm*) asks_for_shm=1 ;;
    --backend-config=*,shm-region-prefix-name=?*) rm -f "/dev/shm/${argument##*=}"* ;;
    *) ;;
    esac
done
if [ -n "$asks_for_shm" ] && ! tritonserver --help 2>&1 | grep -q -e --allow-client-shm; then
    count=$#
    while [ "$count" -gt 0 ]; do # each argument from the front to the back, but this one
        case $1 in --allow-client-shm*) ;; *) set -- "$@" "$1" ;; esac
        shift
        count=$((count - 1))
    done
fi
exec tritonserver "$@"
