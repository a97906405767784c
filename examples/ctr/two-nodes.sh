#!/bin/bash
# Moves a running GPU container from one machine to another.
#
#   two-nodes.sh SOURCE TARGET CONTAINER
#
# SOURCE and TARGET are commands that run a command as root on a machine:
#
#   two-nodes.sh "ssh root@a" "ssh root@b" job
#
# or, with the nodes that `cargo xtask demo --keep` leaves (the job is on demo-b then):
#
#   two-nodes.sh "cargo xtask node exec demo-b --" "cargo xtask node exec demo-a --" job
#
# Both need firn installed as docs/guide/install.md describes, the same driver version, and the container's own image.
# /etc/firn/config.toml of the target may name the GPUs of restored containers ([restore] gpus).
set -euo pipefail

if (($# != 3)); then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
read -ra source <<<"$1"
read -ra target <<<"$2"
name=$3 checkpoint=firn-move/$3:latest

step() { printf '\n== %s\n' "$*"; }

step "checkpoint $name; it runs on until the image is copied"
"${source[@]}" ctr containers checkpoint --rw --task "$name" "$checkpoint"

step "copy"
"${source[@]}" ctr images export --local --skip-manifest-json - "$checkpoint" |
    "${target[@]}" ctr images import --local --no-unpack -

step "end it at the source; the target repeats the work since the checkpoint"
"${source[@]}" ctr tasks rm --force "$name"
"${source[@]}" ctr containers rm "$name"

step "restore"
"${target[@]}" ctr containers restore --rw --live "$name" "$checkpoint"
"${target[@]}" ctr tasks ls

step "remove the image on both sides"
"${source[@]}" ctr images rm "$checkpoint"
"${target[@]}" ctr images rm "$checkpoint"
