#!/usr/bin/env bash
# What exchanges take by MPI and by mcc's own means, on one machine and on two that are made of namespaces
# (docs/benchmarks/jobs.md). Contestants take turns; prints medians, and of the ratios the least and the greatest.
#
# bench/exchanges.sh MCC DIR [ROUNDS]: an mcc (with mcc-rank beside it), and a directory with mcc-rank.openmpi,
# mcc-rank.mpich or both, as `make test-launchers` leaves it in out/launchers. As root.
set -euo pipefail
mcc=$(realpath "$1")
dir=$(realpath "$2")
rounds=${3:-5}
root=$(realpath "$(dirname "$0")/..")
cd "$dir"
source "$root/tests/machines.sh"

cat /usr/share/common-licenses/* > corpus.txt
MCC_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export MCC_SECRET
# One sum of 67 MB a step, of two ranks; a small model on four.
small="-D vocab=256 -D hidden=256 -D heads=4 -D layers=4 -D seq=128 --global-batch-size 8"
"$mcc" compile "$root/models/gpt2.mdl" --dp 2 --global-batch-size 2 --bucket-size 100000000 \
  -D vocab=8192 -D hidden=512 -D heads=8 -D layers=4 -D seq=16 -o sum.mcc > /dev/null
"$mcc" compile "$root/models/gpt2.mdl" --tp 2 --pp 2 --micro-batch-size 2 $small -o tp2pp2.mcc > /dev/null
"$mcc" compile "$root/models/gpt2.mdl" --dp 4 $small -o dp4.mcc > /dev/null
machines

ssh_nodes

# started PLACE MPI RANKS COMMAND...: the command on one machine or on two.
started() {
  local place=$1 mpi=$2 ranks=$3
  shift 3
  case $place-$mpi in
    one-openmpi) on 0 mpirun.openmpi --allow-run-as-root --oversubscribe -n "$ranks" "$@" ;;
    one-mpich) on 0 mpiexec.hydra -n "$ranks" "$@" ;;
    two-openmpi)
      on 0 mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent "$dir/agent" --mca oob_tcp_if_include 10.77.0.0/24 --mca btl_tcp_if_include 10.77.0.0/24 \
        --host node0:$((ranks / 2)),node1:$((ranks / 2)) -x MCC_SECRET -x MCC_RANK "$@" --rendezvous node0:29700
      ;;
  esac
}

# measured PLACE MPI JOB EXCHANGES: milliseconds of a step, or of the sum.
measured() {
  local place=$1 mpi=$2 job=$3 exchanges=$4 ranks=4
  local run=("$mcc" run "$job.mcc" --data corpus.txt --threads-per-rank 1 --force --exchanges "$exchanges")
  MCC_RANK=$(dirname "$mcc")/mcc-rank
  [ "$exchanges" = host ] || MCC_RANK=$dir/mcc-rank.$mpi
  export MCC_RANK
  if [ "$job" = sum ]; then
    started "$place" "$mpi" 2 "${run[@]}" --steps 12 --profile --profile-steps 8 > log 2>&1 || { cat log >&2; exit 1; }
    awk '/all_reduce over dp, 16813056 f32/ { print $5 }' log
  else
    started "$place" "$mpi" $ranks "${run[@]}" --steps 25 --metrics steps.jsonl > log 2>&1 || { cat log >&2; exit 1; }
    tail -n 20 steps.jsonl | grep -o '"step_ms":[0-9.]*' | cut -d : -f 2 | sort -n | sed -n 10p
  fi
}

rm -f samples
for round in $(seq "$rounds"); do
  for job in sum tp2pp2 dp4; do
    for place in one two; do
      for mpi in openmpi mpich; do
        # Debian's MPICH starts nothing on two namespaces.
        [ -x "mcc-rank.$mpi" ] && [ $place-$mpi != two-mpich ] || continue
        for exchanges in host mpi; do
          echo "$job $place $mpi $exchanges $round $(measured $place $mpi $job $exchanges)" | tee -a samples
        done
      done
    done
  done
done
python3 - samples <<'END'
import collections, statistics, sys
found = collections.defaultdict(dict)
for job, place, mpi, exchanges, turn, time in (line.split() for line in open(sys.argv[1])):
    found[job, place, mpi, exchanges][turn] = float(time)
for job, place, mpi, _ in (key for key in found if key[3] == "host"):
    own, other = (found[job, place, mpi, how] for how in ("host", "mpi"))
    ratios = [own[turn] / other[turn] for turn in own]
    times = [statistics.median(way.values()) for way in (own, other)]
    rates = "".join(f" ({16813056 * 4 / time / 1e6:.2f} GB/s)" if job == "sum" else "" for time in times[1:])
    own_rate = f" ({16813056 * 4 / times[0] / 1e6:.2f} GB/s)" if job == "sum" else ""
    print(f"| {job} | {place} | {mpi} | {times[0]:.1f} ms{own_rate} | {times[1]:.1f} ms{rates} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")
END
