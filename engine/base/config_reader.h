#pragma once
// The strict reader of a JSON configuration: each plug-in reads its own block, and what nobody read is an error.
//
//   auto document = ConfigDocument::load("run.json", {"training.epochs=3"});
//   ConfigReader root = document.root();
//   ConfigReader training = root.section("training", "how long and on what batches");
//   auto epochs = training.get<int>("epochs", 1, "passes over the training data");
//   document.finish();   // throws ConfigError with every problem: unknown keys, wrong types, failed rules, duplicates
//
// Reading never throws for a user mistake: it notes the problem, returns the default, and `finish` reports all at once
// with JSON pointer, line and, for an unknown key, the nearest key that was asked for. Every value read, defaults
// included, makes up the effective configuration that goes into the record. Keys that start with "_" or "//" are
// comments.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/error.h"

namespace pdl {

/// One key as documented by the code that reads it; `pdlbench list` prints these.
struct KeyDoc {
  std::string key, type, default_value, doc;
  std::vector<std::string> choices;  ///< legal values, empty when open
};

/// Inclusive bounds for numbers.
struct Range {
  double min = -1e300, max = 1e300;
};

struct ConfigState;  // shared by a document and its readers (config_state.h)

/// One JSON object inside a document. Cheap to copy; all readers of a document note problems in one list.
class ConfigReader {
 public:
  /// The value under `key`, or `fallback` when absent or wrong (wrong is noted). T: bool, int, int64_t, double,
  /// std::string. 3.7 or true for an integer, -1 below a minimum, an integer that does not fit: each is a noted
  /// problem. A whole number in scientific notation (5e8) is an integer, as configurations of this field like to write
  /// it.
  template <typename T>
  T get(std::string_view key, T fallback, std::string_view doc, Range range = {}) const;

  /// As `get`, but absence is a problem too.
  template <typename T>
  T require(std::string_view key, std::string_view doc, Range range = {}) const;

  /// Absent means nullopt, which is also what the effective configuration then shows (null).
  template <typename T>
  std::optional<T> get_optional(std::string_view key, std::string_view doc, Range range = {}) const;

  /// A string that must be one of `choices`; the nearest one is suggested.
  std::string choice(std::string_view key, std::string_view fallback, const std::vector<std::string>& choices,
                     std::string_view doc) const;
  /// As `choice`, but absence is a problem too; the first of `choices` then stands in.
  std::string require_choice(std::string_view key, const std::vector<std::string>& choices, std::string_view doc) const;

  /// A list of integers, for explicit balances and the like.
  std::vector<std::int64_t> get_list(std::string_view key, std::vector<std::int64_t> fallback, std::string_view doc,
                                     Range range = {}) const;

  /// The object under `key`; an empty one when absent. A value that is no object is a problem.
  ConfigReader section(std::string_view key, std::string_view doc) const;
  bool has(std::string_view key) const;

  /// Notes a broken rule that belongs to `key` ("" for the object itself).
  void problem(std::string_view key, std::string message) const;
  /// Leaves the unread keys of this object alone: for a block whose reader could not be chosen because its "name" is
  /// wrong.
  void leave_unjudged() const;
  /// The keys asked for so far in this object, in order.
  std::vector<KeyDoc> docs() const;
  /// JSON pointer of this object.
  const std::string& pointer() const { return pointer_; }

 private:
  friend class ConfigDocument;
  ConfigReader(std::shared_ptr<ConfigState> state, std::string pointer);
  std::shared_ptr<ConfigState> state_;
  std::string pointer_;
};

/// A configuration file with its `extends` chain merged and its command-line overrides applied.
class ConfigDocument {
 public:
  /// Reads PATH. `extends` names a base file relative to it (objects merge, all else replaces, cycles are errors).
  /// Overrides: "a.b=v" sets an existing or new key; the value is JSON if it parses as such, else a string.
  /// Throws ConfigError for an unreadable file (code 2), a syntax error (with line and column) or a broken `extends`;
  /// duplicate keys and overrides that cannot be applied are noted for `finish`.
  static ConfigDocument load(const std::string& path, const std::vector<std::string>& overrides = {});
  /// The same from text, for tests and for `list`; `name` stands in messages.
  static ConfigDocument parse(const std::string& text, const std::string& name,
                              const std::vector<std::string>& overrides = {});

  ConfigReader root() const;
  /// Throws ConfigError with every problem noted, unread keys included (each with its nearest known key).
  void finish() const;
  /// Every value read, defaults included, as indented JSON. Keys in the order of reading.
  std::string effective_json() const;
  /// 16 hex digits (FNV-1a of the effective configuration): equal exactly when the runs are configured alike.
  std::string effective_hash() const;
  const std::string& path() const;

 private:
  explicit ConfigDocument(std::shared_ptr<ConfigState> state);
  std::shared_ptr<ConfigState> state_;
};

/// The candidate at Damerau-Levenshtein distance <= 2 (<= 1 for words of up to three letters), else the shortest one of
/// which `word` is a prefix; "" when none is near. Letter case and "-" for "_" do not count; the first of equals wins.
std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace pdl
