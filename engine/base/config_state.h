#pragma once
// What a ConfigDocument and its readers share. Private to engine/base/config_*.cpp, as it shows the JSON library.
//
// The document writes `tree` and `places` while loading; afterwards readers only add to `asked`, `effective`,
// `problems`.

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/config_reader.h"

namespace pdl {

using Json = nlohmann::ordered_json;

constexpr const char* kCommandLine = "command line";

/// Where a key was written. `origin` is empty for the main file.
struct ConfigPlace {
  std::string origin;
  int line = 0;
};

/// What the code has asked of one object.
struct AskedKeys {
  std::vector<KeyDoc> docs;      ///< the keys read, in order
  std::set<std::string> read;    ///< their names
  std::set<std::string> probed;  ///< asked for by `has` only: known, hence worth suggesting, but not read
  bool judged = true;            ///< false: unread keys are nobody's mistake
};

struct NotedProblem {
  Problem problem;
  bool missing = false;  ///< an absent required key: not worth a word when a misspelt key explains it
};

struct ConfigState {
  std::string path;
  Json tree = Json::object();                 ///< files merged, overrides applied, comment keys removed
  std::map<std::string, ConfigPlace> places;  ///< by JSON pointer
  std::map<std::string, AskedKeys> asked;     ///< by the JSON pointer of the object
  Json effective = Json::object();            ///< every value read
  std::vector<NotedProblem> problems;

  /// The value at `pointer`, or null when there is none.
  const Json* find(const std::string& pointer) const;
  /// The place of the key, else of the nearest object around it.
  ConfigPlace place_of(std::string pointer) const;
  void note(const std::string& pointer, std::string message, bool missing = false);
};

namespace detail {

/// `pointer` + "/" + `key`, escaped as RFC 6901 asks.
std::string child_pointer(const std::string& pointer, std::string_view key);
/// The pointer without its last step; "" stays "".
std::string parent_pointer(const std::string& pointer);
/// True for `ancestor` itself and all below it.
bool is_within(const std::string& pointer, const std::string& ancestor);
/// A value for a message, short: `3.7`, `"zeero"`, `a list`.
std::string display_json(const Json& value);
/// "a, b, c".
std::string join_words(const std::vector<std::string>& words);

}  // namespace detail
}  // namespace pdl
