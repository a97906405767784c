#!/bin/sh
# Runs the suites in this bundle, as root: run.sh [WORDS OF THE NAMES...] [-- ARGUMENTS OF THE PROGRAM]
# or a benchmark: run.sh bench shim [OPTIONS], or the fault matrix: run.sh faults [OPTIONS],
# or run.sh soak [OPTIONS]
set -u
here=$(cd "$(dirname "$0")" && pwd)
export FIRN_NODE_DIR="$here/node" FIRN_BUILT_DIR="$here/bin"
case ${1:-} in
bench | faults | soak) exec "$here/bin/xtask" "$@" ;;
esac
words=
while [ $# -gt 0 ]; do
    case $1 in
    --) shift; break ;;
    *) words="$words $1"; shift ;;
    esac
done
exec "$here/bin/suites" "$words" "$@"
