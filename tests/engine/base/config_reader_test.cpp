#include "engine/base/config_reader.h"

#include <cctype>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/base/config_sample.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

template <typename T>
std::string type_complaint(const std::string& value, Range range = {}) {
  return complaints("{\"k\": " + value + "}", [&](const ConfigReader& root) { root.get<T>("k", T{}, "", range); });
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("a right configuration gives its values and no complaint") {
  const ConfigDocument document = ConfigDocument::parse(kSample, "run.json");
  CHECK(complaints(document, read_sample).empty());
  const ConfigReader training = document.root().section("training", "");
  CHECK(training.get<int>("epochs", 1, "") == 2);
  CHECK(training.get_optional<int>("global_batch_size", "") == 32);
  CHECK(training.section("optimizer", "").get<double>("lr", 0, "") == 0.001);
  CHECK(training.section("optimizer", "").pointer() == "/training/optimizer");
  CHECK(document.root().section("engine", "").get<std::int64_t>("reduce_bucket_size", 1, "") == 500000000);
  CHECK(document.root().get_list("balance", {}, "") == std::vector<std::int64_t>{3, 4, 5});
  CHECK(document.path() == "run.json");
}

TEST_CASE("absent keys give defaults, absent sections too") {
  const ConfigReader root = ConfigDocument::parse("{}", "run.json").root();
  CHECK(root.section("a", "").section("b", "").get<int>("k", 5, "") == 5);
  CHECK(root.get_optional<double>("lr", "") == std::nullopt);
  CHECK(root.choice("dtype", "fp32", {"fp32", "fp64"}, "") == "fp32");
  CHECK(root.get_list("balance", {1, 2}, "") == std::vector<std::int64_t>{1, 2});
  CHECK_FALSE(root.has("a"));
}

TEST_CASE("null stands for an absent optional value, so that an effective configuration can be run again") {
  CHECK(complaints(R"({"k": null})", [](const ConfigReader& root) {
          CHECK(root.get_optional<int>("k", "") == std::nullopt);
        }).empty());
}

TEST_CASE("an unknown key is named with pointer, line and the nearest key") {
  std::string text = kSample;
  replace(text, "\"micro_batch_size\"", "\"micro_batchsize\"");
  CHECK(complaints(text, read_sample) ==
        "/training/micro_batchsize (line 7): unknown key \"micro_batchsize\"; did you mean \"micro_batch_size\"?");
}

TEST_CASE("with nothing near, the valid keys are listed") {
  std::string text = kSample;
  replace(text, "\"warmup_steps\"", "\"gamma\"");
  CHECK(complaints(text, read_sample) ==
        "/training/lr_schedule/gamma (line 10): unknown key \"gamma\"; known here: name, warmup_steps");
}

TEST_CASE("a key that one other section reads is sent there") {
  CHECK(complaints(R"({"lr": 1})", read_sample)
            .find("/lr (line 1): unknown key \"lr\"; it belongs in "
                  "/training/optimizer") != std::string::npos);
  CHECK(sample_complaints({"training.device=cpu"}) ==
        "/training/device (command line): unknown key \"device\"; it belongs at the top level");
}

TEST_CASE("a key that several sections read is sent to none of them") {
  CHECK(complaints(R"({"name": 1})", [](const ConfigReader& root) {
          for (const char* section : {"a", "b"}) root.section(section, "").get<std::string>("name", "", "");
        }) == "/name (line 1): unknown key \"name\"; known here: a, b");
}

TEST_CASE("an unknown section is one problem, and what it should have held is not called missing") {
  std::string text = kSample;
  replace(text, "\"workload\"", "\"wrokload\"");
  CHECK(complaints(text, read_sample) == "/wrokload (line 3): unknown key \"wrokload\"; did you mean \"workload\"?");
}

TEST_CASE("all problems are reported at once, from top to bottom") {
  CHECK(complaints("{\n\"epoch\": 3,\n\"lr\": \"big\",\n\"dtype\": \"fp23\"\n}",
                   [](const ConfigReader& root) {
                     root.choice("dtype", "fp32", {"fp64", "fp32"}, "");
                     root.get<double>("lr", 0.1, "");
                     root.get<int>("epochs", 1, "");
                     root.require<int>("steps", "");
                   }) ==
        "/epoch (line 2): unknown key \"epoch\"; did you mean \"epochs\"?\n"
        "/lr (line 3): expected a number, got \"big\"\n"
        "/dtype (line 4): \"fp23\" is not one of fp64, fp32; did you mean \"fp32\"?\n"
        "/steps: required key \"steps\" is missing");
}

TEST_CASE("wrong types are refused") {
  CHECK(type_complaint<int>("3.7") == "/k (line 1): expected an integer, got 3.7");
  CHECK(type_complaint<int>("true") == "/k (line 1): expected an integer, got true");
  CHECK(type_complaint<int>("\"3\"") == "/k (line 1): expected an integer, got \"3\"");
  CHECK(type_complaint<int>("null") == "/k (line 1): expected an integer, got null");
  CHECK(type_complaint<int>("[3]") == "/k (line 1): expected an integer, got a list");
  CHECK(type_complaint<int>("{}") == "/k (line 1): expected an integer, got an object");
  CHECK(type_complaint<int>("5e9") == "/k (line 1): does not fit 32 bits, got 5000000000.0");
  CHECK(type_complaint<int>("5000000000") == "/k (line 1): does not fit 32 bits, got 5000000000");
  CHECK(type_complaint<std::int64_t>("9223372036854775808") ==
        "/k (line 1): does not fit 64 bits, got 9223372036854775808");
  CHECK_THAT(type_complaint<std::int64_t>("1e17"), ContainsSubstring("does not fit an integer exactly"));
  CHECK_THAT(type_complaint<double>("\"1e-3\""), ContainsSubstring("expected a number, got \"1e-3\""));
  CHECK_THAT(type_complaint<double>("true"), ContainsSubstring("expected a number"));
  CHECK_THAT(type_complaint<bool>("1"), ContainsSubstring("expected true or false, got 1"));
  CHECK_THAT(type_complaint<std::string>("4"), ContainsSubstring("expected a string, got 4"));
  CHECK(type_complaint<int>('"' + std::string(500, 'x') + '"').size() < 120);
}

TEST_CASE("a wrong value gives way to the default") {
  const ConfigReader root = ConfigDocument::parse(R"({"a": "x", "b": -1, "c": [1, "x"]})", "run.json").root();
  CHECK(root.get<int>("a", 7, "") == 7);
  CHECK(root.get<int>("b", 8, "", {1}) == 8);
  CHECK(root.get_list("c", {9}, "") == std::vector<std::int64_t>{9});
}

TEST_CASE("right values of every type pass, extremes included") {
  CHECK(type_complaint<int>("-2147483648").empty());
  CHECK(type_complaint<int>("2147483647").empty());
  CHECK(type_complaint<int>("2e3").empty());
  CHECK(type_complaint<std::int64_t>("9223372036854775807").empty());
  CHECK(type_complaint<std::int64_t>("5e9").empty());
  CHECK(type_complaint<double>("3").empty());
  CHECK(type_complaint<bool>("false").empty());
  CHECK(type_complaint<std::string>("\"\"").empty());
}

TEST_CASE("ranges are inclusive and refuse negative sizes") {
  CHECK(type_complaint<std::int64_t>("-1", {0}) == "/k (line 1): must be at least 0, got -1");
  CHECK(type_complaint<int>("0", {1, 8}) == "/k (line 1): must be between 1 and 8, got 0");
  CHECK(type_complaint<double>("1.5", {-1e300, 1}) == "/k (line 1): must be at most 1, got 1.5");
  CHECK(type_complaint<int>("1", {1, 8}).empty());
  CHECK(type_complaint<int>("8", {1, 8}).empty());
}

TEST_CASE("each wrong element of a list has its own line") {
  CHECK(complaints("{\"k\": [1,\n2.5,\n-3,\n4]}", [](const ConfigReader& root) { root.get_list("k", {}, "", {0}); }) ==
        "/k/1 (line 2): expected an integer, got 2.5\n/k/2 (line 3): must be at least 0, got -3");
  CHECK(complaints("{\"k\": 4}", [](const ConfigReader& root) { root.get_list("k", {}, ""); }) ==
        "/k (line 1): expected a list of integers, got 4");
}

TEST_CASE("a section that is no object is one problem") {
  CHECK(complaints("{\n\"a\": 3}", [](const ConfigReader& root) {
          root.section("a", "").section("b", "").require<int>("k", "");
        }) == "/a (line 2): expected an object {...}, got 3");
}

TEST_CASE("a missing required key carries the line of its section") {
  const Read read = [](const ConfigReader& root) { root.section("a", "").require_choice("name", {"x", "y"}, ""); };
  CHECK(complaints("{\n\"a\": {}}", read) == "/a/name (line 2): required key \"name\" is missing");
  CHECK(complaints("{}", read) == "/a/name: required key \"name\" is missing");
}

TEST_CASE("a broken rule of the caller stands at its key") {
  CHECK(complaints(kSample, [](const ConfigReader& root) {
          read_sample(root);
          root.section("training", "").problem("seed", "must be odd");
          root.problem("", "4 ranks do not fit");
        }) == "/training/seed (line 8): must be odd\n4 ranks do not fit");
}

TEST_CASE("a key under a noted problem is not also called unknown") {
  CHECK(complaints(R"({"k": 1})", [](const ConfigReader& root) {
          if (root.has("k")) root.problem("k", "replaced by \"j\"");
        }) == "/k (line 1): replaced by \"j\"");
}

TEST_CASE("keys asked for by `has` alone are suggested, yet count as unread") {
  CHECK(complaints(R"({"kez": 1})", [](const ConfigReader& root) { root.has("key"); }) ==
        "/kez (line 1): unknown key \"kez\"; did you mean \"key\"?");
  CHECK(complaints(R"({"key": 1})", [](const ConfigReader& root) { root.has("key"); }) ==
        "/key (line 1): unknown key \"key\"; no keys are known here");
}

TEST_CASE("an unjudged block keeps its other keys to itself") {
  CHECK(complaints(R"({"engine": {"name": "zeero", "stage": 2}})", [](const ConfigReader& root) {
          const ConfigReader engine = root.section("engine", "");
          engine.require_choice("name", {"ddp", "zero"}, "");
          engine.leave_unjudged();
        }) == "/engine/name (line 1): \"zeero\" is not one of ddp, zero; did you mean \"zero\"?");
}

TEST_CASE("a misspelt key suggests one that is not written yet") {
  CHECK(complaints(R"({"dp": 2, "xp": 2})", [](const ConfigReader& root) {
          for (const char* axis : {"dp", "tp"}) root.get<int>(axis, 1, "");
        }) == "/xp (line 1): unknown key \"xp\"; did you mean \"tp\"?");
}

TEST_CASE("a reader documents the keys that it was asked for") {
  const ConfigReader root = ConfigDocument::parse("{}", "run.json").root();
  root.get<int>("stage", 1, "what is sharded", {0, 3});
  root.get<double>("lr", 0.5, "step size", {0});
  root.require<std::string>("name", "what it is called");
  root.get_optional<bool>("fast", "");
  root.choice("dtype", "fp32", {"fp32", "fp64"}, "number format");
  root.section("optimizer", "update rule");
  root.get<int>("stage", 1, "asked again");
  const std::vector<KeyDoc> docs = root.docs();
  REQUIRE(docs.size() == 6);
  CHECK((docs[0].key == "stage" && docs[0].type == "integer in [0, 3]" && docs[0].default_value == "1"));
  CHECK(docs[0].doc == "what is sharded");
  CHECK((docs[1].type == "number >= 0" && docs[1].default_value == "0.5"));
  CHECK((docs[2].type == "string" && docs[2].default_value == "required"));
  CHECK((docs[3].type == "bool" && docs[3].default_value == "null"));
  CHECK((docs[4].default_value == "\"fp32\"" && docs[4].choices == std::vector<std::string>{"fp32", "fp64"}));
  CHECK((docs[5].key == "optimizer" && docs[5].type == "section"));
}

TEST_CASE("the nearest word is found within two edits or by its beginning") {
  const std::vector<std::string> words = {"gradient_clipping", "epochs", "lr", "dp", "stage", "stage_count"};
  CHECK(nearest_word("gradient_clipp1ng", words) == "gradient_clipping");
  CHECK(nearest_word("epcohs", words) == "epochs");
  CHECK(nearest_word("epch", words) == "epochs");
  CHECK(nearest_word("grad", words) == "gradient_clipping");
  CHECK(nearest_word("gradientClipping", words) == "gradient_clipping");
  CHECK(nearest_word("GRADIENT-CLIPPING", words) == "gradient_clipping");
  CHECK(nearest_word("rl", words) == "lr");
  CHECK(nearest_word("stag", words) == "stage");
  CHECK(nearest_word("stage_c", words) == "stage");
  CHECK(nearest_word("stage_co", words) == "stage_count");
  CHECK(nearest_word("ab", words) == "");
  CHECK(nearest_word("momentum", words) == "");
  CHECK(nearest_word("", words) == "");
  CHECK(nearest_word("epochs", {}) == "");
}

TEST_CASE("property: no key survives a one-letter mistake, and the right key is suggested") {
  // Every key of the sample, by the position of its first letter.
  std::vector<std::pair<std::size_t, std::string>> keys;
  std::set<std::string> names;
  for (std::size_t colon = kSample.find("\":"); colon != std::string::npos; colon = kSample.find("\":", colon + 1)) {
    const std::size_t begin = kSample.rfind('"', colon - 1) + 1;
    keys.emplace_back(begin, kSample.substr(begin, colon - begin));
    names.insert(keys.back().second);
  }
  REQUIRE(keys.size() == 25);

  int mutations = 0, rejected = 0, right = 0;
  const auto try_key = [&](std::size_t begin, const std::string& key, const std::string& mutated) {
    if (names.contains(mutated) || mutated.empty() || mutated[0] == '_') return;
    std::string text = kSample;
    text.replace(begin, key.size(), mutated);
    const std::string complaint = complaints(text, read_sample);
    ++mutations;
    rejected += complaint.find("unknown key \"" + mutated + "\"") != std::string::npos;
    const std::string ending = "did you mean \"" + key + "\"?";
    right += complaint.ends_with(ending) && complaint.find('\n') == std::string::npos;
  };
  for (const auto& [begin, key] : keys) {
    for (std::size_t i = 0; i < key.size(); ++i) {
      for (const char letter : {'a', 'e', 's', '1'}) {
        std::string substituted = key, inserted = key;
        substituted[i] = letter;
        inserted.insert(i, 1, letter);
        try_key(begin, key, substituted);
        try_key(begin, key, inserted);
      }
      std::string deleted = key, swapped = key, capital = key;
      deleted.erase(i, 1);
      try_key(begin, key, deleted);
      if (i + 1 < key.size()) std::swap(swapped[i], swapped[i + 1]);
      try_key(begin, key, swapped);
      capital[i] = static_cast<char>(std::toupper(static_cast<unsigned char>(key[i])));
      try_key(begin, key, capital);
    }
  }
  CHECK(mutations > 2000);
  CHECK(rejected == mutations);
  CHECK(right >= 0.95 * mutations);
}
