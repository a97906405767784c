#!/bin/sh
# Stands before firn's driver worker. /srv/fault/worker orders once: hold NUMBER
dir=/srv/fault
if { read -r _ number <$dir/worker; } 2>/dev/null && mv $dir/worker "$dir/struck-$number" 2>/dev/null; then
    while [ -e "$dir/hold-$number" ]; do sleep 0.02; done
fi
exec /usr/local/bin/firn-gpu "$@"
