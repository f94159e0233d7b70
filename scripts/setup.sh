#!/usr/bin/env bash
# Installs what building and testing need and is missing: Debian packages and
# the pinned Python packages of requirements.txt in .venv. Idempotent; does
# nothing (and needs neither network nor root) on a machine that has it all.
#
#   scripts/setup.sh            everything
#   scripts/setup.sh --python   only .venv (hosts that run captures, not builds)
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

packages=(
  g++ clang-22 lld-22 libclang-rt-22-dev clang-format-22
  cmake ninja-build ccache
  llvm-22-dev llvm-22-tools libmlir-22-dev mlir-22-tools
  libcli11-dev nlohmann-json3-dev libgtest-dev libgmock-dev libxxhash-dev
  zlib1g-dev libzstd-dev
  chromium-headless-shell # opens the pages of fsdp-opt --emit html in tests
)

installed() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# A python3 new enough and able to create virtual environments with pip.
usable_python() {
  command -v python3 >/dev/null && python3 -c '
import sys, ensurepip, venv
sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Those of the Python that .venv is, or will be, made of.
python_headers() {
  local python=.venv/bin/python
  [ -x "$python" ] || python=python3
  "$python" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "packages are missing and neither root nor sudo is at hand"
  fi
}

install_packages() {
  local missing=() absent=() package
  for package in "$@"; do
    installed "$package" || missing+=("$package")
  done
  if [ ${#missing[@]} = 0 ]; then
    say "Debian packages: all present"
    return
  fi
  say "Debian packages: installing ${missing[*]}"
  as_root apt-get update -qq
  for package in "${missing[@]}"; do
    apt-cache show --no-all-versions "$package" >/dev/null 2>&1 || absent+=("$package")
  done
  if [ ${#absent[@]} != 0 ]; then
    die "no configured apt source has: ${absent[*]}" \
      "(LLVM and MLIR 22 must be installable by apt; add a source that carries them)"
  fi
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

if [ "${1:-}" = --python ]; then
  packages=()
elif [ $# != 0 ]; then
  die "unknown argument \"$1\" (expected --python or nothing)"
fi
needs_python=
if [ ! -x .venv/bin/python ] && ! usable_python; then
  packages+=(python3 python3-venv)
  needs_python=yes
fi
if [ "${1:-}" != --python ] && ! python_headers; then
  packages+=(python3-dev)
fi
debian=
if [ ${#packages[@]} != 0 ]; then
  command -v dpkg-query >/dev/null ||
    die "this is no Debian-like system: install the equivalents of: ${packages[*]}"
  # Beside the Python packages, unless these need some of them.
  install_packages "${packages[@]}" &
  debian=$!
  [ -z "$needs_python" ] || wait "$debian"
fi

if [ ! -x .venv/bin/python ]; then
  say "creating .venv with $(python3 --version)"
  python3 -m venv .venv
fi

stamp=.venv/.requirements.sha256
if sha256sum --check --status "$stamp" 2>/dev/null; then
  say "Python packages: as pinned"
else
  say "Python packages: installing requirements.txt into .venv"
  # uv takes a seventh of pip's time, but does not know all of pip's settings.
  pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" uv==0.13.9 2>/dev/null &&
    .venv/bin/uv pip install --quiet --python .venv/bin/python -r requirements.txt 2>/dev/null ||
    "${pip[@]}" -r requirements.txt
  # uv leaves this to the first import, and where PYTHONDONTWRITEBYTECODE is set, to each process:
  # that doubled the time of `import torch`. Templates among the packages do not compile.
  .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true
  sha256sum requirements.txt >"$stamp"
fi

# Puts python/ on .venv's import path: `fsdp_mlir` is used from the tree.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "$(cat "$site/fsdp_mlir.pth" 2>/dev/null)" != "$PWD/python" ]; then
  say "making python/fsdp_mlir importable in .venv"
  printf '%s\n' "$PWD/python" >"$site/fsdp_mlir.pth"
fi
[ -z "$debian" ] || wait "$debian"
