#!/usr/bin/env bash
# Strangers on one machine attack the ports of a run whose ranks are on it and on another (tests/machines.sh): COUNT connections of every kind that runtime/tests/hostile knows, half of them
# while the last rank is missing. The run must save what an undisturbed one saves, to the byte, start within two seconds of it, and have no descriptor more. Then the other machine plays rank 0
# for a rank of this one, with the secret and without, which runs nothing but its own artifact and says what is wrong.
#
# tests/hostile.sh MCC ATTACKER DIR [COUNT]: an mcc (with mcc-rank beside it), the test binary `processes` of the runtime, and a directory to work in. As root.
set -euo pipefail
mcc=$(realpath "$1")
attacker=$(realpath "$2")
mkdir -p "$3"
dir=$(realpath "$3")
count=${4:-10000}
tests=$(realpath "$(dirname "$0")")
models=$tests/../models
cd "$dir"
source "$tests/machines.sh"
MCC_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export MCC_SECRET

steps=${STEPS:-1500}
limit=900
declare -a ranks=()

# rank N NAME: starts one of four ranks, of which two are on each machine, and which save NAME.safetensors.
rank() {
  on $(($1 / 2)) env RANK="$1" WORLD_SIZE=4 LOCAL_RANK=$(($1 % 2)) LOCAL_WORLD_SIZE=2 GROUP_RANK=$(($1 / 2)) MASTER_ADDR=node0 MASTER_PORT=29500 \
    "$mcc" run model.mcc --data corpus.txt --steps "$steps" --force --save-weights "$2.safetensors" > "log$1" 2>&1 &
  ranks[$1]=$!
}

# ports: where processes on rank 0's machine listen.
ports() {
  on 0 ss --listening --tcp --numeric --no-header | awk '{ print $4 }'
}

# attack COUNT: from the other machine, at all these ports, without the run's secret; if none is open, where the ranks met.
attack() {
  on 1 env --unset MCC_SECRET MCC_TEST_ATTACK="$1 10.77.0.1:29500 $(ports | grep -v :29500 | tr '\n' ' ')" "$attacker" --exact worlds::besieged::attacker > attack.log
}

# The most descriptors that a process of a rank has.
descriptors() {
  for k in 0 1; do on $k sh -c 'for p in $(pgrep -x mcc); do ls "/proc/$p/fd" | wc -l; done'; done | sort -n | tail -1
}

milliseconds() { echo $(($(date +%s%N) / 1000000)); }

# train NAME TRIES: a run with so many hostile connections. Sets start, the milliseconds from the last rank's start to the first step, and most, the descriptors in the midst of the run.
train() {
  local half=$(($2 / 2)) begun besieger
  rm -f log?
  for r in 0 1 2; do rank $r "$1"; done
  until ports | grep -q :29500; do sleep 0.05; done
  [ $half = 0 ] || attack $half
  # The rest comes while the last rank starts, and during the run.
  (for _ in $(seq 10); do [ $half = 0 ] || attack $((half / 10)); done) &
  besieger=$!
  begun=$(milliseconds)
  rank 3 "$1"
  until grep -qs '^step ' log0; do sleep 0.02; done
  start=$(($(milliseconds) - begun))
  wait $besieger
  # Strangers that are gone are let go at once.
  sleep 1
  most=$(descriptors)
  on 0 pgrep -x mcc-rank > /dev/null || { echo "FAILED  the run was over before the attack: STEPS=$((4 * steps)) $0"; exit 1; }
  for r in 0 1 2 3; do wait "${ranks[$r]}" || { cat log?; echo "FAILED  rank $r of the run $1"; exit 1; }; done
}

"$mcc" compile "$models/gpt2.mdl" --tp 2 --pp 2 --micro-batch-size 2 --global-batch-size 8 \
  -D vocab=256 -D hidden=64 -D heads=4 -D layers=4 -D seq=64 -o model.mcc > /dev/null
cat /usr/share/common-licenses/* > corpus.txt
machines
train quiet 0
quiet=$start descriptors=$most
train besieged "$count"
echo "$count hostile connections: the start took $start ms, $quiet undisturbed; $most descriptors, $descriptors undisturbed"
cmp quiet.safetensors besieged.safetensors || { echo "FAILED  the numbers differ"; exit 1; }
[ $((start - quiet)) -lt 2000 ] || { echo "FAILED  the start was delayed"; exit 1; }
[ "$most" -le "$descriptors" ] || { echo "FAILED  descriptors were left"; exit 1; }

# deceived HOW MESSAGE: rank 1, on the first machine, is told that rank 0 is on the other, where somebody plays it in this way. It ends with the message, and saves nothing.
deceived() {
  local status=0
  local -a secret=()
  [ "$1" != stranger ] || secret=(--unset MCC_SECRET)
  on 1 env "${secret[@]}" MCC_TEST_FALSE_RANK_0="node1 29501 pair.mcc trap.mcc ${1/stranger/orders}" "$attacker" --exact worlds::besieged::false_rank_0 > false.log 2>&1 &
  local false=$!
  on 0 env RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29501 \
    "$mcc" run pair.mcc --data corpus.txt --steps 4 --force --save-weights deceived.safetensors > deceived.log 2>&1 || status=$?
  wait $false || true
  [ $status = 1 ] && grep -q "$2" deceived.log || { cat deceived.log false.log; echo "FAILED  a false rank 0 ($1): status $status"; exit 1; }
  [ ! -e deceived.safetensors ] && [ ! -e stolen.safetensors ] || { echo "FAILED  a rank saved for a false rank 0 ($1)"; exit 1; }
  echo "a false rank 0 ($1): $(grep -o "$2" deceived.log | head -1)"
}
small=("$models/gpt2.mdl" --tp 2 -D vocab=256 -D hidden=32 -D heads=2 -D layers=1 -D seq=32 --micro-batch-size 1 --global-batch-size 1)
"$mcc" compile "${small[@]}" -o pair.mcc > /dev/null
"$mcc" compile "${small[@]}" --lr 1 -o trap.mcc > /dev/null
rm -f deceived.safetensors stolen.safetensors
deceived stranger "has not proved that it knows this rank's secret"
deceived orders "a rank said something unreadable"
deceived elsewhere "what rank 0 says of the ranks cannot be: another place for rank 1 than its own"
deceived more "rank 0's .mcc run. on node1 is gone"
echo "hostile: passed"
