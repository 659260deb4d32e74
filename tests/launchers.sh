#!/usr/bin/env bash
# One model under every launcher there is, on two machines that share nothing but files and a network: network,
# process, host name, IPC and mount namespaces of Linux, joined by a cable. Each run must save the weights that one
# machine's run saves, to the byte; then a rank is killed, and the cable pulled. Under each launcher a machine then
# dies in the midst of a run and comes back: the job must go on from its last checkpoint, and save what a run that
# nothing happened to saves.
#
# tests/launchers.sh MCC DIR: an mcc (with mcc-rank and libemulated_driver.so beside it), and a directory to work in.
# As root. Uses what it finds of Slurm and munge, Open MPI, MPICH and torchrun (TORCHRUN=, else on the PATH), and
# names what it does not find. DIR/mcc-rank.openmpi and DIR/mcc-rank.mpich are ranks' programs that were built with
# MPI.
set -euo pipefail
mcc=$(realpath "$1")
driver=$(dirname "$mcc")/libemulated_driver.so
mkdir -p "$2"
dir=$(realpath "$2")
tests=$(realpath "$(dirname "$0")")
models=$tests/../models
torchrun=${TORCHRUN:-$(command -v torchrun || true)}
cd "$dir"
export SLURM_CONF=$dir/slurm.conf
source "$tests/machines.sh"

munged() {
  echo "install -d -o munge /run/munge; su -s /bin/sh munge -c 'munged --force --log-file=/var/log/munge/node$1.log --seed-file=/var/lib/munge/seed$1'"
}

slurm_node() {
  on "$1" sh -c "pgrep munged > /dev/null || { $(munged "$1"); }; slurmd -N node$1"
}

