# Two machines that share nothing but files and a network, for scripts that source this in the directory to work in: network, process, host name, IPC and mount namespaces of Linux,
# node0 (10.77.0.1) and node1 (10.77.0.2), joined by a cable. As root. They go with the script.
declare -a machine=()

# on N COMMAND...: runs a command on a machine, for two minutes or $limit seconds at most.
on() {
  local k=$1
  shift
  timeout "${limit:-120}" nsenter --target "${machine[$k]}" --net --uts --pid --mount --ipc --wd="$dir" "$@"
}

# A machine is there as long as its first process, which also collects processes that lost their parents.
machines() {
  printf '127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n' > hosts
  for k in 0 1; do
    rm -f "up$k"
    mkdir -p "run$k"
    unshare --net --uts --pid --mount --ipc --fork --mount-proc --kill-child sh -c "hostname node$k; mount --bind hosts /etc/hosts; mount --bind run$k /run
      ip link set lo up; touch up$k; while :; do sleep 1; done" > /dev/null 2>&1 &
    until [ -e "up$k" ]; do sleep 0.1; done
    machine[$k]=$(pgrep --parent $!)
  done
  ip link add cable0 netns "${machine[0]}" type veth peer name cable1 netns "${machine[1]}"
  for k in 0 1; do
    on $k ip addr add "10.77.0.$((k + 1))/24" dev "cable$k"
    on $k ip link set "cable$k" up
  done
}
trap 'kill -9 "${machine[@]}" 2> /dev/null || true' EXIT
