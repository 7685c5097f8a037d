#pragma once
// Text files to a token file, once, so that a training run only maps it: for `pdlbench data prepare`.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/data/tokenizer.h"

namespace pdl {

struct PrepareOptions {
  std::vector<std::string> inputs;  ///< UTF-8 text, plain or gzip, in this order
  std::string output;               ///< llm.c token file to write
  TokenizerOptions tokenizer;       ///< bpe without merges trains on the inputs and writes OUTPUT.merges.txt beside it
  bool end_of_text_per_line = false;  ///< the end-of-text token after each line, as the study did; needs gpt2
};

struct PrepareResult {
  std::string tokenizer;    ///< "bytes", "bpe-4096", "gpt2"
  std::string merges_path;  ///< written beside the output when bpe was trained, else empty
  std::int64_t bytes = 0;   ///< of text
  std::int64_t tokens = 0;
  std::int64_t vocabulary_size = 0;
};

/// `progress` hears the bytes of text encoded so far and their total, from 0 to the total. Throws ConfigError for
/// options that do not go together, Error(data) for unreadable or empty inputs and failed writes; the output then does
/// not appear.
PrepareResult prepare_tokens(const PrepareOptions& options,
                             const std::function<void(std::int64_t done, std::int64_t total)>& progress = {});

/// Where a text can be cut at or before `limit` so that both parts, tokenized apart, give the same tokens as the whole:
/// after a newline between two visible ASCII characters. 0 when there is no such place.
std::size_t safe_cut(std::string_view text, std::size_t limit);

}  // namespace pdl
