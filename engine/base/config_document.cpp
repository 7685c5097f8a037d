// Loading a configuration (text with line numbers, the `extends` chain, command-line overrides) and the verdict on it.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "engine/base/config_reader.h"
#include "engine/base/config_state.h"

namespace pdl {
namespace {

namespace fs = std::filesystem;

constexpr int kDeepest = 64;  // what follows recurses over objects: a hostile file must not exhaust the stack
constexpr std::string_view kWhiteSpace = " \t\r\n";
constexpr const char* kExtends = "extends";

bool is_comment_key(std::string_view key) { return key.starts_with('_') || key.starts_with("//"); }

/// One file of an `extends` chain.
struct ConfigFile {
  std::string name, origin;
  Json tree;
  std::map<std::string, ConfigPlace> places;
  std::vector<Problem> duplicates;
};

[[noreturn]] void fail(std::string message, std::string pointer = "", ConfigPlace place = {}) {
  throw ConfigError({Problem{std::move(pointer), std::move(message), place.line, std::move(place.origin)}});
}

/// Walks text that is known to be valid JSON to learn on which line each key stands and which keys stand twice: the
/// JSON library keeps neither.
class LineScanner {
 public:
  LineScanner(const std::string& text, ConfigFile& file) : text_(text), file_(file) {}
  void scan() { value("", 0); }

 private:
  void value(const std::string& pointer, int depth) {
    if (depth > kDeepest) fail(str("nested more than ", kDeepest, " levels deep"), "", {file_.name, line_});
    const char first = peek();
    if (first == '{')
      object(pointer, depth);
    else if (first == '[')
      array(pointer, depth);
    else if (first == '"')
      string();
    else
      position_ = std::min(text_.find_first_of(",]} \t\r\n", position_), text_.size());
  }

  void object(const std::string& pointer, int depth) {
    std::map<std::string, int> first_line;
    ++position_;
    while (peek() != '}') {
      const std::string key = string();
      const int line = line_;
      peek();
      ++position_;  // the colon
      const bool comment = is_comment_key(key);
      const std::string child = detail::child_pointer(pointer, key);
      hidden_ += comment;
      if (hidden_ == 0) {
        const auto [seen, is_new] = first_line.emplace(key, line);
        if (!is_new) duplicate(child, key, line, seen->second);
        file_.places[child] = {file_.origin, line};
      }
      value(child, depth + 1);
      hidden_ -= comment;
      if (peek() == ',') ++position_;
    }
    ++position_;
  }

  void array(const std::string& pointer, int depth) {
    ++position_;
    for (std::size_t i = 0; peek() != ']'; ++i) {
      const std::string child = detail::child_pointer(pointer, std::to_string(i));
      if (hidden_ == 0) file_.places[child] = {file_.origin, line_};
      value(child, depth + 1);
      if (peek() == ',') ++position_;
    }
    ++position_;
  }

  // Passes a string and returns what it says. A valid JSON string holds no line break.
  std::string string() {
    const std::size_t begin = position_++;
    while (text_[position_] != '"') position_ += text_[position_] == '\\' ? 2 : 1;
    ++position_;
    return Json::parse(text_.substr(begin, position_ - begin)).get<std::string>();
  }

  // The next character that is not white space, without passing it.
  char peek() {
    for (; position_ < text_.size() && kWhiteSpace.find(text_[position_]) != std::string_view::npos; ++position_)
      line_ += text_[position_] == '\n';
    return position_ < text_.size() ? text_[position_] : '\0';
  }

  void duplicate(const std::string& pointer, const std::string& key, int line, int first_line) {
    std::string message = str("duplicate key \"", key, "\"");
    if (line != first_line) message += str(", first on line ", first_line);
    file_.duplicates.push_back({pointer, std::move(message), line, file_.origin});
  }

