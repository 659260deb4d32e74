#!/usr/bin/env bash
# ptxas.sh DIR: puts `ptxas` and `nvdisasm` into DIR, out of pinned wheels of the Python package index. x86-64 only.
# DIR appears when it is complete, so several may run at once.
set -euo pipefail
to=$1
[ -x "$to/ptxas" ] && exit 0
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$(dirname "$to")"
work=$(mktemp -d "$to.XXXXXX")
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
  --dest "$work/wheels" --requirement "$here/requirements.txt"
mkdir "$work/bin"
python3 - "$work" <<'PYTHON'
import glob, os, sys, zipfile
work = sys.argv[1]
for tool in ["ptxas", "nvdisasm"]:
    for wheel in glob.glob(work + "/wheels/*.whl"):
        with zipfile.ZipFile(wheel) as z:
            for name in z.namelist():
                if name.endswith("/bin/" + tool):
                    with open(f"{work}/bin/{tool}", "wb") as out:
                        out.write(z.read(name))
    os.chmod(f"{work}/bin/{tool}", 0o755)
PYTHON
"$work/bin/ptxas" --version >/dev/null
mv -T "$work/bin" "$to" 2>/dev/null || [ -x "$to/ptxas" ]
