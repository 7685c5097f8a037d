#include "cli/args.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "engine/base/config_reader.h"
#include "pdl_build_info.h"

namespace pdl {
namespace {

const std::vector<std::string> kCommands = {"run", "verify", "plan", "profile", "list", "info", "report", "data"};

const char* const kDescription =
    "Train VGG and GPT-2 with parallel deep-learning engines on shared kernels, and record what it costs.\n"
    "The number of ranks comes from MPI:  mpirun -n 4 pdlbench run configs/quick/gpt2_kjv_ddp.json --out results/mine";

const char* const kExitCodes =
    "Exit codes: 0 ok, 1 internal, 2 usage or configuration, 3 data, 4 unsupported combination, 5 out of memory,\n"
    "6 timeout or ranks out of step, 7 not a number, 8 check failed, 75 stopped on request (resumable)";

void add_config(CLI::App* command, Args& args) {
  command->add_option("CONFIG", args.config, "JSON file of the experiment")->required();
  command->add_option("OVERRIDES", args.overrides, "key.path=value, for instance training.epochs=3");
}

void add_training_commands(CLI::App& app, Args& args) {
  CLI::App* run =
      app.add_subcommand("run", "Train, evaluate and record; the last line printed is RESULT VALID or RESULT INVALID");
  add_config(run, args);
  run->add_option("--out", args.out, "directory of the records (default: results/NAME)");
  run->add_flag("--resume", args.resume, "go on from the checkpoint in --out");
  run->add_flag("--force", args.force, "replace the records in --out");
  run->callback([&args] { args.command = Args::Command::run; });

  CLI::App* verify =
      app.add_subcommand("verify", "Run the engine and its reference side by side, compare every tensor (exit code 8)");
  add_config(verify, args);
  verify->add_option("--steps", args.steps, "optimizer steps to compare")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  verify->add_option("--tolerance", args.tolerance, "largest relative error (default: 1e-11 in fp64, 1e-5 in fp32)");
  verify->callback([&args] { args.command = Args::Command::verify; });

  CLI::App* plan =
      app.add_subcommand("plan", "Print buckets, memory and bytes per step; needs no mpirun and no accelerator");
  add_config(plan, args);
  plan->add_option("--ranks", args.ranks, "number of ranks to plan for")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  plan->add_flag("--json", args.json, "print JSON on standard output");
  plan->callback([&args] { args.command = Args::Command::plan; });

  CLI::App* profile = app.add_subcommand(
      "profile", "Measure each layer's times on one rank, for pipelines that are cut by time (engine.profile)");
  add_config(profile, args);
  profile->add_option("--out", args.out, "JSON file to write")->required();
  profile->callback([&args] { args.command = Args::Command::profile; });
}

void add_other_commands(CLI::App& app, Args& args) {
  CLI::App* list = app.add_subcommand("list", "List engines with their knobs, workloads, data sets and settings");
  list->add_option("TOPIC", args.topic, "engines, workloads, datasets or settings")
      ->check(CLI::IsMember({"all", "engines", "workloads", "datasets", "settings"}));
  list->add_flag("--json", args.json, "print JSON on standard output");
  list->callback([&args] { args.command = Args::Command::list; });

  CLI::App* info = app.add_subcommand("info", "Show devices, libraries, ranks and where they run");
  info->add_flag("--json", args.json, "print JSON on standard output");
  info->callback([&args] { args.command = Args::Command::info; });

  CLI::App* report = app.add_subcommand("report", "Put the records of many runs into one table");
  report->add_option("DIR", args.directories, "directories of runs")->required();
  report->add_option("--format", args.format, "table, csv or json")
      ->check(CLI::IsMember({"table", "csv", "json"}))
      ->capture_default_str();
  report->callback([&args] { args.command = Args::Command::report; });

  CLI::App* data = app.add_subcommand("data", "Look into data files, or turn text into tokens");
  data->require_subcommand(1);
  CLI::App* inspect = data->add_subcommand("inspect", "Say what a file is and whether it is whole");
  inspect->add_option("PATH", args.path, "IDX, token, merges or text file")->required();
  inspect->callback([&args] { args.command = Args::Command::data_inspect; });
  CLI::App* prepare = data->add_subcommand("prepare", "Tokenize a text file into a token file (llm.c format)");
  prepare->add_option("PATH", args.path, "UTF-8 text file")->required();
  prepare->add_option("--out", args.out, "token file to write")->required();
  prepare->add_option("--tokenizer", args.tokenizer, "bytes, bpe (trains its own vocabulary) or gpt2")
      ->check(CLI::IsMember({"bytes", "bpe", "gpt2"}))
      ->capture_default_str();
  prepare->add_option("--vocabulary-size", args.vocabulary_size, "of bpe")
      ->check(CLI::Range(257, 65535))
      ->capture_default_str();
  prepare->add_option("--merges", args.merges, "merges file of gpt2");
  prepare->callback([&args] { args.command = Args::Command::data_prepare; });
}

/// A mistyped command gets its nearest neighbour instead of "a subcommand is required".
std::string usage_hint(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.empty() || word[0] == '-') continue;
    if (std::find(kCommands.begin(), kCommands.end(), word) != kCommands.end()) return "";
    const std::string near = nearest_word(word, kCommands);
    return str("unknown command \"", word, "\"", near.empty() ? "" : str("; did you mean \"", near, "\"?"));
  }
  return "";
}

std::string joined_command_line(int argc, char** argv) {
  std::string line;
  for (int i = 0; i < argc; ++i) line += str(i == 0 ? "" : " ", argv[i]);
  return line;
}

}  // namespace

ParsedArgs parse_args(int argc, char** argv, bool speak) {
  ParsedArgs parsed;
  CLI::App app(kDescription, "pdlbench");
  app.set_version_flag("--version", str("pdlbench ", kVersion, " (", kGitSha, kGitDirty ? ", modified" : "", ")"));
  app.footer(kExitCodes);
  app.require_subcommand(1);
  add_training_commands(app, parsed.args);
  add_other_commands(app, parsed.args);
  parsed.args.command_line = joined_command_line(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    if (speak) app.exit(success);
    parsed.end = true;
  } catch (const CLI::ParseError& error) {
    const std::string hint = usage_hint(argc, argv);
    if (speak) {
      std::fprintf(stderr, "error: %s\n", hint.empty() ? error.what() : hint.c_str());
      std::fprintf(stderr,
                   "Commands: run, verify, plan, profile, list, info, report, data. See pdlbench COMMAND --help.\n");
    }
    parsed.end = true;
    parsed.exit_code = static_cast<int>(ExitCode::usage);
  }
  return parsed;
}

}  // namespace pdl
