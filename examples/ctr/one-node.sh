#!/bin/bash
# Checkpoints a GPU container and restores it on the same machine.
#
#   one-node.sh IMAGE COMMAND [ARGUMENT...]
#
# GPU=0            the GPU at the start, by its CDI name (nvidia.com/gpu=0)
# MAP=GPU-a=GPU-b  restores onto GPU-b the memory that was on GPU-a (UUIDs of nvidia-smi -L); default: the same GPU
#
# Needs containerd 2.x, root, and firn installed as docs/guide/install.md describes.
set -euo pipefail

if (($# < 2)); then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
image=$1
shift
name=firn-example checkpoint=firn-example/checkpoint:latest

options=(--detach --runtime io.containerd.firn.v2 --device "nvidia.com/gpu=${GPU:-0}")
# Read at the restore, which gives the container the spec of the source with all annotations.
[[ -z ${MAP-} ]] || options+=(--annotation "firn.dev/gpu-map=$MAP")

step() { printf '\n== %s\n' "$*"; }

step "start"
ctr run "${options[@]}" "$image" "$name" "$@"
ctr tasks ls
sleep 3 # let it compute something

step "checkpoint; the container runs on"
time ctr containers checkpoint --rw --task "$name" "$checkpoint"
ctr tasks ls

step "end the container"
ctr tasks rm --force "$name"
ctr containers rm "$name"

step "restore"
time ctr containers restore --rw --live "$name" "$checkpoint"
ctr tasks ls

step "the time of each phase"
cat "/run/containerd/io.containerd.runtime.v2.task/${CONTAINERD_NAMESPACE:-default}/$name/firn-timings.json"
printf '\n\nremove it with: ctr tasks rm --force %s; ctr containers rm %s; ctr images rm %s\n' "$name" "$name" "$checkpoint"
