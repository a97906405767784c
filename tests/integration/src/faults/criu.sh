#!/bin/sh
# Stands before the node's CRIU in PATH. /srv/fault/criu orders once `error - NUMBER`, or for all of an operation
# `fault CRIU_FAULT NUMBER`.
dir=/srv/fault real=/usr/sbin/criu
{ read -r what fault number <$dir/criu; } 2>/dev/null && [ "$1" = swrk ] || exec $real "$@"
case $what in
error)
    mv $dir/criu "$dir/struck-$number"
    echo "criu fails as scripted" >&2
    exit 1
    ;;
fault)
    cp $dir/criu "$dir/struck-$number"
    export CRIU_FAULT="$fault"
    ;;
esac
exec $real "$@"
