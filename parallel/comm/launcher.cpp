#include "parallel/comm/launcher.h"

#include <array>
#include <cstdlib>

#include "engine/base/error.h"

namespace pdl {
namespace {

/// A launcher is recognised by `mark`, a variable that it alone sets, and gives the number of ranks in `size`.
struct KnownLauncher {
  const char* name;
  const char* mark;
  const char* size;
  const char* cure;
};

constexpr const char* kSameLibrary = "use the launcher of the MPI library that pdlbench is linked to";

// From the nearest to the farthest. jsrun sets Open MPI's variables too, so it goes first; srun with a PMI plugin sets
// PMI_SIZE, so the plain PMI entry, which covers unknown launchers, goes last.
constexpr std::array<KnownLauncher, 8> kKnownLaunchers = {{
    {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", kSameLibrary},
    {"hydra", "MPI_LOCALRANKID", "PMI_SIZE", "use the mpiexec of the MPI library that pdlbench is linked to"},
    {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "this mpirun is Open MPI's: use the mpiexec of the MPI library that pdlbench is linked to"},
    {"pals", "PALS_RANKID", "PALS_SIZE", kSameLibrary},
    {"flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE",
     "start with flux run -o mpi=... for the MPI library that pdlbench is linked to"},
    {"slurm", "SLURM_PROCID", "SLURM_NTASKS",
     "start with srun --mpi=pmi2 (or --mpi=pmix, see srun --mpi=list), or with the MPI library's own mpiexec; "
     "for one rank use srun -n 1"},
    {"torchrun", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "pdlbench is started by mpirun or srun, not by torchrun"},
    {"pmi", "PMI_SIZE", "PMI_SIZE", kSameLibrary},
}};

int to_size(const char* text) {
  if (text == nullptr) return 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return end != text && *end == '\0' && value > 0 && value < 100'000'000 ? static_cast<int>(value) : 0;
}

}  // namespace

Launcher detect_launcher(const EnvironmentLookup& lookup) {
  for (const KnownLauncher& known : kKnownLaunchers) {
    // The number alone is sign enough: some sites pass only that on.
    if (lookup(known.mark) == nullptr && (known.size == std::string("PMI_SIZE") || lookup(known.size) == nullptr))
      continue;
    return {known.name, known.size, to_size(lookup(known.size))};
  }
  return {};
}

void check_launch(const Launcher& launcher, int mpi_size) {
  if (mpi_size != 1 || launcher.size <= 1) return;
  std::string cure;
  for (const KnownLauncher& known : kKnownLaunchers) {
    if (launcher.name == known.name) cure = known.cure;
  }
  throw ConfigError(str("MPI sees 1 rank but ", launcher.variable, " says ", launcher.size, ": ", cure),
                    ExitCode::unsupported);
}

}  // namespace pdl
