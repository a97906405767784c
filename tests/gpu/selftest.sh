#!/bin/bash
# Runs run.py's cases that need no GPU in namespaces of their own, so that /opt, /etc, /run and /var/lib of this machine
# stay as they are. Arguments go to run.py: `selftest.sh --bundle target/gpu-bundle.tar.xz --runtime io.containerd.runc.v2`.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [ "${1-}" != --inside ]; then
    scratch=$(mktemp -d)
    trap 'rmdir "$scratch"' EXIT
    unshare --mount --pid --fork --uts --ipc --kill-child --mount-proc -- "$0" --inside "$scratch" "$@"
    exit
fi
scratch=$2
shift 2

mount -t tmpfs firn-selftest "$scratch"
for dir in /etc /opt /run /var/lib; do
    mkdir -p "$scratch$dir/upper" "$scratch$dir/work"
    mount -t overlay overlay -o "lowerdir=$dir,upperdir=$scratch$dir/upper,workdir=$scratch$dir/work" "$dir"
done
export PYTHONDONTWRITEBYTECODE=1
python3 "$here/test_scripts.py" --quiet
exec python3 "$here/run.py" --no-gpu --memory 4g "$@"
