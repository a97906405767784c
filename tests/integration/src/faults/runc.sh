#!/bin/sh
# Stands before the node's runc in PATH. /srv/fault/runc says once: VERB before|after error|kill|stop|hold
dir=/srv/fault real=/usr/sbin/runc
{ read -r verb when action <$dir/runc; } 2>/dev/null || exec $real "$@"
case " $* " in *" $verb "*) ;; *) exec $real "$@" ;; esac
code=0
if [ "$when" = after ]; then
    $real "$@"
    code=$?
fi
mv $dir/runc $dir/struck
case $action in
error)
    echo "runc $verb fails as scripted" >&2
    exit 1
    ;;
kill) kill -KILL $$ ;;
stop) kill -STOP $$ ;;
hold) while [ -e $dir/hold ]; do sleep 0.02; done ;;
esac
[ "$when" = after ] && exit $code
exec $real "$@"
