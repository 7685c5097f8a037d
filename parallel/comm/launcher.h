#pragma once
// What started this process, read from the environment, and whether MPI agrees with it.
//
// A program linked to one MPI library and started by another's launcher runs as many lone processes that all call
// themselves rank 0 of 1, without any error. Only the environment tells.

#include <functional>
#include <string>

namespace pdl {

/// What a launcher says about the job.
struct Launcher {
  std::string name = "none";  ///< "hydra", "openmpi", "jsrun", "pals", "flux", "slurm", "torchrun", "pmi" or "none"
  std::string variable;       ///< the variable that holds the number of ranks
  int size = 0;               ///< its value; 0 when the launcher does not say
};

/// Looks a variable up; nullptr when it is not set.
using EnvironmentLookup = std::function<const char*(const char*)>;

/// The launcher nearest to this process: one that starts ranks inside an allocation goes before the allocation's own.
Launcher detect_launcher(const EnvironmentLookup& lookup);

/// Throws ConfigError(unsupported), with both numbers and the cure, when MPI sees one rank and the launcher more.
void check_launch(const Launcher& launcher, int mpi_size);

}  // namespace pdl
