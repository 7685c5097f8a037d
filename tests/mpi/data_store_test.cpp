// The data store on several ranks: every rank gets the samples that it reads, storage is read once, the bytes are those
// that the plan implies, and every engine trains to the same bits with it as without.

#include <atomic>
#include <set>
#include <vector>

#include "cli/comparison.h"
#include "engine/data/sample_staging.h"
#include "parallel/comm/counting_communicator.h"
#include "parallel/sync/data_store.h"
#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

constexpr std::int64_t kRecordBytes = 3 * 4 + 4;

/// Inputs fp32 [3] and targets int32 [1] that tell which sample they are; counts how often it is read.
class Numbered final : public Dataset {
 public:
  Numbered(std::int64_t samples, std::atomic<std::int64_t>& reads) : samples_(samples), reads_(reads) {}
  DatasetInfo info() const override { return {}; }
  std::int64_t size() const override { return samples_; }
  TensorSpec input_spec() const override { return {DType::fp32, Shape{3}}; }
  TensorSpec target_spec() const override { return {DType::int32, Shape{1}}; }
  void read(std::int64_t id, Tensor input, Tensor target) const override {
    ++reads_;
    for (int i = 0; i < 3; ++i) input.data<float>()[i] = static_cast<float>(10 * id + i);
    target.data<std::int32_t>()[0] = static_cast<std::int32_t>(-id);
  }

 private:
  std::int64_t samples_;
  std::atomic<std::int64_t>& reads_;
};

bool reads_right(const Dataset& set, std::int64_t id) {
  std::vector<float> input(3);
  std::vector<std::int32_t> target(1);
  set.read(id, tensor_of(input), tensor_of(target));
  const auto number = static_cast<float>(10 * id);
  return input == std::vector<float>{number, number + 1, number + 2} && target.front() == -id;
}

std::vector<std::int64_t> ids_of(const EpochPlan& plan, std::int64_t step, int part, int parts) {
  if (parts == 0) return {};
  const std::span<const std::int64_t> ids = plan.step_ids(step);
  const Part mine = split_evenly(static_cast<std::int64_t>(ids.size()), parts, part);
  return {ids.begin() + mine.begin, ids.begin() + mine.begin + mine.count};
}

/// Which part of each step a rank reads.
struct Place {
  int part = 0, parts = 0;
};
using PlaceOf = Place (*)(int rank, int ranks);

/// A data-parallel rank each; pairs that read the same; only the last two ranks read.
const std::vector<PlaceOf> kPlaces = {
    [](int rank, int ranks) {
      return Place{rank, ranks};
    },
    [](int rank, int ranks) {
      return Place{rank / 2, (ranks + 1) / 2};
    },
    [](int rank, int ranks) {
      return rank < ranks - 2 ? Place{} : Place{ranks - 1 - rank, 2};
    },
};

/// A store of `samples` samples on all ranks, with what it counts.
struct Stored {
  Stored(Ranks& ranks, std::int64_t samples, bool preload) {
    const std::unique_ptr<Communicator> world = make_counting_communicator(ranks.communicator(), ledger);
    store = std::make_unique<DataStore>(std::make_unique<Numbered>(samples, reads),
                                        world->split(0, ranks.rank, "data_store"), *ranks.device,
                                        DataStoreOptions{.enabled = true, .preload = preload});
  }
  SampleStaging& staging() { return *store->staging(); }

  CommLedger ledger;
  std::atomic<std::int64_t> reads = 0;
  std::unique_ptr<DataStore> store;
};

/// Reads a whole epoch as a feeder does; returns whether all samples were right.
bool read_epoch(Stored& stored, const EpochPlan& plan, Place place) {
  bool right = true;
  stored.staging().begin(plan);
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    stored.staging().begin_step(step);
    if (place.parts > 0) stored.staging().wait(step);
    for (const std::int64_t id : ids_of(plan, step, place.part, place.parts)) {
      right = right && stored.staging().at_hand(step) && reads_right(*stored.store, id);
    }
  }
  return right;
}

/// Bytes that `rank` sends over an epoch, counted sample by sample.
std::int64_t sent_bytes(const EpochPlan& plan, PlaceOf place_of, int rank, int ranks) {
  std::int64_t bytes = 0;
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    for (int reader = 0; reader < ranks; ++reader) {
      const Place place = place_of(reader, ranks);
      for (const std::int64_t id : ids_of(plan, step, place.part, place.parts)) {
        if (reader != rank && id % ranks == rank) bytes += kRecordBytes;
      }
    }
  }
  return bytes;
}

}  // namespace

