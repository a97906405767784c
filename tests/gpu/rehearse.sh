#!/bin/bash
# Runs run.py over simulated GPUs, in namespaces of its own, so that the scripts are tried before a GPU machine is there:
#
#     cargo build -p simgpu-model -p simgpu-cuda -p simgpu-nvml && cargo xtask gpu-bundle
#     GPUS=4 tests/gpu/rehearse.sh --bundle target/gpu-bundle.tar.xz --out OUT --cases bare,permuted,samples --mib 32
#
# With SLOW_MS=5000 each checkpoint call of the driver takes 5 s longer, as it does for many GiB (the case `patient`).
#
# The samples `vmm*` and `managed-variable` fail here: simgpu lacks their calls. Cases with PyTorch need real GPUs.
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
built=$here/../../target/debug

mount -t tmpfs firn-rehearsal "$scratch"
for dir in /etc /opt /run /usr /var/lib; do
    mkdir -p "$scratch$dir/upper" "$scratch$dir/work"
    mount -t overlay overlay -o "lowerdir=$dir,upperdir=$scratch$dir/upper,workdir=$scratch$dir/work" "$dir"
done
# A /dev of its own: the nodes of simulated GPUs have the names of real ones.
dev=$scratch/dev
mkdir "$dev"
mount -t tmpfs firn-dev "$dev"
cp -a /dev/{null,zero,full,random,urandom,tty,ptmx} /dev/loop* "$dev"
mkdir "$dev/shm" "$dev/pts"
mount --bind /dev/pts "$dev/pts"
mount -t tmpfs shm "$dev/shm"
ln -s /proc/self/fd "$dev/fd"
mount --move "$dev" /dev

install "$built/simgpu" /usr/bin/simgpu
install "$here/simgpu_smi.py" /usr/bin/nvidia-smi
simgpu install --from "$built"
ldconfig
# A GPU has 18 links in all.
setup=()
for ((gpu = 0; gpu < ${GPUS:-2}; gpu++)); do
    setup+=(--gpu "mem=2048M,minor=$gpu")
    for ((other = 0; other < gpu; other++)); do setup+=(--nvlinks "$other-$gpu=6"); done
done
simgpu setup "${setup[@]}"
trap 'simgpu teardown' EXIT
[ -z "${SLOW_MS-}" ] || simgpu fault add --call checkpoint --after --delay-ms "$SLOW_MS"
export PYTHONDONTWRITEBYTECODE=1
python3 "$here/run.py" --memory 4g "$@"
