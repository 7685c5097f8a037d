#pragma once
// The command line as a struct. Parsing knows no MPI and no configuration.

#include <string>
#include <vector>

namespace pdl {

struct Args {
  enum class Command {
    run,
    verify,
    plan,
    profile,
    list,
    info,
    report,
    data_inspect,
    data_prepare
  } command = Command::run;

  std::string config;                    ///< run, verify, plan, profile
  std::vector<std::string> overrides;    ///< "key.path=value"
  std::string out;                       ///< run: directory of the records; profile, data prepare: file
  bool resume = false, force = false;    ///< run
  int steps = 5;                         ///< verify
  double tolerance = 0.0;                ///< verify: 0 means the dtype's own
  int ranks = 1;                         ///< plan
  bool json = false;                     ///< plan, list, info
  std::string topic = "all";             ///< list: engines, workloads, datasets, all
  std::vector<std::string> directories;  ///< report
  std::string format = "table";          ///< report: table, csv, json
  std::string path;                      ///< data inspect, data prepare: input
  std::string tokenizer = "bytes";       ///< data prepare: bytes, bpe, gpt2
  std::string merges;                    ///< data prepare: merges file of gpt2
  int vocabulary_size = 4096;            ///< data prepare: bpe

  std::string command_line;  ///< as typed, for the record
};

/// Prints help, version or a usage error (exit code 2) itself; then `end` is set.
struct ParsedArgs {
  Args args;
  bool end = false;
  int exit_code = 0;
};
/// `speak` is false on all ranks but one, so that a usage error is printed once.
ParsedArgs parse_args(int argc, char** argv, bool speak);

}  // namespace pdl
