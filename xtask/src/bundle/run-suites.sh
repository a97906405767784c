#!/bin/sh
# Runs the suites in this bundle, as root: run.sh [NAME...] [-- ARGUMENTS OF THE TEST PROGRAMS]
# or a benchmark: run.sh bench shim [OPTIONS], or the fault matrix: run.sh faults [OPTIONS],
# or run.sh soak [OPTIONS]
set -u
here=$(cd "$(dirname "$0")" && pwd)
export FIRN_NODE_DIR="$here/node" FIRN_BUILT_DIR="$here/bin"
case ${1:-} in
bench | faults | soak) exec "$here/bin/xtask" "$@" ;;
esac
suites=
while [ $# -gt 0 ]; do
    case $1 in
    --) shift; break ;;
    *) suites="$suites $1"; shift ;;
    esac
done
failed=
for suite in ${suites:-$(ls "$here/tests")}; do
    echo "== $suite"
    "$here/tests/$suite" "$@" || failed="$failed $suite"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
