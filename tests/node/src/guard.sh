# Starts a node and ends it when whoever made it is gone.
#
# usage: guard.sh DIR ROOT v1|v2 LEAF CGROUP...
#   DIR     run directory of the node on the host
#   ROOT    cached Debian root, used read-only
#   LEAF    cgroup of a v2 node's own processes, or -
#   CGROUP  the node's cgroup directories, one per hierarchy
#
# Standard output is closed by the time the node is ready or has failed; before that it prints "ready" or nothing.
# Standard input is a pipe from the maker: its end means that the maker is gone, the word "leave" that the node stays.
# The guard ends the node's processes; what else they leave is removed from the node's record, in Rust.
set -eu
dir=$1 root=$2 mode=$3 leaf=$4
shift 4

(
    for cgroup; do
        echo 0 >"$cgroup/cgroup.procs"
    done
    # Order matters: the cgroup namespace takes the node's cgroups as its roots, and only then do the processes
    # move to the leaf, because a cgroup v2 directory that has processes cannot hand controllers to its children.
    exec unshare --cgroup sh -euc '
        [ "$4" = - ] || echo 0 >"$4/cgroup.procs"
        exec unshare --mount --uts --ipc --net --pid --fork --kill-child sh -eu "$0" "$1" "$2" "$3"
    ' "$dir/init.sh" "$dir" "$root" "$mode" "$leaf"
) &
exec >/dev/null

if read -r word && [ "$word" = leave ]; then
    exit 0
fi
for cgroup; do
    # Tasks that the v1 freezer holds do not die.
    find "$cgroup" -name freezer.state -exec sh -c 'echo THAWED >"$1"' thaw {} \; || true
done
kill -KILL $! 2>/dev/null || true
