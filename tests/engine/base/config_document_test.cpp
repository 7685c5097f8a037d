#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "engine/base/config_reader.h"
#include "tests/engine/base/config_sample.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// A directory of files that is gone after the test.
class Files {
 public:
  Files() : root_(std::filesystem::temp_directory_path() / ("pdl_config_test_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(root_);
  }
  ~Files() { std::filesystem::remove_all(root_); }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  std::string write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = root_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return path.string();
  }
  std::string path(const std::string& name) const { return (root_ / name).string(); }

 private:
  std::filesystem::path root_;
};

}  // namespace

TEST_CASE("duplicate keys are found at any depth, with both lines") {
  CHECK(complaints("{\n\"a\": {\"k\": 1,\n\"b\": 1, \"\\u006b\": 2}}", [](const ConfigReader& root) {
          const ConfigReader a = root.section("a", "");
          a.get<int>("k", 0, "");
          a.get<int>("b", 0, "");
        }) == "/a/k (line 3): duplicate key \"k\", first on line 2");
}

TEST_CASE("equal keys of different objects are no duplicates") {
  const Read read = [](const ConfigReader& root) {
    root.section("a", "").get<int>("k", 0, "");
    root.section("b", "").get<int>("k", 0, "");
  };
  CHECK(complaints(R"({"a": {"k": 1}, "b": {"k": 1}})", read).empty());
}

TEST_CASE("comment keys are skipped wherever they stand, and may repeat") {
  const std::string text = R"({"//": "one", "//": {"x": 1, "x": 2}, "_note": [1, {"y": 2}],
                              "a": {"_off": true, "k": 1}, "//k": 3})";
  CHECK(complaints(text, [](const ConfigReader& root) {
          CHECK_FALSE(root.has("_note"));
          CHECK(root.section("a", "").get<int>("k", 0, "") == 1);
        }).empty());
}

TEST_CASE("a comment hides only itself") {
  CHECK(complaints("{\"//\": {\"k\": 1},\n\"a\": {\"_x\": [1], \"k\": 1},\n\"k\": 2,\n\"k\": 3}",
                   [](const ConfigReader& root) {
                     root.section("a", "").get<int>("k", 0, "", {5});
                     root.get<int>("k", 0, "");
                   }) == "/a/k (line 2): must be at least 5, got 1\n/k (line 4): duplicate key \"k\", first on line 3");
}

TEST_CASE("strings that look like structure do not mislead the line numbers") {
  const std::string text =
      "{\n\"a\": \"}{][,:\\\\\",\n\"b\": \"\\\"//\\n\",\n\"c~/d\": [{\"x\":\n[]}, -1e3, null],\n\"e\": 1}";
  CHECK(complaints(text,
                   [](const ConfigReader& root) {
                     root.get<std::string>("a", "", "");
                     root.get<std::string>("b", "", "");
                   }) ==
        "/c~0~1d (line 4): unknown key \"c~/d\"; known here: a, b\n"
        "/e (line 6): unknown key \"e\"; known here: a, b");
}

TEST_CASE("text as Windows editors write it has the same lines") {
  CHECK(complaints("\xef\xbb\xbf{\r\n\"a\": 1,\r\n\"b\": 2\r\n}", [](const ConfigReader& root) {
          CHECK(root.get<int>("a", 0, "") == 1);
        }) == "/b (line 3): unknown key \"b\"; known here: a");
}

TEST_CASE("overrides set old and new keys, as JSON if they parse as such") {
  const ConfigDocument document = ConfigDocument::parse(
      kSample, "run.json",
      {"training.epochs=3", "training.optimizer.lr=1e-4", "name=a=b", "balance=[1,2]", "engine.overlap_comm=false"});
  CHECK(complaints(document, read_sample).empty());
  CHECK(document.root().get<std::string>("name", "", "") == "a=b");
  CHECK(document.root().section("training", "").get<int>("epochs", 0, "") == 3);
  CHECK(document.root().section("training", "").section("optimizer", "").get<double>("lr", 0, "") == 1e-4);
  CHECK(document.root().get_list("balance", {}, "") == std::vector<std::int64_t>{1, 2});
  CHECK(document.root().section("engine", "").get<bool>("overlap_comm", true, "") == false);

  const ConfigDocument created = ConfigDocument::parse("{}", "run.json", {"a.b.c=3"});
  CHECK(created.root().section("a", "").section("b", "").get<int>("c", 0, "") == 3);
}

