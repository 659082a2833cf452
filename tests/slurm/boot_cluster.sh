#!/bin/bash
# The first process of an emulated Slurm cluster: runs in namespaces of its own and ends everything when it ends.
# usage: boot_cluster.sh ROOT SHARED NUM_NODES (ROOT was prepared by cluster.py; SHARED is visible on all nodes)
set -euo pipefail
root=$1 shared=$2 num_nodes=$3

mount --make-rprivate /
# An unreachable name server costs every lookup of a host name seconds: names come from the hosts file alone.
for file in hosts resolv.conf nsswitch.conf; do
    mount --bind "$root/etc/$file" "/etc/$file"
done
hostname controller
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns

ip link set lo up
ip link add bridge0 type bridge
ip address add 10.77.0.1/24 dev bridge0
ip link set bridge0 up

munged --force --key-file="$root/munge.key" --socket="$root/munge.socket" --seed-file="$root/munge.seed" \
    --pid-file="$root/munge.pid" --log-file="$root/log/munged.log"
slurmctld -D -f "$root/slurm.conf" &

for ((index = 1; index <= num_nodes; index++)); do
    name=node$index
    ip netns add "$name"
    ip link add "veth$index" type veth peer name eth0 netns "$name"
    ip link set "veth$index" master bridge0 up
    ip -n "$name" link set lo up
    ip -n "$name" address add "10.77.0.$((10 + index))/24" dev eth0
    ip -n "$name" link set eth0 up
    # Not `ip netns exec`, which mounts /sys anew, without the cgroups that slurmd looks for.
    nsenter --net="/run/netns/$name" unshare --pid --mount --uts --ipc --fork --kill-child --mount-proc \
        bash "$(dirname "$0")/boot_node.sh" "$root" "$shared" "$name" &
done
wait
