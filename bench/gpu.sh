#!/usr/bin/env bash
# Builds the runtime on a GPU host, tests it there and measures it beside FSDP2.
#
#   bench/gpu.sh [run] [OPTIONS]  checks the host, builds, runs bench/gpu.py OPTIONS;
#                                 writes out/gpu/report.txt and report.json, and the
#                                 same into the folder $OUT if that is set
#       --built                   takes build-gpu/ as it is
#       --only, --tests, --cases, --sides
#                                 a slice; its results join those of earlier slices
#       --deadline S              seconds of an item, in place of its own
#   bench/gpu.sh --list [OPTIONS] what would run, item by item; needs no GPU
#   bench/gpu.sh build            builds alone, into build-gpu/; needs no GPU
#   bench/gpu.sh pack DIR         where the compiler is: writes to DIR what a host
#                                 without it and without a network needs, and DIR.tar.gz
#
# The host needs a GPU with its driver, torch >= 2.11 in $PYTHON (python3), cmake >=
# 3.25, nvcc and g++; FSDP_GPU_JOBS compile at a time (all cores). Exit status: 0 all
# passed, 1 something failed, 2 the host lacks something.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=$root/.venv/bin/python
fi

fail() {
  echo "gpu.sh: error: $*" >&2
  exit 2
}

say() { echo "gpu.sh: $*"; }

need_torch() {
  torch=$("$PYTHON" -c '
import importlib.util as u, os, sys
spec = u.find_spec("torch")
sys.exit(1) if spec is None else print(os.path.dirname(spec.origin))' 2>/dev/null) ||
    fail "expected torch >= 2.11 in $PYTHON, got none (PYTHON names another)"
  local version
  version=$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))')
  at_least "${version%%+*}" 2.11 || fail "expected torch >= 2.11 in $PYTHON, got $version"
  say "torch $version"
}

at_least() { # GOT WANTED
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -1)" = "$2" ]
}

need_tools() {
  local version
  command -v cmake >/dev/null || fail "expected cmake >= 3.25 on the PATH, got none"
  version=$(cmake --version | awk 'NR == 1 { print $3 }')
  at_least "$version" 3.25 || fail "expected cmake >= 3.25, got $version"
  command -v "${CXX:-g++}" >/dev/null || fail "expected the C++ compiler ${CXX:-g++} on the PATH, got none"
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  command -v nvcc >/dev/null || fail "expected nvcc on the PATH or in CUDA_HOME, got none"
  local release cuda
  release=$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  cuda=$("$PYTHON" -c 'import torch; print(torch.version.cuda)')
  [ "${release%%.*}" = "${cuda%%.*}" ] ||
    fail "expected nvcc ${cuda%%.*}, as torch's CUDA $cuda, got $release"
  say "nvcc $release, torch's CUDA $cuda"
}

need_gpu() {
  command -v nvidia-smi >/dev/null || fail "expected a GPU, got no nvidia-smi on the PATH"
  local query
  query=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1) ||
    fail "expected a GPU, got from nvidia-smi: $(echo "$query" | head -1)"
  say "GPU and driver: $(echo "$query" | head -1)"
}

need_usable_gpu() {
  "$PYTHON" -c '
import sys, torch
if not torch.cuda.is_available():
    sys.exit(1)
print("gpu.sh: NCCL", ".".join(map(str, torch.cuda.nccl.version())))' ||
    fail "expected a torch that can use the GPU, got torch.cuda.is_available() == False"
}

build() {
  local options=(-DTorch_ROOT="$torch")
  local cache=build-gpu/CMakeCache.txt
  if [ -f $cache ]; then
    options+=(-G "$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' $cache)")
  elif ! ninja --version >/dev/null 2>&1; then
    options+=(-G "Unix Makefiles")
  fi
  say "building into build-gpu/"
  mkdir -p out/gpu
  build_logged "${options[@]}" 2>&1 | tee out/gpu/build.log || {
    [ -z "${OUT:-}" ] || { mkdir -p "$OUT" && cp out/gpu/build.log "$OUT/"; }
    fail "expected a build, got the errors in out/gpu/build.log"
  }
}

build_logged() {
  cmake --preset gpu "$@" && cmake --build build-gpu --parallel "${FSDP_GPU_JOBS:-$(nproc)}"
}

# `built` where build-gpu/ is taken as it is; the others are those of bench/gpu.py.
read_options() {
  built=
  options=()
  local option asks=
  for option in "$@"; do
    case $option in
    --built) built=1 ;;
    --list | -h | --help) asks=$option ;;
    *) options+=("$option") ;;
    esac
  done
  [ -z "$asks" ] || exec "$PYTHON" bench/gpu.py "$asks" "${options[@]}"
}

# The folder with a header, as the compiler finds it.
include_folder() {
  local path
  path=$(echo "#include <$1>" | "${CXX:-g++}" -E -x c++ - 2>/dev/null |
    sed -n "s|^# [0-9]* \"\(.*\)/$1\".*|\1|p" | head -1)
  [ -n "$path" ] || fail "expected the header $1 to pack, got none: run make setup"
  echo "$path"
}

pack() {
  local target=$1 opt=${FSDP_OPT:-build/bin/fsdp-opt}
  [ -x "$opt" ] || fail "expected fsdp-opt at $opt: run make build, or set FSDP_OPT"
  [ ! -e "$target" ] || fail "expected a new folder, got $target"
  say "compiling the plans of the benchmark"
  "$PYTHON" bench/gpu_plans.py large --opt "$opt"
  mkdir -p "$target"
  git ls-files -z | tar -c --null -T - | tar -x -C "$target"
  mkdir -p "$target/out" "$target/third_party/include"
  cp -r out/gpu-plans "$target/out/"
  cp -rL "$(include_folder nlohmann/json.hpp)/nlohmann" "$(include_folder CLI/CLI.hpp)/CLI" \
    "$(include_folder xxhash.h)/xxhash.h" "$target/third_party/include/"
  local source=/usr/src/googletest
  if [ -d $source ]; then
    cp -r $source "$target/third_party/googletest"
  else
    say "no $source: the host builds the tests only if it has GoogleTest"
  fi
  tar -czf "$target.tar.gz" -C "$(dirname "$target")" "$(basename "$target")"
  say "$(du -h "$target.tar.gz" | cut -f 1) in $target.tar.gz; there: bench/gpu.sh"
}

case ${1:-run} in
pack)
  [ $# -eq 2 ] || fail "expected pack DIR, got $# arguments"
  pack "${2%/}"
  ;;
build)
  need_torch
  need_tools
  build
  ;;
-h | --help)
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '/^set/d'
  ;;
run | -*)
  [ "${1:-}" = run ] && shift
  read_options "$@"
  need_gpu
  need_torch
  # A name that is not there costs no build.
  "$PYTHON" bench/gpu.py --list "${options[@]}" >/dev/null
  need_usable_gpu
  if [ -z "$built" ]; then
    need_tools
    build
  fi
  exec "$PYTHON" bench/gpu.py "${options[@]}"
  ;;
*)
  fail "expected run, build or pack, got $1"
  ;;
esac
