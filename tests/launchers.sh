#!/usr/bin/env bash
# One model under every launcher there is, on two machines that share nothing but files and a network: network, process, host name, IPC and mount namespaces of
# Linux, joined by a cable. Each run must save the weights that one machine's run saves, to the byte; then a rank is killed, and the cable pulled.
#
# tests/launchers.sh MCC DIR: an mcc (with mcc-rank and libemulated_driver.so beside it), and a directory to work in. As root. Uses what it finds of Slurm and munge, Open MPI, MPICH
# and torchrun (TORCHRUN=, else on the PATH), and names what it does not find.
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
  [ -f /etc/munge/munge.key ] || mungekey -c
  chown munge: /etc/munge /etc/munge/munge.key /var/lib/munge /var/log/munge
  for k in 0 1; do
    on $k sh -c "install -d -o munge /run/munge; su -s /bin/sh munge -c 'munged --log-file=/var/log/munge/node$k.log --seed-file=/var/lib/munge/seed$k'"
  done
  on 0 slurmctld
  for k in 0 1; do on $k slurmd -N node$k; done
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

cat /usr/share/common-licenses/* > corpus.txt
"$mcc" compile "$models/gpt2.mdl" --tp 2 --pp 2 --micro-batch-size 2 --global-batch-size 8 \
  -D vocab=256 -D hidden=64 -D heads=4 -D layers=4 -D seq=64 -o model.mcc > /dev/null
$run --steps 5 --force --save-weights alone.safetensors > /dev/null
saves="$run --steps 5 --force --save-weights saved.safetensors"
machines

if [ -n "$torchrun" ]; then
  torchrun="env --unset MCC_SECRET $torchrun --no-python --nnodes 2 --nproc-per-node 2"
  own="$saves --secret-file secret"
  same "torchrun, a master" both "$torchrun --node-rank \$N --master-addr node0 --master-port 29500 $own"
  same "torchrun, c10d" both "$torchrun --rdzv-backend c10d --rdzv-endpoint node0:29400 $own"
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
else
  echo "left    Slurm: not found"
fi
meets="MASTER_ADDR=node0 MASTER_PORT=29600"
if command -v mpirun.openmpi > /dev/null; then
  same "mpirun of Open MPI, one machine" on 0 env $meets mpirun.openmpi -x MCC_SECRET --allow-run-as-root --oversubscribe -n 4 $saves
  same "mpirun of Open MPI, one machine, nothing set" on 0 env --unset MCC_SECRET mpirun.openmpi --allow-run-as-root --oversubscribe -n 4 $saves
else
  echo "left    Open MPI: not found"
fi
if command -v mpiexec.hydra > /dev/null; then
  same "mpiexec of MPICH, one machine" on 0 env $meets mpiexec.hydra -n 4 $saves
  same "mpiexec of MPICH, one machine, nothing set" on 0 env --unset MCC_SECRET mpiexec.hydra -n 4 $saves
else
  echo "left    MPICH: not found"
fi
[ $tried -gt 0 ] || { echo "no launcher found"; exit 1; }
echo "launchers: $tried passed"