TEST_CASE("problems of overrides say so") {
  CHECK(sample_complaints({"training.epoch=3"}) ==
        "/training/epoch (command line): unknown key \"epoch\"; did you mean \"epochs\"?");
  CHECK(sample_complaints({"trainin.epochs=3"}) ==
        "/trainin (command line): unknown key \"trainin\"; did you mean \"training\"?");
  CHECK(sample_complaints({"training.epochs=3.5"}) == "/training/epochs (command line): expected an integer, got 3.5");
  CHECK(sample_complaints({"balance=[1,0]"}) == "/balance/1 (command line): must be at least 1, got 0");
  CHECK(sample_complaints({"device.index=3"}) ==
        "/device (command line): cannot set \"index\" here: it holds \"auto\", not an object");
  CHECK(sample_complaints({"engine={\"name\":\"ddp\",\"stage\":1,\"stage\":2}"}) ==
        "/engine/stage (command line): duplicate key \"stage\"");
  CHECK(sample_complaints({"_note=3"}) != "");
  for (const char* bad : {"epochs", "=3", "training..epochs=3", ".epochs=3", "training.=3"})
    CHECK(sample_complaints({bad}) ==
          str("command line: \"", bad, "\" is no override: key=value or section.key=value is"));
}

TEST_CASE("extends merges objects, replaces the rest and names the file of each problem") {
  const Files files;
  files.write("base/deep.json", "{\n\"training\": {\"epochs\": 9, \"dtype\": \"fp64\"},\n\"list\": [1, 2, 3]}");
  files.write("base.json", "{\n\"extends\": \"base/deep.json\",\n\n\"training\": {\"epochs\": 5,\n\"sed\": 1}}");
  const std::string main =
      files.write("run.json", "{\n\"extends\": \"base.json\",\n\"training\": {\"lr\": 2},\n\"list\": [4]}");
  const ConfigDocument document = ConfigDocument::load(main);
  CHECK(complaints(document,
                   [](const ConfigReader& root) {
                     const ConfigReader training = root.section("training", "");
                     CHECK(training.get<int>("epochs", 0, "", {6}) == 0);
                     CHECK(training.get<std::string>("dtype", "", "") == "fp64");
                     CHECK(training.get<int>("lr", 0, "", {3}) == 0);
                     training.get<int>("seed", 0, "");
                     training.require<int>("steps", "");
                     CHECK(root.get_list("list", {}, "") == std::vector<std::int64_t>{4});
                   }) ==
        "/training/lr (line 3): must be at least 3, got 2\n"
        "/training/steps (line 3): required key \"steps\" is missing\n"
        "/training/epochs (" +
            files.path("base.json") +
            ", line 4): must be at least 6, got 5\n"
            "/training/sed (" +
            files.path("base.json") + ", line 5): unknown key \"sed\"; did you mean \"seed\"?");
}

TEST_CASE("a replaced object takes its lines with it") {
  const Files files;
  files.write("base.json", "{\n\n\"a\": {\"k\": 1}}");
  const ConfigDocument document = ConfigDocument::load(files.write("run.json", R"({"extends": "base.json", "a": []})"));
  CHECK(complaints(document, [](const ConfigReader& root) { root.section("a", "").problem("k", "is needed"); }) ==
        "/a (line 1): expected an object {...}, got a list\n/a/k (line 1): is needed");
}

TEST_CASE("a duplicate key in a base file is found") {
  const Files files;
  files.write("base.json", "{\"k\": 1,\n\"k\": 2}");
  const ConfigDocument document = ConfigDocument::load(files.write("run.json", R"({"extends": "base.json", "k": 3})"));
  CHECK(complaints(document, [](const ConfigReader& root) { CHECK(root.get<int>("k", 0, "") == 3); }) ==
        "/k (" + files.path("base.json") + ", line 2): duplicate key \"k\", first on line 1");
}

