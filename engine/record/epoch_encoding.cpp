// One rank's epoch as numbers and back, so that one gather of numbers brings all ranks together.

#include <string>

#include "engine/base/error.h"
#include "engine/record/recorder.h"

namespace pdl {
namespace {

constexpr double kEncodingMark = 20002.0;  // first of all numbers: catches a gather that mixed up its parts

/// Reads numbers one after the other and never beyond their end.
class Numbers {
 public:
  explicit Numbers(std::span<const double> numbers) : numbers_(numbers) {}
  double real() {
    PDL_CHECK(next_ < numbers_.size(), "an encoded epoch ends after ", numbers_.size(), " numbers");
    return numbers_[next_++];
  }
  std::int64_t integer() { return static_cast<std::int64_t>(real()); }
  /// A count of things that follow.
  std::size_t count() {
    const double count = real();
    PDL_CHECK(count >= 0.0 && count <= static_cast<double>(numbers_.size()), "an encoded epoch counts ", count);
    return static_cast<std::size_t>(count);
  }

 private:
  std::span<const double> numbers_;
  std::size_t next_ = 0;
};

void append(std::vector<double>& numbers, const MemoryByKind& memory) {
  for (const std::int64_t bytes : memory.bytes) numbers.push_back(static_cast<double>(bytes));
}

MemoryByKind read_memory(Numbers& numbers) {
  MemoryByKind memory;
  for (std::int64_t& bytes : memory.bytes) bytes = numbers.integer();
  return memory;
}

void append(std::vector<double>& numbers, const StalenessRecord& staleness) {
  numbers.insert(numbers.end(), {static_cast<double>(staleness.stage), static_cast<double>(staleness.updates),
                                 staleness.samples_per_update, static_cast<double>(staleness.versions),
                                 staleness.weight_drift, static_cast<double>(staleness.updates_behind.size())});
  for (const std::int64_t count : staleness.updates_behind) numbers.push_back(static_cast<double>(count));
}

/// All that is measured, in the order of the struct.
void append(std::vector<double>& numbers, const PipelineRankRecord& rank) {
  numbers.insert(numbers.end(), {rank.forward_s, rank.backward_s, rank.recompute_s});
  numbers.insert(numbers.end(), rank.wait_s.begin(), rank.wait_s.end());
  numbers.insert(numbers.end(), {rank.comm_passes_s, rank.comm_s, rank.optimizer_s, rank.other_s,
                                 static_cast<double>(rank.passes.size())});
  for (const StagePasses& passes : rank.passes) {
    for (const PassTotal& total : {passes.forward, passes.recompute, passes.backward, passes.loss}) {
      numbers.insert(numbers.end(), {static_cast<double>(total.count), total.s});
    }
  }
}

PipelineRankRecord read_pipeline(Numbers& numbers) {
  PipelineRankRecord rank;
  for (double* seconds : {&rank.forward_s, &rank.backward_s, &rank.recompute_s}) *seconds = numbers.real();
  for (double& seconds : rank.wait_s) seconds = numbers.real();
  for (double* seconds : {&rank.comm_passes_s, &rank.comm_s, &rank.optimizer_s, &rank.other_s}) {
    *seconds = numbers.real();
  }
  rank.passes.resize(numbers.count());
  for (StagePasses& passes : rank.passes) {
    for (PassTotal* total : {&passes.forward, &passes.recompute, &passes.backward, &passes.loss}) {
      total->count = numbers.integer();
      total->s = numbers.real();
    }
  }
  return rank;
}

StalenessRecord read_staleness(Numbers& numbers) {
  StalenessRecord staleness;
  staleness.stage = static_cast<int>(numbers.integer());
  staleness.updates = numbers.integer();
  staleness.samples_per_update = numbers.real();
  staleness.versions = static_cast<int>(numbers.integer());
  staleness.weight_drift = numbers.real();
  staleness.updates_behind.resize(numbers.count());
  for (std::int64_t& count : staleness.updates_behind) count = numbers.integer();
  return staleness;
}

}  // namespace

std::vector<double> encode(const RankEpoch& epoch) {
  std::vector<double> numbers = {kEncodingMark,
                                 epoch.train_s,
                                 epoch.eval_s,
                                 static_cast<double>(epoch.warmup_steps),
                                 static_cast<double>(epoch.counted_samples),
                                 static_cast<double>(epoch.memory_peak_total),
                                 static_cast<double>(epoch.device_memory_used),
                                 static_cast<double>(epoch.library_bytes),
                                 static_cast<double>(epoch.data_store)};
  numbers.insert(numbers.end(), epoch.phase_s.begin(), epoch.phase_s.end());
  append(numbers, epoch.memory_peak);
  append(numbers, epoch.memory_predicted);
  numbers.push_back(static_cast<double>(epoch.step_ms.size()));
  numbers.insert(numbers.end(), epoch.step_ms.begin(), epoch.step_ms.end());
  numbers.push_back(static_cast<double>(epoch.step_exposed_ms.size()));
  numbers.insert(numbers.end(), epoch.step_exposed_ms.begin(), epoch.step_exposed_ms.end());
  numbers.push_back(static_cast<double>(epoch.comm.size()));
  for (const auto& [operation, record] : epoch.comm) {
    numbers.push_back(static_cast<double>(operation.size()));
    for (const char letter : operation) numbers.push_back(static_cast<unsigned char>(letter));
    numbers.insert(numbers.end(), {static_cast<double>(record.calls), static_cast<double>(record.bytes), record.busy_s,
                                   record.exposed_s});
  }
  numbers.push_back(epoch.staleness ? 1.0 : 0.0);
  if (epoch.staleness) append(numbers, *epoch.staleness);
  numbers.push_back(epoch.pipeline ? 1.0 : 0.0);
  if (epoch.pipeline) append(numbers, *epoch.pipeline);
  return numbers;
}

RankEpoch decode(std::span<const double> encoded) {
  Numbers numbers(encoded);
  PDL_CHECK(numbers.real() == kEncodingMark, "these numbers are no encoded epoch");
  RankEpoch epoch;
  epoch.train_s = numbers.real();
  epoch.eval_s = numbers.real();
  epoch.warmup_steps = numbers.integer();
  epoch.counted_samples = numbers.integer();
  epoch.memory_peak_total = numbers.integer();
  epoch.device_memory_used = numbers.integer();
  epoch.library_bytes = numbers.integer();
  epoch.data_store = numbers.integer();
  for (double& seconds : epoch.phase_s) seconds = numbers.real();
  epoch.memory_peak = read_memory(numbers);
  epoch.memory_predicted = read_memory(numbers);
  epoch.step_ms.resize(numbers.count());
  for (double& milliseconds : epoch.step_ms) milliseconds = numbers.real();
  epoch.step_exposed_ms.resize(numbers.count());
  for (double& milliseconds : epoch.step_exposed_ms) milliseconds = numbers.real();
  for (std::size_t operations = numbers.count(); operations > 0; --operations) {
    std::string operation(numbers.count(), ' ');
    for (char& letter : operation) letter = static_cast<char>(numbers.integer());
    CommRecord& record = epoch.comm[operation];
    record.calls = numbers.integer();
    record.bytes = numbers.integer();
    record.busy_s = numbers.real();
    record.exposed_s = numbers.real();
  }
  if (numbers.count() > 0) epoch.staleness = read_staleness(numbers);
  if (numbers.count() > 0) {
    epoch.pipeline = read_pipeline(numbers);
    epoch.pipeline->train_s = epoch.train_s;
  }
  return epoch;
}

}  // namespace pdl
