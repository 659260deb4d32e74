#!/usr/bin/env bash
# Runs a command on a machine whose NVIDIA driver and NCCL are the stand-ins: with.sh target/release/mcc run model.mcc --device cuda --exchanges nccl ...
# EMULATED_GPUS and the like: README.md beside this.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
profile=${PROFILE:-release}
(cd "$root" && cargo build --quiet --package emulated-driver --profile "$profile")
built=${CARGO_TARGET_DIR:-$root/target}/${profile/dev/debug}/libemulated_driver.so
libraries=$(mktemp -d)
trap 'rm -rf "$libraries"' EXIT
# One file under both names is loaded once: the driver and NCCL know each other.
ln -s "$built" "$libraries/libcuda.so.1"
ln -s "$built" "$libraries/libnccl.so.2"
LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$@"