TEST_CASE("a broken chain of files is refused where it breaks") {
  const Files files;
  const auto load = [&](const std::string& name) { return ConfigDocument::load(files.path(name)); };
  files.write("gone.json", "{\n\"extends\": \"nowhere.json\"}");
  CHECK_THROWS_WITH(load("gone.json"), StartsWith("/extends (line 2): cannot read ") &&
                                           EndsWith("nowhere.json: No such file or directory"));
  files.write("odd.json", R"({"extends": 3})");
  CHECK_THROWS_WITH(load("odd.json"), "/extends (line 1): expected the name of a file, got 3");
  files.write("a.json", R"({"extends": "b.json"})");
  files.write("b.json", R"({"extends": "./a.json"})");
  CHECK_THROWS_WITH(load("a.json"),
                    StartsWith("/extends (" + files.path("b.json") + ", line 1): \"extends\" leads back"));
  files.write("lasso.json", R"({"extends": "a.json"})");
  CHECK_THROWS_WITH(load("lasso.json"), StartsWith("/extends (" + files.path("b.json") + ", line 1)"));
  files.write("self.json", R"({"extends": "self.json"})");
  CHECK_THROWS_WITH(load("self.json"), ContainsSubstring("a cycle"));
  CHECK_THROWS_WITH(load("none.json"), StartsWith("cannot read ") && ContainsSubstring("No such file"));
  CHECK_THROWS_WITH(load(""), ContainsSubstring("not a file"));
  files.write("bad.json", "{\n\n!}");
  files.write("main.json", R"({"extends": "bad.json"})");
  CHECK_THROWS_WITH(load("main.json"), StartsWith(files.path("bad.json") + ", line 3: JSON syntax error at column 1"));
}

TEST_CASE("syntax errors have line, column and a hint") {
  const auto parse = [](const std::string& text) { return ConfigDocument::parse(text, "run.json"); };
  CHECK_THROWS_WITH(parse("{\n  \"a\": 1,\n}"),
                    "run.json, line 3: JSON syntax error at column 1: a comma stands before the closing bracket");
  CHECK_THROWS_WITH(parse("{\n  // note\n}"), ContainsSubstring("line 2: JSON syntax error at column 3: JSON has no"));
  CHECK_THROWS_WITH(parse("{'a': 1}"), EndsWith("column 2: strings stand in double quotes"));
  CHECK_THROWS_WITH(parse(""), StartsWith("run.json, line 1: JSON syntax error at column 1"));
  CHECK_THROWS_WITH(parse("{\"a\": 1e999}"), StartsWith("run.json: invalid JSON: "));
  CHECK_THROWS_WITH(parse("[1]"), "run.json, line 1: a configuration is a JSON object {...}");
  const std::string deep = "{\"a\": " + std::string(100000, '[') + std::string(100000, ']') + "}";
  CHECK_THROWS_WITH(parse(deep), "run.json, line 1: nested more than 64 levels deep");
  try {
    parse("{");
    FAIL("accepted");
  } catch (const ConfigError& error) {
    CHECK(error.code() == ExitCode::usage);
  }
}

TEST_CASE("the effective configuration holds what was read, defaults included, in order of reading") {
  const ConfigDocument document = ConfigDocument::parse(R"({"b": {"k": 2}, "lr": 1})", "run.json");
  const ConfigReader root = document.root();
  root.get<double>("lr", 0.5, "");
  const ConfigReader b = root.section("b", "");
  b.get<int>("z", 26, "");
  b.get<int>("k", 0, "");
  b.get_optional<std::string>("note", "");
  root.section("a", "");
  root.get_list("list", {1}, "");
  root.get<double>("limit", std::numeric_limits<double>::infinity(), "");
  CHECK(document.effective_json() ==
        "{\n  \"lr\": 1.0,\n  \"b\": {\n    \"z\": 26,\n    \"k\": 2,\n    \"note\": null\n  },\n  \"a\": {},\n"
        "  \"list\": [\n    1\n  ],\n  \"limit\": \"inf\"\n}");
}

TEST_CASE("the hash is equal exactly when the effective configurations are") {
  const auto hash = [](const std::string& text, const std::vector<std::string>& overrides = {}) {
    const ConfigDocument document = ConfigDocument::parse(text, "run.json", overrides);
    CHECK(complaints(document, read_sample).empty());
    return document.effective_hash();
  };
  const std::string reference = hash(kSample);
  CHECK(reference.size() == 16);
  CHECK(reference.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(hash(kSample, {"training.epochs=2", "engine.reduce_bucket_size=500000000"}) == reference);
  CHECK(hash(kSample, {"training.epochs=3"}) != reference);

  const ConfigDocument document = ConfigDocument::parse(kSample, "run.json");
  read_sample(document.root());
  CHECK(hash(document.effective_json()) == reference);
  CHECK(ConfigDocument::parse("{}", "run.json").effective_hash() == "08f44b07b5901a25");  // FNV-1a of "{}"
}
