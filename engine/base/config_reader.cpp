// Typed reading of one object of a configuration. Loading, merging and the final verdict stand in config_document.cpp.

#include "engine/base/config_reader.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "engine/base/config_state.h"

namespace pdl {
namespace detail {

std::string child_pointer(const std::string& pointer, std::string_view key) {
  std::string child = pointer + '/';
  for (const char c : key) {
    if (c == '~')
      child += "~0";
    else if (c == '/')
      child += "~1";
    else
      child += c;
  }
  return child;
}

std::string parent_pointer(const std::string& pointer) {
  const auto slash = pointer.rfind('/');
  return slash == std::string::npos ? "" : pointer.substr(0, slash);
}

bool is_within(const std::string& pointer, const std::string& ancestor) {
  return pointer.starts_with(ancestor) && (pointer.size() == ancestor.size() || pointer[ancestor.size()] == '/');
}

std::string display_json(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  constexpr std::size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

std::string join_words(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace detail

const Json* ConfigState::find(const std::string& pointer) const {
  const Json::json_pointer steps(pointer);
  return tree.contains(steps) ? &tree.at(steps) : nullptr;
}

ConfigPlace ConfigState::place_of(std::string pointer) const {
  for (; !pointer.empty(); pointer = detail::parent_pointer(pointer)) {
    if (const auto found = places.find(pointer); found != places.end()) return found->second;
  }
  return {};
}

void ConfigState::note(const std::string& pointer, std::string message, bool missing) {
  ConfigPlace place = place_of(pointer);
  problems.push_back({Problem{pointer, std::move(message), place.line, std::move(place.origin)}, missing});
}

namespace {

std::string bound_text(double bound) {
  if (std::abs(bound) < 1e15 && bound == std::floor(bound)) return str(static_cast<std::int64_t>(bound));
  return str(bound);
}

bool bounded_below(const Range& range) { return range.min > Range{}.min; }
bool bounded_above(const Range& range) { return range.max < Range{}.max; }

std::string with_range(std::string type, const Range& range) {
  if (bounded_below(range) && bounded_above(range))
    return str(type, " in [", bound_text(range.min), ", ", bound_text(range.max), "]");
  if (bounded_below(range)) return str(type, " >= ", bound_text(range.min));
  if (bounded_above(range)) return str(type, " <= ", bound_text(range.max));
  return type;
}

// "" when `value` lies in `range`, else what is wrong.
std::string range_fault(double value, const Range& range, const Json& written) {
  if (value >= range.min && value <= range.max) return "";
  std::string wanted;
  if (bounded_below(range) && bounded_above(range))
    wanted = str("between ", bound_text(range.min), " and ", bound_text(range.max));
  else if (bounded_below(range))
    wanted = str("at least ", bound_text(range.min));
  else
    wanted = str("at most ", bound_text(range.max));
  return str("must be ", wanted, ", got ", detail::display_json(written));
}

std::string fault_of_type(const char* wanted, const Json& value) {
  return str("expected ", wanted, ", got ", detail::display_json(value));
}

// The `read_value` family stores a JSON value in `out` and returns "", or returns what is wrong and leaves `out` alone.

std::string read_value(const Json& value, const Range&, bool& out) {
  if (!value.is_boolean()) return fault_of_type("true or false", value);
  out = value.get<bool>();
  return "";
}

std::string read_value(const Json& value, const Range&, std::string& out) {
  if (!value.is_string()) return fault_of_type("a string", value);
  out = value.get<std::string>();
  return "";
}

std::string read_value(const Json& value, const Range& range, double& out) {
  if (!value.is_number()) return fault_of_type("a number", value);
  const double number = value.get<double>();
  std::string fault = range_fault(number, range, value);
  if (fault.empty()) out = number;
  return fault;
}

std::string read_value(const Json& value, const Range& range, std::int64_t& out) {
  constexpr double kExactInteger = 9007199254740992.0;  // 2^53: beyond it a double may stand for its neighbours
  if (!value.is_number()) return fault_of_type("an integer", value);
  std::int64_t number = 0;
  if (value.is_number_float()) {
    const double real = value.get<double>();
    if (real != std::floor(real)) return fault_of_type("an integer", value);
    if (std::abs(real) > kExactInteger)
      return str("does not fit an integer exactly, got ", detail::display_json(value));
    number = static_cast<std::int64_t>(real);
  } else if (value.is_number_unsigned() &&
             value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return str("does not fit 64 bits, got ", detail::display_json(value));
  } else {
    number = value.get<std::int64_t>();
  }
  std::string fault = range_fault(static_cast<double>(number), range, value);
  if (fault.empty()) out = number;
  return fault;
}

std::string read_value(const Json& value, const Range& range, int& out) {
  std::int64_t wide = 0;
  std::string fault = read_value(value, range, wide);
  if (!fault.empty()) return fault;
  if (wide < std::numeric_limits<int>::min() || wide > std::numeric_limits<int>::max())
    return str("does not fit 32 bits, got ", detail::display_json(value));
  out = static_cast<int>(wide);
  return "";
}

template <typename T>
std::string type_name(const Range& range) {
  if constexpr (std::is_same_v<T, bool>)
    return "bool";
  else if constexpr (std::is_same_v<T, std::string>)
    return "string";
  else if constexpr (std::is_same_v<T, double>)
    return with_range("number", range);
  else
    return with_range("integer", range);
}

// JSON has no NaN or infinity: they are spelt as strings, never as the null that the library would write.
template <typename T>
Json to_json(const T& value) {
  if constexpr (std::is_same_v<T, double>) {
    if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  }
  return value;
}

void remember(ConfigState& state, const std::string& pointer, KeyDoc doc) {
  AskedKeys& asked = state.asked[pointer];
  if (asked.read.insert(doc.key).second) asked.docs.push_back(std::move(doc));
}

void set_effective(ConfigState& state, const std::string& pointer, Json value) {
  state.effective[Json::json_pointer(pointer)] = std::move(value);
}

// An object that is itself of the wrong type has been reported: what is missing in it would only be noise.
void note_missing(ConfigState& state, const std::string& object, std::string_view key) {
  for (std::string around = object; !around.empty(); around = detail::parent_pointer(around)) {
    const Json* value = state.find(around);
    if (value != nullptr && !value->is_object()) return;
  }
  state.note(detail::child_pointer(object, key), str("required key \"", key, "\" is missing"), true);
}

// Reads `key` if present: true when `out` was set, false when absent or wrong.
template <typename T>
bool read_key(ConfigState& state, const std::string& pointer, const Range& range, T& out) {
  const Json* value = state.find(pointer);
  if (value == nullptr) return false;
  std::string fault = read_value(*value, range, out);
  if (fault.empty()) return true;
  state.note(pointer, std::move(fault));
  return false;
}

// The chosen word when the key holds one of `choices`, else `fallback`.
std::string read_choice(ConfigState& state, const std::string& pointer, std::string fallback,
                        const std::vector<std::string>& choices) {
  std::string word;
  if (!read_key(state, pointer, {}, word)) return fallback;
  if (std::find(choices.begin(), choices.end(), word) != choices.end()) return word;
  std::string message = str("\"", word, "\" is not one of ", detail::join_words(choices));
  if (const std::string near = nearest_word(word, choices); !near.empty())
    message += str("; did you mean \"", near, "\"?");
  state.note(pointer, std::move(message));
  return fallback;
}

}  // namespace

ConfigReader::ConfigReader(std::shared_ptr<ConfigState> state, std::string pointer)
    : state_(std::move(state)), pointer_(std::move(pointer)) {}

template <typename T>
T ConfigReader::get(std::string_view key, T fallback, std::string_view doc, Range range) const {
  const std::string pointer = detail::child_pointer(pointer_, key);
  remember(*state_, pointer_, {std::string(key), type_name<T>(range), to_json(fallback).dump(), std::string(doc), {}});
  read_key(*state_, pointer, range, fallback);
  set_effective(*state_, pointer, to_json(fallback));
  return fallback;
}

template <typename T>
T ConfigReader::require(std::string_view key, std::string_view doc, Range range) const {
  const std::string pointer = detail::child_pointer(pointer_, key);
  remember(*state_, pointer_, {std::string(key), type_name<T>(range), "required", std::string(doc), {}});
  T value{};
  if (state_->find(pointer) == nullptr) note_missing(*state_, pointer_, key);
  read_key(*state_, pointer, range, value);
  set_effective(*state_, pointer, to_json(value));
  return value;
}

template <typename T>
std::optional<T> ConfigReader::get_optional(std::string_view key, std::string_view doc, Range range) const {
  const std::string pointer = detail::child_pointer(pointer_, key);
  remember(*state_, pointer_, {std::string(key), type_name<T>(range), "null", std::string(doc), {}});
  const Json* written = state_->find(pointer);
  T value{};
  const bool present = written != nullptr && !written->is_null() && read_key(*state_, pointer, range, value);
  set_effective(*state_, pointer, present ? to_json(value) : Json());
  return present ? std::optional<T>(std::move(value)) : std::nullopt;
}

#define PDL_CONFIG_TYPE(T)                                                              \
  template T ConfigReader::get<T>(std::string_view, T, std::string_view, Range) const;  \
  template T ConfigReader::require<T>(std::string_view, std::string_view, Range) const; \
  template std::optional<T> ConfigReader::get_optional<T>(std::string_view, std::string_view, Range) const;
PDL_CONFIG_TYPE(bool)
PDL_CONFIG_TYPE(int)
PDL_CONFIG_TYPE(std::int64_t)
PDL_CONFIG_TYPE(double)
PDL_CONFIG_TYPE(std::string)
#undef PDL_CONFIG_TYPE

std::string ConfigReader::choice(std::string_view key, std::string_view fallback,
                                 const std::vector<std::string>& choices, std::string_view doc) const {
  const std::string pointer = detail::child_pointer(pointer_, key);
  remember(*state_, pointer_, {std::string(key), "string", Json(fallback).dump(), std::string(doc), choices});
  std::string word = read_choice(*state_, pointer, std::string(fallback), choices);
  set_effective(*state_, pointer, word);
  return word;
}

std::string ConfigReader::require_choice(std::string_view key, const std::vector<std::string>& choices,
                                         std::string_view doc) const {
  PDL_CHECK(!choices.empty(), "no choices for ", key);
  const std::string pointer = detail::child_pointer(pointer_, key);
  remember(*state_, pointer_, {std::string(key), "string", "required", std::string(doc), choices});
  if (state_->find(pointer) == nullptr) note_missing(*state_, pointer_, key);
  std::string word = read_choice(*state_, pointer, choices.front(), choices);
  set_effective(*state_, pointer, word);
  return word;
}

std::vector<std::int64_t> ConfigReader::get_list(std::string_view key, std::vector<std::int64_t> fallback,
                                                 std::string_view doc, Range range) const {
  const std::string pointer = detail::child_pointer(pointer_, key);
  remember(*state_, pointer_,
           {std::string(key), "list of " + with_range("integer", range), Json(fallback).dump(), std::string(doc), {}});
  const Json* written = state_->find(pointer);
  if (written != nullptr && !written->is_array()) {
    state_->note(pointer, fault_of_type("a list of integers", *written));
  } else if (written != nullptr) {
    std::vector<std::int64_t> list(written->size());
    bool all_fit = true;
    for (std::size_t i = 0; i < list.size(); ++i)
      all_fit &= read_key(*state_, detail::child_pointer(pointer, std::to_string(i)), range, list[i]);
    if (all_fit) fallback = std::move(list);
  }
  set_effective(*state_, pointer, fallback);
  return fallback;
}

ConfigReader ConfigReader::section(std::string_view key, std::string_view doc) const {
  const std::string pointer = detail::child_pointer(pointer_, key);
  const Json* written = state_->find(pointer);
  const bool first_time = !state_->asked[pointer_].read.contains(std::string(key));
  if (first_time && written != nullptr && !written->is_object())
    state_->note(pointer, fault_of_type("an object {...}", *written));
  remember(*state_, pointer_, {std::string(key), "section", "", std::string(doc), {}});
  if (first_time) set_effective(*state_, pointer, Json::object());
  state_->asked[pointer];  // a section without any key is still one that was read
  return ConfigReader(state_, pointer);
}

bool ConfigReader::has(std::string_view key) const {
  state_->asked[pointer_].probed.insert(std::string(key));
  return state_->find(detail::child_pointer(pointer_, key)) != nullptr;
}

void ConfigReader::problem(std::string_view key, std::string message) const {
  state_->note(key.empty() ? pointer_ : detail::child_pointer(pointer_, key), std::move(message));
}

void ConfigReader::leave_unjudged() const { state_->asked[pointer_].judged = false; }

std::vector<KeyDoc> ConfigReader::docs() const { return state_->asked[pointer_].docs; }

namespace {

std::string folded(std::string_view word) {
  std::string out(word);
  for (char& c : out) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// Insertions, deletions, substitutions and swaps of neighbours, each counted once (optimal string alignment).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, above);
    std::swap(above, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string typed = folded(word);
  if (typed.empty()) return "";
  std::string nearest;
  std::size_t least = std::numeric_limits<std::size_t>::max();
  for (const std::string& candidate : candidates) {
    const std::size_t longest = std::max(typed.size(), candidate.size());
    // Of a short word too little is left after two edits, of a single letter after one.
    const std::size_t allowed = longest > 3 ? 2 : std::min<std::size_t>(1, longest - 1);
    const std::size_t distance = edit_distance(typed, folded(candidate));
    if (distance <= allowed && distance < least) {
      least = distance;
      nearest = candidate;
    }
  }
  if (!nearest.empty()) return nearest;
  for (const std::string& candidate : candidates) {
    if (folded(candidate).starts_with(typed) && (nearest.empty() || candidate.size() < nearest.size()))
      nearest = candidate;
  }
  return nearest;
}

}  // namespace pdl
