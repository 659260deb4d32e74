#!/usr/bin/env bash
# A refactoring leaves programs as they are: compares what two builds of mcc make of the sixty compiles of compiles.txt, byte by byte.
#
#     tests/same_dumps/compare.sh OLD NEW [LINES]        paths of two mcc binaries; LINES as sed takes them, `10,20p`
#
# renames.sed turns words of the old dumps into the new ones. Beside dumps of all levels, what a compile says of ranks and memory is
# compared, and the job that ranks execute (not where renames change it; JOBS=0 leaves it out where its form changed).
set -euo pipefail
old=$(realpath "$1") new=$(realpath "$2") lines=${3:-1,\$p}
here=$(realpath "$(dirname "$0")")
cd "$here/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

one() { # BINARY NAME ARGUMENTS..: compiles into $work/NAME; ends with the compile's own status.
  local binary=$1 out=$work/$2 status=0
  shift 2
  rm -rf "$out" && mkdir -p "$out"
  "$binary" compile "models/$@" --emit graph,sharded,local,schedule,program,kernel -o "$out/job.mcc" >"$out/said" 2>&1 || status=$?
  echo "exit $status" >>"$out/said"
  # Seconds and paths differ from compile to compile.
  sed -i -E -e '/^seconds /d' -e '/^verifying /d' -e '/^wrote /d' -e '/^code /d' -e "s#$out#OUT#g" "$out/said"
}

count=0 failed=0 compiled=0 old_seconds=0 new_seconds=0
while read -r line; do
  count=$((count + 1))
  read -ra arguments <<<"$line"
  start=$(date +%s%N)
  one "$old" old "${arguments[@]}"
  middle=$(date +%s%N)
  one "$new" new "${arguments[@]}"
  end=$(date +%s%N)
  old_seconds=$((old_seconds + middle - start)) new_seconds=$((new_seconds + end - middle))
  grep -qx 'exit 0' "$work/new/said" && compiled=$((compiled + 1))
  find "$work/old" -name '*.txt' -o -name said | xargs sed -i -E -f "$here/renames.sed"
  skip=(-x manifest.json -x kernels.json)
  [ "${JOBS:-1}" = 1 ] || skip+=(-x job.bin)
  if ! diff -rq "${skip[@]}" "$work/old" "$work/new" >"$work/diff"; then
    failed=$((failed + 1))
    echo "differs: $line"
    sed -e "s#$work/##g" -e 's/^/    /' "$work/diff" | head -5
    diff -r "${skip[@]}" "$work/old" "$work/new" | grep -a '^[<>]' | cut -c1-200 | head -6 | sed 's/^/    /' || true
  fi
done < <(grep -v '^#' "$here/compiles.txt" | sed -n "$lines")
echo "$((count - failed)) of $count are the same ($compiled compile); $((old_seconds / 1000000)) ms before, $((new_seconds / 1000000)) ms after"
[ "$failed" = 0 ] && [ "$compiled" = "$count" ]