TEST_CASE("every rank reads its samples, storage is read once, bytes are those of the plan", "[data_store]") {
  Ranks ranks;
  for (const bool preload : {true, false}) {
    for (const std::int64_t samples : {1, 2, 7, 23}) {  // fewer than ranks; ragged last steps
      for (std::size_t variant = 0; variant < kPlaces.size(); ++variant) {
        for (const int steps_ahead : {1, 3}) {
          INFO(samples << " samples, places " << variant << ", preload " << preload << ", ahead " << steps_ahead);
          const Place place = kPlaces[variant](ranks.rank, ranks.size);
          Stored stored(ranks, samples, preload);
          std::int64_t kept = 0;
          for (std::int64_t id = ranks.rank; id < samples; id += ranks.size) ++kept;
          CHECK(stored.reads == (preload ? kept : 0));
          stored.staging().join(place.part, place.parts, steps_ahead);
          CHECK(stored.staging().held_bytes() == kept * kRecordBytes);

          for (const std::int64_t epoch : {0, 1}) {
            const EpochPlan plan(samples, 5, 3, epoch, true, false, 0);
            stored.ledger.take();
            CHECK(read_epoch(stored, plan, place));
            CHECK(stored.reads == kept);
            const CommCounts counts = stored.ledger.take();
            const std::int64_t expected = sent_bytes(plan, kPlaces[variant], ranks.rank, ranks.size);
            const auto sent = counts.find("data_store.send");
            CHECK((sent == counts.end() ? 0 : sent->second.bytes) == expected);
            for (const auto& [operation, count] : counts) {
              CHECK(std::set<std::string>{"data_store.send", "data_store.recv"}.contains(operation));
            }
          }
          ranks.world->barrier();
        }
      }
    }
  }
}

TEST_CASE("an abandoned plan leaves nothing behind, and a sample that nobody announced is refused", "[data_store]") {
  Ranks ranks;
  Stored stored(ranks, 40, true);
  stored.staging().join(ranks.rank, ranks.size, 2);
  const EpochPlan first(40, 8, 3, 0, true, false, 0), second(40, 8, 3, 1, true, false, 0);
  stored.staging().begin(first);
  stored.staging().begin_step(0);
  stored.staging().wait(0);
  CHECK(read_epoch(stored, second, {ranks.rank, ranks.size}));

  stored.staging().begin(first);
  stored.staging().wait(0);
  CHECK_FALSE(stored.staging().at_hand(2));
  CHECK_THROWS_AS(stored.staging().wait(2), Error);
  for (const std::int64_t id : first.step_ids(4)) {
    if (id % ranks.size != ranks.rank) CHECK_THROWS_WITH(reads_right(*stored.store, id), ContainsSubstring("brought"));
  }
}

TEST_CASE("every engine trains to the same bits with and without a data store", "[data_store]") {
  World& world = test_world();
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"workload.train_samples=43", "loader.threads=0", "loader.data_store.preload=false"},  // ragged last step
      {"workload.train_samples=38", "training.micro_batch_size=1", "loader.prefetch=1"},
      {"workload.validation_samples=1", "training.deterministic=true"},  // fewer samples than ranks
  };
  for (const EngineDefinition& definition : engine_definitions()) {
    if (definition.name == "serial" && world.info().size > 1) continue;
    if (!definition.takes_data_store) {
      CHECK_THROWS_WITH(make_experiment(world, tiny_config("gpt2"),
                                        {"engine.name=" + definition.name, "loader.data_store.enabled=true"}),
                        ContainsSubstring("/loader/data_store/enabled"));
      continue;
    }
    for (const char* model : {"gpt2", "vgg"}) {
      for (std::vector<std::string> overrides : variants) {
        INFO(definition.name << " " << model << ", " << (overrides.empty() ? "plain" : overrides.front()));
        overrides.push_back("engine.name=" + definition.name);
        Outcome outcomes[2];
        for (const bool stored : {false, true}) {
          overrides.push_back(std::string("loader.data_store.enabled=") + (stored ? "true" : "false"));
          const std::unique_ptr<Experiment> experiment = make_experiment(world, tiny_config(model), overrides);
          CHECK((experiment->data.train->staging() != nullptr) == stored);
          outcomes[stored] = train_for_comparison(*experiment, 5);
          const CommCounts counts = experiment->ledger.take();
          CHECK((counts.contains("data_store.send") && counts.at("data_store.send").bytes > 0) == stored);
        }
        CHECK(outcomes[0].losses == outcomes[1].losses);
        CHECK(outcomes[0].values == outcomes[1].values);
        CHECK(outcomes[0].validation.loss_sum == outcomes[1].validation.loss_sum);
      }
    }
  }
}
