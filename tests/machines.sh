# Two machines that share nothing but files and a network, for scripts that source this in the directory to work in:
# network, process, host name, IPC and mount namespaces of Linux, node0 (10.77.0.1) and node1 (10.77.0.2), joined by
# a cable. As root. They go with the script. The files machine0 and machine1 name their first processes.

# on N COMMAND...: runs a command on a machine, for two minutes or $limit seconds at most.
on() {
  local k=$1
  shift
  timeout "${limit:-120}" nsenter --target "$(cat "machine$k")" --net --uts --pid --mount --ipc --wd="$dir" "$@"
}

# boot N: starts machine N. It is there as long as its first process, which also collects processes that lost their
# parents.
boot() {
  rm -f "up$1"
  mkdir -p "run$1"
  unshare --net --uts --pid --mount --ipc --fork --mount-proc --kill-child sh -c "hostname node$1; mount --bind hosts /etc/hosts; mount --bind run$1 /run
    ip link set lo up; ip link add net$1 type bridge; ip addr add 10.77.0.$(($1 + 1))/24 dev net$1; ip link set net$1 up; touch up$1; while :; do sleep 1; done" > /dev/null 2>&1 &
  until [ -e "up$1" ]; do sleep 0.1; done
  pgrep --parent $! > "machine$1"
}

# cable: joins both machines, also again if one was away. A machine keeps its address without one.
cable() {
  on 0 ip link del cable0 2> /dev/null || true
  ip link add cable0 netns "$(cat machine0)" type veth peer name cable1 netns "$(cat machine1)"
  for k in 0 1; do
    on $k ip link set "cable$k" master "net$k" up
  done
}

machines() {
  printf '127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n' > hosts
  boot 0
  boot 1
  cable
}

# For launchers that start what they need on other machines.
ssh_node() {
  on "$1" sh -c "mkdir -p /run/sshd && /usr/sbin/sshd -f '$dir/sshd_config'"
}

ssh_nodes() {
  rm -f ssh_key* host_key*
  ssh-keygen -q -t ed25519 -N '' -f ssh_key
  ssh-keygen -q -t ed25519 -N '' -f host_key
  printf '%s\n' "HostKey $dir/host_key" "AuthorizedKeysFile $dir/ssh_key.pub" 'StrictModes no' 'PidFile none' 'PermitRootLogin yes' > sshd_config
  printf '#!/bin/sh\nexec ssh -F none -i %s -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n' "$dir/ssh_key" > agent
  chmod +x agent
  for k in 0 1; do ssh_node $k; done
}

trap 'cat machine0 machine1 2> /dev/null | xargs --no-run-if-empty kill -9 2> /dev/null || true' EXIT
