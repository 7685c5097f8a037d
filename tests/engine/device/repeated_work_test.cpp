// When repeated work is done, recorded and replayed, on a stream that writes down what it is told.

#include "engine/device/repeated_work.h"

#include "tests/support/catch.h"

using namespace pdl;

namespace {

class ScriptedStream final : public Stream {
 public:
  struct Number final : Recording {
    explicit Number(int n) : number(n) {}
    int number;
  };
  std::unique_ptr<Event> make_event() override { return std::make_unique<Event>(); }
  void record(Event&) override {}
  void wait(const Event&) override {}
  void synchronize() override {}
  bool can_record() const override { return records; }
  std::unique_ptr<Recording> record_work(const std::function<void()>& work) override {
    recording = true;
    work();
    recording = false;
    return std::make_unique<Number>(recordings++);
  }
  void replay(const Recording& what) override { log += str(" replay ", static_cast<const Number&>(what).number); }

  bool records = true, recording = false;
  int recordings = 0;
  std::string log;
};

struct Pass {
  ScriptedStream stream;
  RepeatedWork repeated{stream};
  Tensor result = Tensor();

  const void* run(const RepeatedWork::Key& key, void* address) {
    return repeated
        .run(key,
             [&] {
               stream.log += stream.recording ? " record" : " do";
               return Tensor(address, DType::fp32, {1});
             })
        .raw();
  }
};

}  // namespace

TEST_CASE("repeated work is done once, recorded the second time and replayed from then on, each key apart") {
  Pass pass;
  float a = 0.0F, b = 0.0F;
  for (int round = 0; round < 3; ++round) {
    CHECK(pass.run({1, 2}, &a) == &a);
    CHECK(pass.run({1, 3}, &b) == &b);
  }
  CHECK(pass.stream.log == " do do record replay 0 record replay 1 replay 0 replay 1");
}

TEST_CASE("a stream that cannot record does the work each time") {
  Pass pass;
  pass.stream.records = false;
  float a = 0.0F;
  for (int round = 0; round < 3; ++round) CHECK(pass.run({1}, &a) == &a);
  CHECK(pass.stream.log == " do do do");
}

TEST_CASE("work that is never alike is not remembered for ever") {
  Pass pass;
  float a = 0.0F;
  const auto most = static_cast<std::int64_t>(RepeatedWork::kMostKeys);
  for (std::int64_t key = 0; key <= most; ++key) pass.run({key}, &a);
  pass.stream.log.clear();
  pass.run({most}, &a);
  pass.run({0}, &a);
  CHECK(pass.stream.log == " do record replay 0");
}
