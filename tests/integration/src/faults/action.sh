#!/bin/sh
# CRIU's action script. /srv/fault/action says once: MOMENT error|kill-criu|stop-criu|kill-runc|stop-runc|hold
dir=/srv/fault
{ read -r moment action <$dir/action; } 2>/dev/null && [ "$moment" = "$CRTOOLS_SCRIPT_ACTION" ] || exit 0
parent() {
    while read -r key value; do
        [ "$key" != PPid: ] || echo "$value"
    done <"/proc/$1/status"
}
criu=$PPID
while [ "$(cat /proc/$criu/comm)" != criu ]; do criu=$(parent "$criu"); done
runc=$(parent "$criu")
mv $dir/action $dir/struck
case $action in
error) exit 1 ;;
kill-criu) kill -KILL "$criu" ;;
stop-criu) kill -STOP "$criu" ;;
kill-runc) kill -KILL "$runc" ;;
stop-runc) kill -STOP "$runc" ;;
hold) while [ -e $dir/hold ]; do sleep 0.02; done ;;
esac
exit 0
