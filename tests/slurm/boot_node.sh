#!/bin/bash
# The first process of one emulated node: its own host name, processes, network, /tmp and /dev/shm.
# usage: boot_node.sh ROOT SHARED NAME
set -euo pipefail
root=$1 shared=$2 name=$3

hostname "$name"
# A node's /tmp is its own, except where the shared folder lies in it.
mkdir -p "$root/nodes/$name/tmp"
chmod 1777 "$root/nodes/$name/tmp"
if [[ $shared == /tmp/* ]]; then
    mkdir -p "$root/nodes/$name$shared"
    mount --bind "$shared" "$root/nodes/$name$shared"
fi
mount --rbind "$root/nodes/$name/tmp" /tmp
mount -t tmpfs -o size=16g tmpfs /dev/shm
exec slurmd -D -N "$name" -f "$root/slurm.conf"
