# First process of a node: makes its file system, then becomes its init.
#
# usage: init.sh DIR ROOT v1|v2, run by guard.sh in new mount, uts, ipc, net, pid and cgroup namespaces.
# Everything is mounted in the node's own mount namespace, so all of it goes when the node's last process goes.
# DIR/init gets one line: pid on the host, start time, mount namespace. Then "ready" goes to standard output.
set -eu
dir=$1 root=$2 mode=$3
name=${dir##*/}
# The host's /proc is still there: its "self" is the one of the host.
read -r stat </proc/self/stat
first='tini -- sleep infinity'
if [ -e "$dir/systemd" ]; then
    # Of all units only what containers ask for is started; its log would go to the host's kernel or console.
    first='env container=firn-node /usr/lib/systemd/systemd --system --unit=firn-node.target --log-target=null'
fi
# shellcheck disable=SC2086
set -- $stat
init="$1 ${22} $(stat -L -c %i /proc/self/ns/mnt)"

cd "$dir/fs"
[ -d disk ] || mount -t tmpfs -o mode=0755 firn-node "$dir/fs"
cd "$dir/fs"
mkdir -p lower upper work root data
mount --bind "$root" lower
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work firn-node root
cd root
mkdir -p var/lib/containerd
# containerd's snapshots are overlays themselves and must not lie on one.
mount --bind ../data var/lib/containerd

mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=0755 run run
mount -t tmpfs -o mode=1777 tmp tmp

mount -t tmpfs -o mode=0755 dev dev
mkdir -p dev/pts dev/shm dev/mqueue dev/net
mount -t devpts -o newinstance,gid=5,mode=0620,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t mqueue mqueue dev/mqueue
for node in null zero full random urandom tty console kmsg fuse net/tun loop-control userfaultfd; do
    # Copied, not created: a node exists if the host has its device, under the same numbers.
    [ ! -c "/dev/$node" ] || cp -a "/dev/$node" "dev/$node"
done
if [ -e "$dir/systemd" ]; then
    ln -sf null dev/console
    printf '[Unit]\nDefaultDependencies=no\n' >etc/systemd/system/firn-node.target
fi
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr

if [ "$mode" = v2 ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    for controller in $(cat sys/fs/cgroup/cgroup.controllers); do
        # A controller may be missing or refused; limits on it are then an error of the runtime.
        echo "+$controller" >sys/fs/cgroup/cgroup.subtree_control || true
    done
else
    mount -t tmpfs -o mode=0755 cgroup sys/fs/cgroup
    while IFS=: read -r _ controllers _; do
        if [ -n "$controllers" ]; then
            mkdir "sys/fs/cgroup/${controllers#name=}"
            mount -t cgroup -o "$controllers" cgroup "sys/fs/cgroup/${controllers#name=}"
        else
            mkdir sys/fs/cgroup/unified
            mount -t cgroup2 cgroup2 sys/fs/cgroup/unified
        fi
    done </proc/self/cgroup
fi

echo "$name" >proc/sys/kernel/hostname
echo "$name" >etc/hostname
printf '%s' "$name" | md5sum | cut -c1-32 >etc/machine-id
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" >etc/hosts
chroot . ip link set lo up

echo "$init" >"$dir/init"
mkdir .host
pivot_root . .host
cd /
umount -l /.host
rmdir /.host
echo ready
# shellcheck disable=SC2086
exec env -i --default-signal PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    $first </dev/null >/dev/null 2>&1
