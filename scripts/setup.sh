#!/usr/bin/env bash
# Installs what pdlbench needs on Debian 12 or Ubuntu 24.04, if anything is missing. Run it or source it.
#
#   scripts/setup.sh [--tests] [--torch]
#
#   --tests  also what the tests need (Catch2)
#   --torch  also PyTorch, for the tests that compare with it (about 600 MB)
#
# Sourced, it also sets PDLBENCH_PYTHON to a Python that has NumPy and Matplotlib. On other systems it installs nothing and lists
# what is needed.

# What is off when a release does not have a package.
pdl_setup_without() {
  case "$1" in
    libdnnl-dev) echo "fp32 runs on plain loops, much slower" ;;
    libpcre2-dev) echo "GPT-2's own tokenizer is off; bytes and trained BPE work" ;;
    catch2) echo "the tests are off" ;;
    dataset-fashion-mnist) echo "the image set must be brought along; synthetic images work" ;;
    bible-kjv) echo "the text must be brought along; synthetic text works" ;;
    python3-numpy | python3-matplotlib) echo "figures are off" ;;
    python3-torch) echo "the comparison with PyTorch is skipped" ;;
    ninja-build) echo "builds use make" ;;
    *) echo "pdlbench cannot be built without it" ;;
  esac
}

pdl_setup_installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

pdl_setup() {
  local packages package root
  local -a missing=() available=()
  packages="g++ cmake ninja-build make git libdnnl-dev libcli11-dev nlohmann-json3-dev zlib1g-dev libpcre2-dev
    dataset-fashion-mnist bible-kjv python3 python3-numpy python3-matplotlib"
  while [ $# -gt 0 ]; do
    case "$1" in
      --tests) packages="$packages catch2" ;;
      --torch) packages="$packages python3-torch" ;;
      *)
        echo "setup.sh: unknown option $1; it takes --tests and --torch" >&2
        return 2
        ;;
    esac
    shift
  done
  # An MPI that is already there stays: two of them do not mix.
  command -v mpicxx >/dev/null 2>&1 || packages="$packages libmpich-dev mpich"

  if ! command -v dpkg-query >/dev/null 2>&1 || ! command -v apt-get >/dev/null 2>&1; then
    echo "setup.sh: no apt on this system, nothing was installed. pdlbench needs what Debian calls: ${packages//[[:space:]]/ }" >&2
    return 0
  fi
  for package in $packages; do
    pdl_setup_installed "$package" || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    echo "setup.sh: all packages are there"
    return 0
  fi

  echo "setup.sh: missing: ${missing[*]}"
  root=""
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
      echo "setup.sh: neither root nor sudo; ask for: apt-get install ${missing[*]}" >&2
      return 1
    fi
    root=sudo
  fi
  $root apt-get update -qq || echo "setup.sh: the package lists could not be refreshed, going on with those at hand" >&2
  for package in "${missing[@]}"; do
    if apt-cache show "$package" 2>/dev/null | grep -q '^Package:'; then
      available+=("$package")
    else
      echo "setup.sh: warning: this release has no package $package: $(pdl_setup_without "$package")" >&2
    fi
  done
  [ ${#available[@]} -gt 0 ] || return 0
  echo "setup.sh: installing ${available[*]}"
  $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${available[@]}" >/dev/null || {
    echo "setup.sh: apt-get could not install ${available[*]}" >&2
    return 1
  }
  echo "setup.sh: installed ${available[*]}"
}

# The first Python that can draw figures: packages belong to the system's own, which need not be the first in PATH.
pdl_setup_python() {
  local candidate
  for candidate in "${PDLBENCH_PYTHON:-}" python3 /usr/bin/python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import matplotlib, numpy' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo python3
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  pdl_setup "$@"
else
  # A file sourced without arguments sees those of the script that sources it, so scripts call pdl_setup themselves.
  PDLBENCH_PYTHON="$(pdl_setup_python)"
  export PDLBENCH_PYTHON
fi
