#include "parallel/comm/launcher.h"

#include <csignal>
#include <map>
#include <string>

#include "engine/base/error.h"
#include "parallel/comm/stop_flag.h"
#include "tests/support/catch.h"

using namespace pdl;
using Environment = std::map<std::string, std::string>;

namespace {

Launcher launcher_in(const Environment& environment) {
  return detect_launcher([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

}  // namespace

TEST_CASE("launchers are known by their variables") {
  CHECK(launcher_in({}).name == "none");
  CHECK(launcher_in({{"PMI_SIZE", "4"}, {"PMI_RANK", "1"}, {"MPI_LOCALRANKID", "1"}}).name == "hydra");
  CHECK(launcher_in({{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "0"}}).name == "openmpi");
  CHECK(launcher_in({{"OMPI_COMM_WORLD_SIZE", "4"}, {"JSM_NAMESPACE_RANK", "0"}, {"JSM_NAMESPACE_SIZE", "4"}}).name ==
        "jsrun");
  CHECK(launcher_in({{"PALS_RANKID", "0"}, {"PMI_RANK", "0"}, {"PMI_SIZE", "4"}}).name == "pals");
  CHECK(launcher_in({{"FLUX_TASK_RANK", "0"}, {"FLUX_JOB_SIZE", "4"}}).name == "flux");
  CHECK(launcher_in({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"PMI_SIZE", "4"}}).name == "slurm");
  CHECK(launcher_in({{"LOCAL_WORLD_SIZE", "2"}, {"WORLD_SIZE", "2"}}).name == "torchrun");
  CHECK(launcher_in({{"PMI_SIZE", "4"}}).name == "pmi");
}

TEST_CASE("a launcher inside an allocation goes before the allocation") {
  const Launcher launcher =
      launcher_in({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"MPI_LOCALRANKID", "0"}, {"PMI_SIZE", "1"}});
  CHECK(launcher.name == "hydra");
  CHECK(launcher.size == 1);
  check_launch(launcher, 1);
}

TEST_CASE("a lone rank under a launcher of several is refused, with both numbers and the cure") {
  const std::map<std::string, Environment> wrong = {{"SLURM_NTASKS", {{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "1"}}},
                                                    {"PMI_SIZE", {{"PMI_SIZE", "4"}}},
                                                    {"OMPI_COMM_WORLD_SIZE", {{"OMPI_COMM_WORLD_SIZE", "4"}}},
                                                    {"PALS_SIZE", {{"PALS_RANKID", "2"}, {"PALS_SIZE", "4"}}},
                                                    {"FLUX_JOB_SIZE", {{"FLUX_JOB_SIZE", "4"}}},
                                                    {"WORLD_SIZE", {{"WORLD_SIZE", "4"}}},
                                                    {"JSM_NAMESPACE_SIZE", {{"JSM_NAMESPACE_SIZE", "4"}}}};
  for (const auto& [variable, environment] : wrong) {
    const Launcher launcher = launcher_in(environment);
    try {
      check_launch(launcher, 1);
      FAIL("accepted " << variable);
    } catch (const ConfigError& error) {
      CHECK(error.code() == ExitCode::unsupported);
      CHECK_THAT(error.what(), StartsWith("MPI sees 1 rank but " + variable + " says 4: "));
    }
    check_launch(launcher, 4);
    check_launch(launcher, 2);  // a part of an allocation is the user's affair
  }
  CHECK_THROWS_WITH(check_launch(launcher_in({{"SLURM_NTASKS", "4"}}), 1), ContainsSubstring("srun --mpi=pmi2"));
}

TEST_CASE("what is no number says nothing") {
  for (const std::string text : {"", "many", "4x", "-4", "0", "99999999999"}) {
    const Launcher launcher = launcher_in({{"SLURM_NTASKS", text}});
    CHECK(launcher.size == 0);
    check_launch(launcher, 1);
  }
}

TEST_CASE("signals set the stop flag") {
  CHECK(!stop_was_requested());
  install_stop_handlers();
  std::raise(SIGUSR1);
  CHECK(stop_was_requested());
}