  const std::string& text_;
  ConfigFile& file_;
  std::size_t position_ = 0;
  int line_ = 1;
  int hidden_ = 0;  // how many comment keys enclose the position
};

void remove_comments(Json& value) {
  if (value.is_array()) {
    for (Json& element : value) remove_comments(element);
  } else if (value.is_object()) {
    Json kept = Json::object();
    for (auto& [key, member] : value.items()) {
      if (is_comment_key(key)) continue;
      remove_comments(member);
      kept[key] = std::move(member);
    }
    value = std::move(kept);
  }
}

// What people carry over from JavaScript and Python, by the offending character and the one before it.
std::string syntax_hint(const std::string& text, std::size_t offender) {
  const char bad = offender < text.size() ? text[offender] : '\0';
  const std::size_t before = offender == 0 ? std::string::npos : text.find_last_not_of(kWhiteSpace, offender - 1);
  if ((bad == '}' || bad == ']') && before != std::string::npos && text[before] == ',')
    return ": a comma stands before the closing bracket";
  if (bad == '/' || bad == '#') return ": JSON has no comments; a key that starts with \"_\" or \"//\" is one";
  if (bad == '\'') return ": strings stand in double quotes";
  return "";
}

[[noreturn]] void fail_syntax(const std::string& text, const std::string& name, const Json::parse_error& error) {
  const std::size_t offender = error.byte == 0 ? 0 : std::min(error.byte - 1, text.size());
  const auto start = text.begin(), end = start + static_cast<std::ptrdiff_t>(offender);
  const int line = 1 + static_cast<int>(std::count(start, end, '\n'));
  const std::size_t line_begin = offender == 0 ? std::string::npos : text.rfind('\n', offender - 1);
  const std::size_t column = line_begin == std::string::npos ? offender + 1 : offender - line_begin;
  std::string hint = syntax_hint(text, offender);
  if (hint.empty()) {
    const std::string detail = error.what();
    const std::size_t dash = detail.find(" - ");
    if (dash != std::string::npos) hint = ": " + detail.substr(dash + 3);
  }
  fail(str("JSON syntax error at column ", column, hint), "", {name, line});
}

ConfigFile parse_file(std::string text, std::string name, bool is_main) {
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);  // the mark that some editors put before UTF-8
  ConfigFile file;
  file.origin = is_main ? "" : name;
  file.name = std::move(name);
  try {
    file.tree = Json::parse(text);
  } catch (const Json::parse_error& error) {
    fail_syntax(text, file.name, error);
  } catch (const Json::exception& error) {  // a number beyond the range of a double
    fail(str("invalid JSON: ", error.what()), "", {file.name, 0});
  }
  if (!file.tree.is_object()) fail("a configuration is a JSON object {...}", "", {file.name, 1});
  LineScanner(text, file).scan();
  remove_comments(file.tree);
  return file;
}

// The text of a file; when it cannot be read, `fail` with the key that named it (if one did).
std::string read_file(const fs::path& path, const std::string& pointer, const ConfigPlace& place) {
  std::error_code ignored;
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file || fs::is_directory(path, ignored)) {
    const char* reason = !file && errno != 0 ? std::strerror(errno) : "not a file";
    fail(str("cannot read ", path.string(), ": ", reason), pointer, place);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// Reads the file that `file` extends and removes the `extends` key; nothing when there is none.
std::optional<ConfigFile> base_of(ConfigFile& file, std::vector<std::string>& visited) {
  if (!file.tree.contains(kExtends)) return std::nullopt;
  const std::string pointer = detail::child_pointer("", kExtends);
  const ConfigPlace place = file.places.at(pointer);
  const Json base = file.tree[kExtends];
  if (!base.is_string()) fail(str("expected the name of a file, got ", detail::display_json(base)), pointer, place);
  file.tree.erase(kExtends);

  const fs::path path = (fs::path(file.name).parent_path() / base.get<std::string>()).lexically_normal();
  std::error_code ignored;
  const std::string identity = fs::weakly_canonical(path, ignored).string();
  if (std::find(visited.begin(), visited.end(), identity) != visited.end())
    fail(str("\"extends\" leads back to ", path.string(), ": a cycle"), pointer, place);
  visited.push_back(identity);
  return parse_file(read_file(path, pointer, place), path.string(), false);
}

// Places below `pointer` belong to a value that is being replaced.
void forget_places_below(std::map<std::string, ConfigPlace>& places, const std::string& pointer) {
  const std::string prefix = pointer + '/';
  auto first = places.lower_bound(prefix), last = first;
  while (last != places.end() && last->first.starts_with(prefix)) ++last;
  places.erase(first, last);
}

// Objects merge, all else replaces.
void merge_over(ConfigState& state, Json& target, const Json& source, const std::string& pointer) {
  for (const auto& [key, value] : source.items()) {
    const std::string child = detail::child_pointer(pointer, key);
    if (target.contains(key) && target[key].is_object() && value.is_object()) {
      merge_over(state, target[key], value, child);
    } else {
      forget_places_below(state.places, child);
      target[key] = value;
    }
  }
}

void load_files(ConfigState& state, const std::string& text, const std::string& name) {
  std::error_code ignored;
  std::vector<std::string> visited{fs::weakly_canonical(name, ignored).string()};
  std::vector<ConfigFile> chain{parse_file(text, name, true)};
  while (std::optional<ConfigFile> base = base_of(chain.back(), visited)) chain.push_back(std::move(*base));
  for (auto file = chain.rbegin(); file != chain.rend(); ++file) {
    merge_over(state, state.tree, file->tree, "");
    for (auto& [pointer, place] : file->places) state.places[pointer] = place;
    for (Problem& problem : file->duplicates) state.problems.push_back({std::move(problem)});
  }
  state.places.erase(detail::child_pointer("", kExtends));
}

// The value of an override: JSON if it parses as such, else a string.
Json override_value(ConfigState& state, const std::string& pointer, const std::string& text) {
  Json value = Json::parse(text, nullptr, false);
  if (value.is_discarded()) return text;
  ConfigFile scratch;
  scratch.name = kCommandLine;
  LineScanner(text, scratch).scan();
  for (const Problem& problem : scratch.duplicates)
    state.problems.push_back({Problem{pointer + problem.pointer, problem.message, 0, kCommandLine}});
  remove_comments(value);
  return value;
}

void apply_override(ConfigState& state, const std::string& text) {
  const auto note = [&](const std::string& pointer, std::string message) {
    state.problems.push_back({Problem{pointer, std::move(message), 0, kCommandLine}});
  };
  const std::size_t equals = text.find('=');
  std::string path = text.substr(0, equals);
  if (equals == std::string::npos || path.empty() || path.starts_with('.') || path.ends_with('.') ||
      path.find("..") != std::string::npos)
    return note("", str("\"", text, "\" is no override: key=value or section.key=value is"));

  std::string pointer;
  Json* object = &state.tree;
  for (std::size_t begin = 0, dot = 0; dot != std::string::npos; begin = dot + 1) {
    dot = path.find('.', begin);
    const std::string key = path.substr(begin, dot == std::string::npos ? dot : dot - begin);
    if (!object->is_object())
      return note(pointer,
                  str("cannot set \"", key, "\" here: it holds ", detail::display_json(*object), ", not an object"));
    pointer = detail::child_pointer(pointer, key);
    const bool is_new = !object->contains(key);
    object = &(*object)[key];
    if (is_new && dot != std::string::npos) *object = Json::object();
    if (is_new) state.places[pointer] = {kCommandLine, 0};
  }
  forget_places_below(state.places, pointer);
  state.places[pointer] = {kCommandLine, 0};
  *object = override_value(state, pointer, text.substr(equals + 1));
}

/// The problems of keys that nobody asked for.
class UnreadKeys {
 public:
  explicit UnreadKeys(const ConfigState& state) : state_(state) { collect("", state.tree); }

  const std::vector<Problem>& problems() const { return problems_; }

  /// True when a misspelt key explains why the one at `pointer` is missing.
  bool explain(const std::string& pointer) const {
    return std::any_of(meant_.begin(), meant_.end(),
                       [&](const std::string& meant) { return detail::is_within(pointer, meant); });
  }

 private:
  void collect(const std::string& pointer, const Json& object) {
    const auto found = state_.asked.find(pointer);
    const AskedKeys asked = found == state_.asked.end() ? AskedKeys{} : found->second;
    for (const auto& [key, value] : object.items()) {
      const std::string child = detail::child_pointer(pointer, key);
      if (asked.read.contains(key)) {
        if (value.is_object() && state_.asked.contains(child)) collect(child, value);
      } else if (asked.judged && !has_problem(child)) {
        add(pointer, key, asked, object);
      }
    }
  }

  bool has_problem(const std::string& pointer) const {
    return std::any_of(state_.problems.begin(), state_.problems.end(),
                       [&](const NotedProblem& noted) { return noted.problem.pointer == pointer; });
  }

  void add(const std::string& pointer, const std::string& key, const AskedKeys& asked, const Json& object) {
    std::vector<std::string> known;
    for (const KeyDoc& doc : asked.docs) known.push_back(doc.key);
    for (const std::string& probed : asked.probed)
      if (!asked.read.contains(probed) && probed != key) known.push_back(probed);
    // Among equally near keys, one that is not written yet is likelier to be meant.
    std::vector<std::string> candidates = known;
    std::stable_partition(candidates.begin(), candidates.end(),
                          [&](const std::string& word) { return !object.contains(word); });

    const std::string child = detail::child_pointer(pointer, key);
    std::string message = str("unknown key \"", key, "\"");
    if (const std::string near = nearest_word(key, candidates); !near.empty()) {
      message += str("; did you mean \"", near, "\"?");
      meant_.push_back(detail::child_pointer(pointer, near));
    } else if (const auto home = section_that_knows(key)) {
      message += home->empty() ? "; it belongs at the top level" : str("; it belongs in ", *home);
      meant_.push_back(detail::child_pointer(*home, key));
    } else if (known.empty()) {
      message += "; no keys are known here";
    } else {
      message += str("; known here: ", detail::join_words(known));
    }
    ConfigPlace place = state_.place_of(child);
    problems_.push_back({child, std::move(message), place.line, std::move(place.origin)});
  }

  // The pointer of the one section that reads a key of this name; nothing when none or several do.
  std::optional<std::string> section_that_knows(const std::string& key) const {
    std::optional<std::string> home;
    for (const auto& [pointer, asked] : state_.asked) {
      if (!asked.read.contains(key)) continue;
      if (home) return std::nullopt;
      home = pointer;
    }
    return home;
  }

  const ConfigState& state_;
  std::vector<Problem> problems_;
  std::vector<std::string> meant_;
};

// The main file from top to bottom, then what has no place, then the files it extends, then the command line.
auto reading_order(const Problem& problem) {
  const int group = problem.origin == kCommandLine ? 3 : !problem.origin.empty() ? 2 : problem.line == 0 ? 1 : 0;
  return std::make_tuple(group, problem.origin, problem.line);
}

}  // namespace

ConfigDocument::ConfigDocument(std::shared_ptr<ConfigState> state) : state_(std::move(state)) {}

ConfigDocument ConfigDocument::load(const std::string& path, const std::vector<std::string>& overrides) {
  return parse(read_file(path, "", {}), path, overrides);
}

ConfigDocument ConfigDocument::parse(const std::string& text, const std::string& name,
                                     const std::vector<std::string>& overrides) {
  auto state = std::make_shared<ConfigState>();
  state->path = name;
  load_files(*state, text, name);
  for (const std::string& assignment : overrides) apply_override(*state, assignment);
  return ConfigDocument(std::move(state));
}

ConfigReader ConfigDocument::root() const {
  state_->asked[""];
  return ConfigReader(state_, "");
}

void ConfigDocument::finish() const {
  const UnreadKeys unread(*state_);
  std::vector<Problem> all = unread.problems();
  for (const NotedProblem& noted : state_->problems)
    if (!noted.missing || !unread.explain(noted.problem.pointer)) all.push_back(noted.problem);
  if (all.empty()) return;
  std::stable_sort(all.begin(), all.end(),
                   [](const Problem& a, const Problem& b) { return reading_order(a) < reading_order(b); });
  throw ConfigError(std::move(all));
}

std::string ConfigDocument::effective_json() const {
  return state_->effective.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::string ConfigDocument::effective_hash() const {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, 64 bits
  for (const char c : effective_json()) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  std::string digits(16, '0');
  for (std::size_t i = digits.size(); i-- > 0; hash >>= 4) digits[i] = "0123456789abcdef"[hash & 15];
  return digits;
}

const std::string& ConfigDocument::path() const { return state_->path; }

}  // namespace pdl
