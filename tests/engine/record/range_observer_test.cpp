#include "engine/record/range_observer.h"

#include <string>
#include <vector>

#include "engine/base/error.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Writes ranges as brackets: "step 0(forward()".
class Brackets final : public RangeListener {
 public:
  void push(const std::string& name) override {
    text += name + "(";
    ++depth;
  }
  void pop() override {
    text += ")";
    --depth;
  }
  std::string text;
  int depth = 0;
};

}  // namespace

TEST_CASE("steps, tasks and phases are nested ranges") {
  Brackets brackets;
  RangeObserver ranges(&brackets);
  ranges.step_begin();
  ranges.task_begin({TaskKind::micro_batch, 0});
  ranges.phase(Phase::forward);
  ranges.phase(Phase::backward);
  ranges.task_end();
  ranges.phase(Phase::optimizer);
  ranges.step_end({});
  CHECK(brackets.text == "step 0(micro-batch 0(forward()backward())optimizer())");
  ranges.step_begin();
  ranges.step_end({});
  CHECK(brackets.depth == 0);
}

TEST_CASE("steps and tasks that overlap leave no range open") {
  Brackets brackets;
  RangeObserver ranges(&brackets);
  ranges.step_begin();
  ranges.step_begin();  // the next one enters the pipeline
  ranges.task_begin({TaskKind::forward, 1});
  ranges.phase(Phase::forward);
  ranges.step_end({});
  CHECK(brackets.text == "step 0(forward 1(forward()))step 1(");
  ranges.task_end();  // was cut off
  ranges.step_end({});
  CHECK(brackets.text == "step 0(forward 1(forward()))step 1()");
}

TEST_CASE("nobody listening is fine") {
  RangeObserver ranges(nullptr);
  ranges.step_begin();
  ranges.task_begin({TaskKind::micro_batch, 0});
  ranges.phase(Phase::forward);
  ranges.task_end();
  ranges.step_end({});
  const NamedRange range(nullptr, []() -> std::string { throw Error("a name that nobody asked for"); });
}

TEST_CASE("the first of several observers is around the others") {
  struct Named final : Observer {
    Named(std::string& text_in, char name_in) : text(text_in), name(name_in) {}
    void step_begin() override { text += std::string("<") + name; }
    void phase(Phase) override { text += name; }
    void task_begin(const Task&) override { text += std::string("(") + name; }
    void task_end() override { text += std::string(")") + name; }
    void step_end(const StepReport&) override { text += std::string(">") + name; }
    std::string& text;
    char name;
  };
  std::string text;
  Named a(text, 'a'), b(text, 'b');
  Observers both({&a, &b});
  both.step_begin();
  both.task_begin({});
  both.phase(Phase::data);
  both.task_end();
  both.step_end({});
  CHECK(text == "<a<b(a(bab)b)a>b>a");
}
