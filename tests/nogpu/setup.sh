#!/usr/bin/env bash
# Makes $NOGPU_HOME (~/.cache/nogpu): a virtualenv with torch's CUDA build, and stubs of NVIDIA's libraries. Downloads
# 650 MB once; called again, it builds the stubs if their sources are newer. Python, transformers and the rest are those
# of the repository's .venv. Exit code 2 and one line if it cannot be done here.
set -euo pipefail
cannot() {
  echo "setup.sh: error: $1" >&2
  exit 2
}
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "it is for Linux on x86-64"
for tool in gcc readelf strings flock; do
  command -v $tool > /dev/null || cannot "it needs $tool (of Debian's gcc, binutils, util-linux)"
done
here=$(cd "$(dirname "$0")" && pwd)
home=${NOGPU_HOME:-$HOME/.cache/nogpu}
mkdir -p "$home"
exec 9> "$home/lock"
flock 9
log=$home/pip.log
pip() { "$home/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps "$@" 2> "$log"; }
python=$here/../../.venv/bin/python
if [ ! -e "$home/downloaded" ]; then
  rm -rf "$home/venv" "$home/runtime"
  "$python" -m venv "$home/venv" > "$log" || cannot "python -m venv: $(tail -n 1 "$log")"
  # of the runtime only its headers are of use: beside torch, its library would be loaded instead of the stub
  { pip torch===2.11.0 triton==3.6.0 && pip --target "$home/runtime" nvidia-cuda-runtime==13.0.96; } ||
    cannot "pip: $(grep -m 1 ERROR "$log" || tail -n 1 "$log")"
  touch "$home/downloaded"
fi
site=$("$home/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
"$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/rest.pth"  # in sys.path behind this torch
rm -f "$site"/*.py  # an earlier version's
cp "$here/nogpu_values.py" "$site/"
mkdir -p "$site/nogpu-1.dist-info"  # what torch calls at the end of its import
printf '[torch.backends]\nnogpu = nogpu_values:install\n' > "$site/nogpu-1.dist-info/entry_points.txt"
printf 'Metadata-Version: 2.1\nName: nogpu\nVersion: 1\n' > "$site/nogpu-1.dist-info/METADATA"
sources=$(cat "$here"/build.py "$here"/src/* "$here/../support/fake_nvml.c" | sha256sum)
if [ "$sources" != "$(cat "$home/built" 2> /dev/null)" ]; then
  "$home/venv/bin/python" "$here/build.py" "$home/lib" "$home/runtime/nvidia/cu13/include"
  echo "$sources" > "$home/built"
fi