slurm() {
  rm -rf slurm
  mkdir -p slurm/state slurm/node0 slurm/node1
  cat > slurm.conf <<END
ClusterName=mcc
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$dir/slurm/state
SlurmdSpoolDir=$dir/slurm/%n
SlurmdTimeout=10
AuthInfo=cred_expire=5
SlurmctldPidFile=$dir/slurm/ctld.pid
SlurmdPidFile=$dir/slurm/%n.pid
SlurmctldLogFile=$dir/slurm/ctld.log
SlurmdLogFile=$dir/slurm/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
NodeName=node[0-1] CPUs=$(nproc)
PartitionName=all Nodes=node[0-1] Default=YES State=UP
END
  # Both machines see one /tmp.
  echo 'PMIxCliTmpDirBase=/run' > mpi.conf
  [ -f /etc/munge/munge.key ] || mungekey -c
  chown munge: /etc/munge /etc/munge/munge.key /var/lib/munge /var/log/munge
  # Machines come back with what is left of these.
  rm -f run?/munge/*
  on 0 sh -c "$(munged 0)"
  on 0 slurmctld
  for k in 0 1; do slurm_node $k; done
  for _ in $(seq 60); do
    [ "$(on 0 sinfo --noheader --format %D --states idle)" = 2 ] && return
    sleep 0.5
  done
  echo "Slurm's nodes do not come up: see $dir/slurm"
  exit 1
}

run="$mcc run model.mcc --data corpus.txt"
# For what passes an environment on, and for what does not.
MCC_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
(umask 077; printf '%s\n' "$MCC_SECRET" > secret)
export MCC_SECRET
step="--nodes 2 --ntasks-per-node 2 --overcommit"
tried=0

# same WHAT COMMAND...: the command must save, as saved.safetensors, what one machine saved, or $wanted.
same() {
  local what=$1
  shift
  rm -f saved.safetensors
  if "$@" > log 2>&1 && cmp -s "${wanted:-alone.safetensors}" saved.safetensors; then
    echo "ok      $what"
    tried=$((tried + 1))
  else
    cat log
    echo "FAILED  $what"
    exit 1
  fi
}

# ends WHAT TEXT COMMAND...: the command must fail in time and say so.
ends() {
  local what=$1 says=$2
  shift 2
  if "$@" > log 2>&1 || [ $? = 124 ] || ! grep -q "$says" log; then
    cat log
    echo "FAILED  $what"
    exit 1
  fi
  echo "ok      $what: $(grep -m1 -o "$says.*" log)"
  tried=$((tried + 1))
}

# both COMMAND: on both machines at once, with N their number.
both() {
  on 1 env N=1 sh -c "$1" > log1 2>&1 &
  local other=$!
  on 0 env N=0 sh -c "$1"
  wait $other
}

# lose: machine 1 dies, once the job that is to begin has saved.
lose() {
  until [ -e checkpoints/step-$interval ]; do sleep 0.05; done
  kill -9 "$(cat machine1)"
}

# returns SECONDS COMMAND...: machine 1 comes back after so long, and does this.
returns() {
  sleep "$1"
  shift
  boot 1
  cable
  "$@"
}

# lost WHAT COMMAND...: machine 1 dies while the command runs, which must save what a run saves that nothing
# happened to.
lost() {
  local what="$1: a machine that dies and comes back"
  shift
  rm -rf checkpoints
  limit=300 wanted=unharmed.safetensors same "$what" "$@"
}

# elastic COMMAND: on both machines, of which 1 dies and comes back, and there the command with it: after the 15 s
# in which torchrun still counts it in.
elastic() {
  on 1 $1 > log1 2>&1 &
  (lose; returns 25 on 1 $1) > log2 2>&1 &
  local other=$!
  on 0 $1
  wait $other
}

# stays_away WHAT COMMAND: as before, but machine 1 stays away: the run must say that it goes on with a smaller
# plan, and end.
stays_away() {
  rm -rf checkpoints
  on 1 $2 > log1 2>&1 &
  lose &
  if limit=300 on 0 $2 > log 2>&1 && grep -q 'smaller.mcc` runs in place' log && [ -e checkpoints/step-$steps ]; then
    echo "ok      $1: a machine that dies and stays away"
    tried=$((tried + 1))
  else
    cat log
    echo "FAILED  $1: a machine that dies and stays away"
    exit 1
  fi
  returns 0 true
}

# requeued: the batch job runs until it ends, with a machine that dies and comes back when Slurm has missed it.
requeued() {
  (lose; returns 30 slurm_node 1) > log2 2>&1 &
  on 0 sbatch --wait --output job.log --open-mode append job.sh
}

# repeated COMMAND...: once more if it fails, as it must, with a machine that dies and comes back.
repeated() {
  (lose; returns 3 ssh_node 1) > log2 2>&1 &
  local other=$!
  if on 0 "$@"; then
    echo "it did not notice that a machine died"
    return 1
  fi
  wait $other
  on 0 "$@"
}

# by_mpi WHAT START...: programs of every axis exchange by MPI, ranks' programs being $rank; losses and weights must
# be those of one machine without it.
by_mpi() {
  local what="$1, exchanges by MPI" plan
  shift
  for plan in tp2pp2 dp4 cp2dp2 ep2tp2; do
    rm -f saved.jsonl
    wanted=$plan.safetensors same "$what: $plan" on 0 env MCC_RANK="$rank" "$@" "$mcc" run $plan.mcc --exchanges mpi \
      --data corpus.txt --steps 5 --force --save-weights saved.safetensors --metrics saved.jsonl
    if [ "$(losses saved.jsonl)" != "$(losses $plan.jsonl)" ]; then
      echo "FAILED  $what: other losses of $plan"
      exit 1
    fi
  done
}

losses() {
  grep -o '"step":[0-9]*\|"loss":[^,}]*\|"grad_norm":[^,}]*' "$1"
}

# dies_by_mpi WHAT START...: a rank is killed that others wait for in MPI.
dies_by_mpi() {
  local what="$1, exchanges by MPI: a rank that is killed"
  shift
  rm -f steps.jsonl
  (until [ -s steps.jsonl ]; do sleep 0.1; done; kill -9 "$(pgrep --newest -f "^$rank --rank")") &
  ends "$what" "was killed by signal 9 at step" on 0 env MCC_RANK="$rank" "$@" "$mcc" run tp2pp2.mcc --exchanges mpi \
    --data corpus.txt --steps 100000 --metrics steps.jsonl
}

cat /usr/share/common-licenses/* > corpus.txt
sizes="-D vocab=256 -D hidden=64 -D heads=4 -D layers=4 -D seq=64"
"$mcc" compile "$models/gpt2.mdl" --tp 2 --pp 2 --micro-batch-size 2 --global-batch-size 8 $sizes -o model.mcc > /dev/null
$run --steps 5 --force --save-weights alone.safetensors > /dev/null
saves="$run --steps 5 --force --save-weights saved.safetensors"
# Of which a run that loses a machine has done a part when it does.
steps=400
interval=50
lasts="$run --steps $steps --force --save-weights saved.safetensors"
$run --steps $steps --force --save-weights unharmed.safetensors > /dev/null
lasts="$lasts --save checkpoints --save-interval $interval --keep 2 --resume auto"
# For programs that exchange by MPI.
compile_for() {
  "$mcc" compile "$models/$2.mdl" --global-batch-size 8 $sizes "${@:3}" -o "$1.mcc" > /dev/null
  "$mcc" run "$1.mcc" --data corpus.txt --steps 5 --force --save-weights "$1.safetensors" --metrics "$1.jsonl" > /dev/null
}
if ls mcc-rank.* > /dev/null 2>&1; then
  compile_for tp2pp2 gpt2 --tp 2 --pp 2 --micro-batch-size 2
  compile_for dp4 gpt2 --dp 4 --zero 1
  compile_for cp2dp2 gpt2 --cp 2 --dp 2
  compile_for ep2tp2 mixtral --dp 2 --ep 2 --tp 2 --micro-batch-size 4 -D layers=2 -D kv_heads=2 -D experts=4 -D expert_ffn=64
fi
machines

if [ -n "$torchrun" ]; then
  torchrun="env --unset MCC_SECRET $torchrun --no-python --nnodes 2 --nproc-per-node 2"
  own="$saves --secret-file secret"
  same "torchrun, a master" both "$torchrun --node-rank \$N --master-addr node0 --master-port 29500 $own"
  same "torchrun, c10d" both "$torchrun --rdzv-backend c10d --rdzv-endpoint node0:29400 $own"
  # A torchrun that goes on as rank 0 names the place of the store that all share no second time, so that who is new
  # in a later rendezvous waits for it in vain (PyTorch 2.15).
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  elastic="$torchrun --max-restarts 3 --rdzv-backend c10d"
  own_lasts="$lasts --secret-file secret"
  lost "torchrun" elastic "$elastic --rdzv-endpoint node0:29402 $own_lasts"
  "$mcc" compile "$models/gpt2.mdl" --tp 2 --micro-batch-size 2 --global-batch-size 8 $sizes -o smaller.mcc > /dev/null
  elastic=${elastic/--nnodes 2/--nnodes 1:2}
  stays_away "torchrun --nnodes 1:2" "$elastic --rdzv-endpoint node0:29403 $own_lasts --fallback smaller.mcc"
else
  echo "left    torchrun: not found"
fi
if command -v srun slurmctld slurmd munged > /dev/null; then
  slurm
  same "srun" on 0 srun $step $saves
  printf '#!/bin/sh\n#SBATCH --nodes 2\n#SBATCH --ntasks-per-node 2\n#SBATCH --overcommit\nsrun --overcommit %s\n' "$saves" > job.sh
  same "sbatch, srun" on 0 sbatch --wait --output job.log job.sh
  printf '#!/bin/sh\n#SBATCH --nodes 2\n#SBATCH --ntasks-per-node 2\n#SBATCH --overcommit\n%s\n' "$saves" > job.sh
  same "sbatch alone: all ranks on its machine" on 0 sbatch --wait --output job.log job.sh
  [ -z "$torchrun" ] ||
    same "srun, torchrun" on 0 srun --nodes 2 --ntasks 2 $torchrun --rdzv-backend c10d --rdzv-endpoint node0:29401 $own
  if [ -f "$driver" ]; then
    mkdir -p libraries sockets
    ln -sf "$driver" libraries/libcuda.so.1
    ln -sf "$driver" libraries/libnccl.so.2
    "$mcc" compile "$models/gpt2.mdl" --target sm_80 --tp 2 --pp 2 -D vocab=256 -D hidden=32 -D heads=2 -D head_dim=16 -D layers=2 -D seq=8 -o gpu.mcc > /dev/null
    "$mcc" run gpu.mcc --device emulated --data corpus.txt --steps 3 --force --save-weights emulated.safetensors > /dev/null
    wanted=emulated.safetensors same "srun, two GPUs of the stand-in a machine, NCCL" \
      on 0 env LD_LIBRARY_PATH="$dir/libraries" EMULATED_GPUS=2 EMULATED_NCCL_SOCKETS="$dir/sockets" \
      srun $step "$mcc" run gpu.mcc --device cuda --exchanges nccl --data corpus.txt --steps 3 --force --save-weights saved.safetensors
  else
    echo "left    GPUs of the stand-in: no $driver"
  fi
  ends "no secret" "no loopback address" on 0 env --unset MCC_SECRET srun $step $saves
  same "no secret, knowingly" on 0 env --unset MCC_SECRET srun $step $saves --insecure-rendezvous
  same "srun, one machine, no secret" on 0 env --unset MCC_SECRET srun --nodes 1 --ntasks 4 --overcommit $saves
  ends "a world of another size" "srun started 2 ranks, but the artifact is for 4" on 0 srun --nodes 2 --ntasks 2 $saves
  (sleep 5; pkill -9 --newest -x mcc-rank) &
  ends "a rank that is killed" "was killed by signal 9 at step" on 0 srun $step $run --steps 100000
  (sleep 5; on 0 ip link set cable0 down; sleep 20; on 0 ip link set cable0 up) &
  ends "a cable that is pulled" "has not been heard of" on 0 srun $step $run --steps 100000
  printf '#!/bin/sh\n#SBATCH --nodes 2\n#SBATCH --ntasks-per-node 2\n#SBATCH --overcommit\n#SBATCH --requeue\nsrun --overcommit --kill-on-bad-exit %s || scontrol requeue $SLURM_JOB_ID\n' "$lasts" > job.sh
  lost "sbatch, scontrol requeue" requeued
  # Debian's MPICH speaks no PMI that Slurm does.
  rank=$dir/mcc-rank.openmpi
  if [ -x "$rank" ] && on 0 srun --mpi=list 2>&1 | grep -q "\bpmix\b"; then
    by_mpi "srun --mpi=pmix" srun --mpi=pmix $step
  else
    echo "left    srun --mpi=pmix, exchanges by MPI: no $rank, or Slurm lacks it"
  fi
else
  echo "left    Slurm: not found"
fi
ssh_nodes
meets="MASTER_ADDR=node0 MASTER_PORT=29600"
if command -v mpirun.openmpi > /dev/null; then
  same "mpirun of Open MPI, one machine" on 0 env $meets mpirun.openmpi -x MCC_SECRET --allow-run-as-root --oversubscribe -n 4 $saves
  same "mpirun of Open MPI, one machine, nothing set" on 0 env --unset MCC_SECRET mpirun.openmpi --allow-run-as-root --oversubscribe -n 4 $saves
  openmpi="mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent $dir/agent --mca oob_tcp_if_include 10.77.0.0/24 --host node0:2,node1:2 -x MCC_SECRET"
  same "mpirun of Open MPI" on 0 $openmpi $saves --rendezvous node0:29600
  lost "mpirun of Open MPI, run again" repeated $openmpi $lasts --rendezvous node0:29600
  rank=$dir/mcc-rank.openmpi
  if [ -x "$rank" ]; then
    ends "mpirun of Open MPI, an mcc-rank without MPI" "was built without it" on 0 env $meets mpirun.openmpi -x MCC_SECRET --allow-run-as-root --oversubscribe -n 4 $run --steps 5 --exchanges mpi
    by_mpi "mpirun of Open MPI, one machine" mpirun.openmpi --allow-run-as-root --oversubscribe -n 4
    openmpi="$openmpi -x MCC_RANK -x MASTER_ADDR=node0 -x MASTER_PORT=29601 --mca btl_tcp_if_include 10.77.0.0/24"
    by_mpi "mpirun of Open MPI" $openmpi
    dies_by_mpi "mpirun of Open MPI" $openmpi
  else
    echo "left    mpirun of Open MPI, exchanges by MPI: no $rank"
  fi
else
  echo "left    Open MPI: not found"
fi
if command -v mpiexec.hydra > /dev/null; then
  same "mpiexec of MPICH, one machine" on 0 env $meets mpiexec.hydra -n 4 $saves
  same "mpiexec of MPICH, one machine, nothing set" on 0 env --unset MCC_SECRET mpiexec.hydra -n 4 $saves
  hydra="mpiexec.hydra -launcher ssh -launcher-exec $dir/agent -hosts node0:2,node1:2 -n 4"
  same "mpiexec of MPICH" on 0 $hydra $saves --rendezvous node0:29600
  lost "mpiexec of MPICH, run again" repeated $hydra $lasts --rendezvous node0:29600
  rank=$dir/mcc-rank.mpich
  if [ -x "$rank" ]; then
    # Between namespaces the UCX of Debian's MPICH finds no way, whatever program it is.
    by_mpi "mpiexec of MPICH, one machine" mpiexec.hydra -n 4
    dies_by_mpi "mpiexec of MPICH, one machine" mpiexec.hydra -n 4
    [ ! -x mcc-rank.openmpi ] || ends "mpiexec of MPICH, an mcc-rank of Open MPI" "is of another MPI" \
      on 0 env MCC_RANK="$dir/mcc-rank.openmpi" mpiexec.hydra -n 4 "$mcc" run tp2pp2.mcc --exchanges mpi --data corpus.txt --steps 5
  else
    echo "left    mpiexec of MPICH, exchanges by MPI: no $rank"
  fi
else
  echo "left    MPICH: not found"
fi
[ $tried -gt 0 ] || { echo "no launcher found"; exit 1; }
echo "launchers: $tried passed"
