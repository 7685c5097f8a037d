#!/usr/bin/env bash
# Installs what is missing, builds, and runs the tests. Arguments go to ctest:
#
#   scripts/test.sh                 all
#   scripts/test.sh -L unit         one label: unit, mpi, gpu, arch, cli, pytorch
#   scripts/test.sh -R bucket -V    by name, with output
#
# Environment: PDLBENCH_BUILD_DIR (build), PDLBENCH_JOBS (all cores), PDLBENCH_CMAKE_ARGS (such as "-DPDLBENCH_WERROR=ON")
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
pdl_setup --tests

build="${PDLBENCH_BUILD_DIR:-build}"
jobs="${PDLBENCH_JOBS:-$(nproc)}"
generator=()
if [ ! -f "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi

# shellcheck disable=SC2086  # several arguments in one variable
cmake -S . -B "$build" "${generator[@]}" -DPDLBENCH_TESTS=ON ${PDLBENCH_CMAKE_ARGS:-}
cmake --build "$build" -j "$jobs"
exec ctest --test-dir "$build" -j "$jobs" --output-on-failure --no-tests=error "$@"
