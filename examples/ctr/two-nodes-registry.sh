#!/bin/bash
# Moves a running GPU container from one machine to another, through a registry.
#
#   two-nodes-registry.sh SOURCE TARGET CONTAINER REPOSITORY
#
# SOURCE and TARGET are commands that run a command as root on a machine, REPOSITORY a place that both can reach:
#
#   two-nodes-registry.sh "ssh root@a" "ssh root@b" job registry.example:5000/checkpoints
#
# OPTIONS=--plain-http   options of ctr for the registry, also --user and --hosts-dir
#
# Both need containerd 2.x, firn installed as docs/guide/install.md describes, the same driver version, and the
# container's own image. Who can read the registry can read the memory of the container, and its secrets.
set -euo pipefail

if (($# != 4)); then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
read -ra source <<<"$1"
read -ra target <<<"$2"
name=$3 checkpoint=$4/$3:latest
read -ra options <<<"${OPTIONS-}"

step() { printf '\n== %s\n' "$*"; }

step "checkpoint $name; it runs on until the image is in the registry"
"${source[@]}" ctr containers checkpoint --rw --task "$name" "$checkpoint"

step "push"
"${source[@]}" ctr images push --local "${options[@]}" "$checkpoint"

step "fetch; a checkpoint is not unpacked, as images are by ctr images pull"
"${target[@]}" ctr content fetch "${options[@]}" "$checkpoint"

step "end it at the source; the target repeats the work since the checkpoint"
"${source[@]}" ctr tasks rm --force "$name"
"${source[@]}" ctr containers rm "$name"

step "restore"
"${target[@]}" ctr containers restore --rw --live "$name" "$checkpoint"
"${target[@]}" ctr tasks ls

step "remove the image on both sides; it stays in the registry"
"${source[@]}" ctr images rm "$checkpoint"
"${target[@]}" ctr images rm "$checkpoint"
