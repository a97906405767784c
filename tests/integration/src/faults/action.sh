#!/bin/sh
# CRIU's action script. /srv/fault/action-MOMENT orders once: error|kill-criu|stop-criu|kill-runc|stop-runc|hold NUMBER
dir=/srv/fault
order=$dir/action-$CRTOOLS_SCRIPT_ACTION
{ read -r action number <"$order"; } 2>/dev/null || exit 0
parent() {
    while read -r key value; do
        [ "$key" != PPid: ] || echo "$value"
    done <"/proc/$1/status"
}
criu=$PPID
while [ "$(cat /proc/$criu/comm)" != criu ]; do criu=$(parent "$criu"); done
runc=$(parent "$criu")
mv "$order" "$dir/struck-$number"
case $action in
error) exit 1 ;;
kill-criu) kill -KILL "$criu" ;;
stop-criu) kill -STOP "$criu" ;;
kill-runc) kill -KILL "$runc" ;;
stop-runc) kill -STOP "$runc" ;;
hold) while [ -e "$dir/hold-$number" ]; do sleep 0.02; done ;;
esac
exit 0
