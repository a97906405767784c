#!/bin/sh
# Stands before the node's runc in PATH. /srv/fault/runc-before and runc-after order once: VERB ACTION NUMBER;
# actions: error, kill, stop, hold, hold-error, thaw
dir=/srv/fault real=/usr/sbin/runc
words=" $* "
is_ordered() {
    { read -r verb action number <"$dir/runc-$1"; } 2>/dev/null || return 1
    case $words in *" $verb "*) ;; *) return 1 ;; esac
}
act() {
    mv "$dir/runc-$1" "$dir/struck-$number"
    case $action in
    error)
        echo "runc $verb fails as scripted" >&2
        exit 1
        ;;
    kill) kill -KILL $$ ;;
    stop) kill -STOP $$ ;;
    # Somebody else resumes the container, of whichever version its cgroup is.
    thaw)
        root=/sys/fs/cgroup
        { echo 0 >$root/default/job/cgroup.freeze; } 2>/dev/null ||
            echo THAWED >$root/freezer/default/job/freezer.state
        ;;
    hold | hold-error) while [ -e "$dir/hold-$number" ]; do sleep 0.02; done ;;
    esac
    [ "$action" != hold-error ] || exit 1
}
! is_ordered before || act before
is_ordered after || exec $real "$@"
$real "$@"
code=$?
act after
exit $code
