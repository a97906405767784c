#!/bin/sh
# Stands before firn's driver worker. /srv/fault/worker says once: hold
dir=/srv/fault
if mv $dir/worker $dir/struck 2>/dev/null; then
    while [ -e $dir/hold ]; do sleep 0.02; done
fi
exec /usr/local/bin/firn-gpu "$@"
