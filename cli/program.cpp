#include "cli/program.h"

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cli/commands/commands.h"

namespace pdl {
namespace {

struct Failure {
  std::string message;
  ExitCode code = ExitCode::internal;
};

int run_alone(const Args& args) {
  switch (args.command) {
    case Args::Command::plan:
      return plan_command(args);
    case Args::Command::list:
      return list_command(args);
    case Args::Command::report:
      return report_command(args);
    case Args::Command::data_inspect:
      return data_inspect_command(args);
    case Args::Command::data_prepare:
      return data_prepare_command(args);
    default:
      break;
  }
  throw Error("this command needs ranks");
}

int run_together(World& world, const Args& args) {
  switch (args.command) {
    case Args::Command::run:
      return run_command(world, args);
    case Args::Command::verify:
      return verify_command(world, args);
    case Args::Command::profile:
      return profile_command(world, args);
    case Args::Command::info:
      return info_command(world, args);
    default:
      break;
  }
  throw Error("this command needs no ranks");
}

bool needs_ranks(const Args& args) {
  return args.command == Args::Command::run || args.command == Args::Command::verify ||
         args.command == Args::Command::profile || args.command == Args::Command::info;
}

/// Runs `body` and turns whatever it throws into a Failure.
template <typename Body>
int guarded(Body&& body, std::unique_ptr<Failure>& failure) {
  try {
    return body();
  } catch (const Error& error) {
    failure = std::make_unique<Failure>(Failure{error.what(), error.code()});
  } catch (const std::bad_alloc&) {
    failure = std::make_unique<Failure>(Failure{"the host ran out of memory", ExitCode::out_of_memory});
  } catch (const std::exception& error) {
    failure = std::make_unique<Failure>(Failure{error.what(), ExitCode::internal});
  }
  return static_cast<int>(failure->code);
}

/// The last line of a run that failed says so to scripts.
void print(const Args& args, const Failure& failure, const std::string& who) {
  std::fprintf(stderr, "error: %s%s\n", who.c_str(), failure.message.c_str());
  std::fflush(stderr);
  if (args.command == Args::Command::run) {
    std::printf("RESULT INVALID reason=%s code=%d\n", std::string(name_of(failure.code)).c_str(),
                static_cast<int>(failure.code));
  }
  std::fflush(stdout);
}

}  // namespace

bool is_first_by_environment() {
  for (const char* variable :
       {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "PALS_RANKID", "FLUX_TASK_RANK"}) {
    if (const char* rank = std::getenv(variable)) return std::atoi(rank) == 0;
  }
  return true;
}

int run_program(const Args& args, int argc, char** argv) {
  std::unique_ptr<Failure> failure;
  if (!needs_ranks(args)) {
    const int code = guarded([&] { return run_alone(args); }, failure);
    if (failure) print(args, *failure, "");
    return code;
  }
  std::unique_ptr<World> world;
  int code = guarded(
      [&] {
        world = make_world(&argc, &argv);
        return 0;
      },
      failure);
  if (failure) {
    print(args, *failure, "");
    return code;
  }
  code = guarded([&] { return run_together(*world, args); }, failure);
  if (!failure && code == static_cast<int>(ExitCode::interrupted) && world->info().size > 1) {
    // A launcher that was itself told to stop does not always pass the ranks' code on; an abort's it does.
    world->barrier();
    world->abort(ExitCode::interrupted);
  }
  if (!failure) return code;
  // What one rank meets, others often meet too, and the rest wait for it in vain: the first to fail speaks for all.
  const bool first = world->claim_first_failure(failure->code, failure->message);
  const bool of_one_rank =
      world->info().size > 1 && failure->code != ExitCode::usage && failure->code != ExitCode::numeric;
  if (first) print(args, *failure, of_one_rank ? str("rank ", world->info().rank, "/", world->info().size, ": ") : "");
  if (world->info().size == 1) return code;
  world->abort(first ? failure->code : world->first_failure().code);
  return code;  // not reached; g++ 12 does not see that a virtual function never returns
}

}  // namespace pdl
