#!/usr/bin/env bash
# Train with DeepSpeed's own launcher on the hosts of a hostfile. The same command on each of them, in any order:
#
#     HOSTFILE=hosts launch/deepspeed/hostfile.sh --stage 3 --run-dir /shared/run --save-every 100 --resume
#
# HOSTFILE has a line per host: its name or address, and how many processes it runs, as `node0 slots=8`. All meet at the
# first one's MASTER_PORT. Flags go to the training script, SCRIPT. --run-dir is on storage that all hosts see.
# Without this file the launcher wants ssh to every host, without a password, and pdsh; then one command on one of them
# does the same: deepspeed --hostfile hosts 06_fsdp_zero/train_zero.py ...
# After SIGTERM, SIGUSR1 or SIGHUP to this script the ranks save and end, with exit code 75. `deepspeed` itself would
# leave them running.
set -euo pipefail
fail() { echo "hostfile.sh: error: $*" >&2; exit 2; }
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

command -v deepspeed >/dev/null || fail "there is no deepspeed on the PATH: pip install deepspeed==0.19.8"
[[ -n ${HOSTFILE:-} ]] || fail "HOSTFILE is not set: a file with a line such as 'node0 slots=8' per host"
[[ -f $HOSTFILE ]] || fail "HOSTFILE=$HOSTFILE: no such file"
hosts=$(sed 's/#.*//' "$HOSTFILE" | awk 'NF { print $1 }')
[[ -n $hosts ]] || fail "HOSTFILE=$HOSTFILE names no host: a line such as 'node0 slots=8' for each"

# which of the hosts this one is: by name, or by an address that the name resolves to
own=" localhost $(hostname) $(hostname -s) $(hostname -I) "
node_rank=${NODE_RANK:-}
count=0
for host in $hosts; do
  for name in "$host" $(getent ahosts "$host" | awk '{ print $1 }'); do
    [[ $own != *" $name "* ]] || node_rank=${node_rank:-$count}
  done
  count=$((count + 1))
done
[[ -n $node_rank ]] || fail "HOSTFILE=$HOSTFILE does not name this host ($(hostname), $(hostname -I)): set NODE_RANK"
[[ $node_rank =~ ^[0-9]+$ && $node_rank -lt $count ]] || fail "NODE_RANK=$node_rank is not one of 0 to $((count - 1))"

# the processes of this host
slots=$(sed 's/#.*//' "$HOSTFILE" | awk -v rank="$node_rank" 'NF && n++ == rank { sub(/.*slots=/, ""); print $1 }')
[[ " $*" == *" --device"* ]] || python -c "import sys, torch; sys.exit(not torch.cuda.device_count())" ||
  fail "torch sees no GPU here: look at nvidia-smi, or say --device cpu to train on the CPU"

# how long to wait, the interfaces between the hosts, and what your site may have to change
export NPROC_PER_NODE=$slots SCRIPT=${SCRIPT:-$repo/06_fsdp_zero/train_zero.py}
# shellcheck source=launch/torchrun/settings.sh
. "$repo/launch/torchrun/settings.sh"
head=${hosts%%$'\n'*}
gloo_interface "$head"

command=(
  deepspeed --hostfile "$HOSTFILE" --no_ssh --node_rank "$node_rank"
  --master_addr "$head" --master_port "${MASTER_PORT:-29500}" --quiet "$script" "$@"
)
printf '%q ' "${command[@]}" && echo
"${command[@]}" &
deepspeed=$!
# The launcher starts a child, which starts the ranks. Only the ranks are told: the child would end with code 1
# shellcheck disable=SC2317  # the trap calls it
stop() {
  child=$(pgrep -P "$deepspeed") || return 0
  pkill -TERM -P "$child" || kill -TERM "$child" "$deepspeed"  # if there are no ranks yet
}
trap stop TERM USR1 HUP
code=0
wait "$deepspeed" || code=$?
while kill -0 "$deepspeed" 2>/dev/null; do  # the first wait ends with the signal, not with the job
  code=0
  wait "$deepspeed" || code=$?
done
exit "$code"
