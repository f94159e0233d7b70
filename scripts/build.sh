#!/usr/bin/env bash
# Configures (once) and builds one CMake preset, or some of its targets:
# scripts/build.sh PRESET JOBS [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1 jobs=$2
shift 2
case $preset in
dev) dir=build ;;
*) dir=build-$preset ;;
esac

if [ ! -f "$dir/build.ninja" ]; then
  printf 'build: configuring preset %s in %s/\n' "$preset" "$dir"
  mkdir -p "$dir"
  if ! cmake --preset "$preset" >"$dir/configure.log" 2>&1; then
    cat "$dir/configure.log" >&2
    rm -f "$dir/build.ninja"
    exit 1
  fi
fi
printf 'build: %s/: %s\n' "$dir" "$(date +%T)"
ninja -C "$dir" -j "$jobs" --quiet "$@"
