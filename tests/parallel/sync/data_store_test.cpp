// The data store of one rank alone: all samples are its own, nothing is sent.

#include "parallel/sync/data_store.h"

#include "engine/data/sample_staging.h"
#include "parallel/comm/self_communicator.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Token i of sample s is 100 s + i; sample `broken` cannot be read.
class Tokens final : public Dataset {
 public:
  explicit Tokens(std::int64_t broken) : broken_(broken) {}
  DatasetInfo info() const override {
    DatasetInfo info;
    info.name = "tokens";
    return info;
  }
  std::int64_t size() const override { return 40; }
  TensorSpec input_spec() const override { return {DType::int32, Shape{2}}; }
  TensorSpec target_spec() const override { return input_spec(); }
  void read(std::int64_t id, Tensor input, Tensor target) const override {
    if (id == broken_) throw Error(str("sample ", id, " is damaged"), ExitCode::data);
    for (int i = 0; i < 2; ++i) {
      input.data<std::int32_t>()[i] = static_cast<std::int32_t>(100 * id + i);
      target.data<std::int32_t>()[i] = static_cast<std::int32_t>(100 * id + i + 1);
    }
  }

 private:
  std::int64_t broken_;
};

std::unique_ptr<DataStore> store_on_one_rank(Device& device, const DataStoreOptions& options,
                                             std::int64_t broken = -1) {
  return std::make_unique<DataStore>(std::make_unique<Tokens>(broken), make_self_communicator(device), device, options);
}

}  // namespace

TEST_CASE("one rank keeps everything") {
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  for (const int threads : {0, 2}) {
    const std::unique_ptr<DataStore> store = store_on_one_rank(*device, {.preload = true, .loader_threads = threads});
    CHECK(store->info().name == "tokens");
    CHECK(store->staging()->held_bytes() == 40 * 4 * 4);
    std::int32_t input[2] = {}, target[2] = {};
    for (std::int64_t id = 0; id < 40; ++id) {
      store->read(id, Tensor(input, DType::int32, Shape{2}), Tensor(target, DType::int32, Shape{2}));
      CHECK(input[1] == 100 * id + 1);
      CHECK(target[1] == 100 * id + 2);
    }
  }
}

TEST_CASE("without preloading, samples are read when a step needs them") {
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  const std::unique_ptr<DataStore> store = store_on_one_rank(*device, {.preload = false}, 39);
  SampleStaging& staging = *store->staging();
  const EpochPlan plan(40, 8, 1, 0, false, false, 0);
  CHECK_THROWS_WITH(staging.begin(plan), ContainsSubstring("nobody has said"));
  staging.join(0, 1, 1);
  staging.begin(plan);
  std::int32_t input[2] = {}, target[2] = {};
  const Tensor x(input, DType::int32, Shape{2}), y(target, DType::int32, Shape{2});
  store->read(7, x, y);
  CHECK(input[0] == 700);
  CHECK_THROWS_WITH(store->read(8, x, y), ContainsSubstring("was not brought"));
  for (std::int64_t step = 0; step < 3; ++step) staging.begin_step(step);
  store->read(31, x, y);
  CHECK_THROWS_WITH(staging.begin_step(3), ContainsSubstring("sample 39 is damaged"));
}

TEST_CASE("what storage cannot read ends the preloading") {
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  CHECK_THROWS_WITH(store_on_one_rank(*device, {.preload = true}, 17), ContainsSubstring("sample 17 is damaged"));
}
