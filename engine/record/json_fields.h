#pragma once
// JSON of records, value by value: numbers that JSON has no words for, and objects that are read field by field with
// complaints that name the field.

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "engine/base/error.h"
#include "engine/record/records.h"

namespace pdl {

using Json = nlohmann::ordered_json;  ///< fields stay in the order in which a reader wants them

/// NaN and infinities become words.
inline Json number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

[[noreturn]] inline void wrong(const std::string& field, const char* what) {
  throw Error(str("field \"", field, "\" ", what), ExitCode::data);
}

/// A JSON object that is read field by field; complaints name the field with its path.
class Fields {
 public:
  Fields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json_.is_object()) wrong(path_, "is no object");
  }

  const Json& at(const std::string& key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) wrong(named(key), "is missing");
    return *found;
  }
  Fields section(const std::string& key) const { return Fields(at(key), named(key)); }
  /// Fields that came later are missing from older records.
  bool has(const std::string& key) const { return json_.contains(key); }

  double real(const std::string& key) const {
    const Json& value = at(key);
    if (value.is_number()) return value.get<double>();
    if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (value == "inf") return std::numeric_limits<double>::infinity();
    if (value == "-inf") return -std::numeric_limits<double>::infinity();
    wrong(named(key), "is no number");
  }
  std::optional<double> optional_real(const std::string& key) const {
    return has(key) ? std::optional(real(key)) : std::nullopt;
  }
  std::int64_t integer(const std::string& key) const {
    if (!at(key).is_number_integer()) wrong(named(key), "is no whole number");
    return at(key).get<std::int64_t>();
  }
  int small_integer(const std::string& key) const { return static_cast<int>(integer(key)); }
  std::string text(const std::string& key) const {
    if (!at(key).is_string()) wrong(named(key), "is no text");
    return at(key).get<std::string>();
  }
  bool flag(const std::string& key) const {
    if (!at(key).is_boolean()) wrong(named(key), "is neither true nor false");
    return at(key).get<bool>();
  }
  Spread spread(const std::string& key) const {
    const Fields fields = section(key);
    return {fields.real("min"), fields.real("mean"), fields.real("max")};
  }
  std::map<std::string, std::string> texts(const std::string& key) const {
    std::map<std::string, std::string> texts;
    const Fields fields = section(key);
    for (const auto& item : fields.json_.items()) texts[item.key()] = fields.text(item.key());
    return texts;
  }
  const Json& list(const std::string& key) const {
    if (!at(key).is_array()) wrong(named(key), "is no list");
    return at(key);
  }
  void require_our_version() const {
    const std::int64_t version = integer("schema_version");
    if (version == kSchemaVersion) return;
    throw Error(str("schema version ", version, "; this program reads version ", kSchemaVersion), ExitCode::data);
  }

 private:
  std::string named(const std::string& key) const { return path_.empty() ? key : str(path_, ".", key); }
  const Json& json_;
  std::string path_;
};

}  // namespace pdl
