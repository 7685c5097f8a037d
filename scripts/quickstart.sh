#!/usr/bin/env bash
# From a fresh checkout to a figure, in a few minutes on a laptop: installs what is missing, builds, trains two small models with
# distributed data parallelism, and draws the records.
#
#   scripts/quickstart.sh
#
# Records go to results/quick/NAME (an earlier run there is replaced), the figure to results/quick/quickstart.png.
# Environment: PDLBENCH_BUILD_DIR (build), PDLBENCH_JOBS (all cores), PDLBENCH_CMAKE_ARGS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

say "packages"
. scripts/setup.sh
pdl_setup
. scripts/setup.sh # again for the Python that may have come just now

build="${PDLBENCH_BUILD_DIR:-build}"
jobs="${PDLBENCH_JOBS:-$(nproc)}"
say "build in $build/"
generator=()
if [ ! -f "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
# shellcheck disable=SC2086  # several arguments in one variable
cmake -S . -B "$build" "${generator[@]}" ${PDLBENCH_CMAKE_ARGS:-}
cmake --build "$build" -j "$jobs" --target pdlbench
read -r -a launcher <"$build/launcher" # the one that belongs to the MPI library

# train CONFIG RANKS: trains configs/quick/CONFIG.json, records in results/quick/CONFIG
train() {
  say "${launcher[*]} -n $2 $build/pdlbench run configs/quick/$1.json --out results/quick/$1"
  OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "${launcher[@]}" -n "$2" \
    "$build/pdlbench" run "configs/quick/$1.json" --out "results/quick/$1" --force </dev/null
  records+=("results/quick/$1")
}

mkdir -p results/quick
records=()
train gpt2_kjv_ddp 4
train vgg11_fashion_ddp 2

say "what was measured"
"$build/pdlbench" report "${records[@]}"

figure=results/quick/quickstart.png
"$PDLBENCH_PYTHON" scripts/plot/plot_runs.py "${records[@]}" --out "$figure"

say "done in ${SECONDS} s"
printf 'records  %s\n' "${records[@]}"
printf 'figure   %s\n' "$figure"
