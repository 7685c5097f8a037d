// pdlbench data: look into data files, or turn text into tokens once.

#include <cstdio>

#include "cli/commands/commands.h"
#include "engine/base/log.h"
#include "engine/data/inspect.h"
#include "engine/data/prepare.h"

namespace pdl {

int data_inspect_command(const Args& args) {
  std::printf("%s", inspect(args.path).c_str());
  return 0;
}

int data_prepare_command(const Args& args) {
  PrepareOptions options;
  options.inputs = {args.path};
  options.output = args.out;
  options.tokenizer.name = args.tokenizer;
  options.tokenizer.merges = args.merges;
  options.tokenizer.vocabulary_size = args.tokenizer == "bpe" ? args.vocabulary_size : 0;
  const bool redraws = stderr_is_terminal();
  const PrepareResult result = prepare_tokens(options, [&](std::int64_t done, std::int64_t total) {
    if (redraws)
      std::fprintf(stderr, "\rtokenizing: %3lld %%", static_cast<long long>(total == 0 ? 100 : 100 * done / total));
  });
  if (redraws) std::fprintf(stderr, "\n");
  std::printf("%s: %lld tokens from %lld bytes, %s, vocabulary %lld\n", args.out.c_str(),
              static_cast<long long>(result.tokens), static_cast<long long>(result.bytes), result.tokenizer.c_str(),
              static_cast<long long>(result.vocabulary_size));
  if (!result.merges_path.empty()) std::printf("%s: the trained merges\n", result.merges_path.c_str());
  return 0;
}

}  // namespace pdl
