#!/usr/bin/env bash
# Two ranks of a script on two hosts with a slow link: network namespaces, joined by a cable (veth) on which tc's token
# bucket (tbf) lets so many Mbit a second through. Needs Linux, root, and ip and tc (Debian's iproute2).
#
#   benchmarks/slow_link.sh 1000 python 05_ddp/ddp_from_scratch.py --device cpu --seq-len 64 --steps 16
set -euo pipefail
mbit=$1
shift
hosts=("slow0-$$" "slow1-$$")
ranks=()

# shellcheck disable=SC2329  # a trap calls it
clean_up() {
  trap - EXIT
  for rank in "${ranks[@]}"; do kill "$rank" 2> /dev/null || true; done
  wait
  for host in "${hosts[@]}"; do ip netns delete "$host" || true; done
}
trap clean_up EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add eth0 netns "${hosts[0]}" type veth peer name eth0 netns "${hosts[1]}"
for rank in 0 1; do
  host=${hosts[rank]}
  ip -n "$host" address add "10.78.0.$((rank + 1))/24" dev eth0
  ip -n "$host" link set lo up
  ip -n "$host" link set eth0 up
  tc -n "$host" qdisc add dev eth0 root tbf rate "${mbit}mbit" burst 256kb limit 64mb # so long that nothing is dropped
done

export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.78.0.1 MASTER_PORT=29500
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
export TORCH_CPP_LOG_LEVEL=ERROR # these hosts have no names, of which torch warns
for rank in 0 1; do
  RANK=$rank ip netns exec "${hosts[rank]}" "$@" &
  ranks+=($!)
done
for _ in 0 1; do wait -n; done # the first rank that fails ends the script, and so the other rank
