#!/usr/bin/env bash
# Runs a program on two hosts: network namespaces that a link connects, each with a host name and a
# /dev/shm of its own. Needs root.
#
#   PYTHON=python RANKS=2 bash two_hosts.sh PROGRAM    two ranks on each host
set -eu
if [ "$1" = node ]; then
  hostname "host$2"
  mount -t tmpfs tmpfs /dev/shm
  ip link set lo up
  export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="veth$2" TP_SOCKET_IFNAME="veth$2"
  exec "$PYTHON" -m torch.distributed.run --nnodes 2 --node-rank "$2" --nproc-per-node "$RANKS" \
    --master-addr 10.77.0.1 --master-port 29500 "$3"
fi
name="pipekernels$$"
trap 'for host in 0 1; do ip netns del "$name-$host" || true; done' EXIT
for host in 0 1; do ip netns add "$name-$host"; done
ip link add veth0 netns "$name-0" type veth peer name veth1 netns "$name-1"
for host in 0 1; do
  ip -n "$name-$host" addr add "10.77.0.$((host + 1))/24" dev "veth$host"
  ip -n "$name-$host" link set "veth$host" up
done
for host in 0 1; do
  ip netns exec "$name-$host" unshare -m -i -u bash "$0" node "$host" "$1" &
done
for _ in 0 1; do wait -n; done
