// A ring of capacity + 1 slots: those outstanding, and the one that the caller still looks at. Threads share the
// samples of the oldest unfinished batch rather than each taking a batch of its own, because the oldest is what `next`
// waits for.

#include "engine/data/data_loader.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pdl {
namespace {

constexpr std::int64_t kNoFailure = -1;

struct Slot {
  std::shared_ptr<void> input;
  std::vector<std::byte> target;
  std::vector<std::int64_t> ids;
  HostBatch batch;            // views of the three above
  std::int64_t claimed = 0;   // samples that some thread reads or has read
  std::int64_t finished = 0;  // samples read
  std::int64_t failed_sample = kNoFailure;
  std::exception_ptr failure;

  bool done() const { return finished == batch.size; }
};

// "[N] + [H, W, C]".
Shape batched(std::int64_t samples, const Shape& sample) {
  PDL_CHECK(sample.rank() < Shape::kMaxRank, "a sample of shape ", sample.to_string(), " leaves no axis for N");
  switch (sample.rank()) {
    case 1:
      return {samples, sample[0]};
    case 2:
      return {samples, sample[0], sample[1]};
    case 3:
      return {samples, sample[0], sample[1], sample[2]};
    case 4:
      return {samples, sample[0], sample[1], sample[2], sample[3]};
    default:
      return {samples};
  }
}

std::shared_ptr<void> on_the_heap(std::int64_t bytes) {
  const auto memory = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(bytes));
  return {memory, memory->data()};
}

}  // namespace

struct DataLoader::State {
  State(const Dataset& set, DataLoaderOptions wanted, std::int64_t largest, const HostAllocator& allocate);
  ~State();

  void start_threads();
  void push(std::span<const std::int64_t> ids);
  const HostBatch& next();
  void work(std::size_t thread);
  void read_sample(Slot& slot, std::int64_t sample, float* pixels) const;
  // Reads samples [begin, end) of `slot`, without the lock; notes a failure with it.
  void read_part(Slot& slot, std::int64_t begin, std::int64_t end, float* pixels);
  Slot* oldest_unclaimed();

  const Dataset& dataset;
  const DataLoaderOptions options;
  const std::int64_t max_batch;
  const TensorSpec input_spec, target_spec;
  const bool holds_images, converts;

  std::vector<Slot> slots;
  std::vector<std::vector<float>> scratch;  // one sample a thread, for conversion
  std::int64_t pushed = 0, returned = 0;    // batches so far; batch i lives in slot i % slots.size()
  std::atomic<bool> stopping = false;       // written under the lock; read between samples without it
  std::mutex mutex;
  std::condition_variable work_waiting, batch_finished;
  std::vector<std::thread> threads;
};

DataLoader::State::State(const Dataset& set, DataLoaderOptions wanted, std::int64_t largest,
                         const HostAllocator& allocate)
    : dataset(set),
      options(wanted),
      max_batch(largest),
      input_spec(set.input_spec()),
      target_spec(set.target_spec()),
      holds_images(input_spec.dtype == DType::fp32),
      converts(holds_images && wanted.image_dtype == DType::fp64) {
  PDL_CHECK(options.threads >= 0 && options.prefetch >= 0 && max_batch >= 1, options.threads, " threads, prefetch ",
            options.prefetch, ", batches of ", max_batch);
  PDL_CHECK(options.image_dtype == DType::fp32 || options.image_dtype == DType::fp64, "images as ",
            name_of(options.image_dtype), ": only fp32 and fp64 are made on the host");
  PDL_CHECK(holds_images || input_spec.dtype == DType::int32, "samples of ", name_of(input_spec.dtype));
  PDL_CHECK(target_spec.dtype == DType::int32, "targets of ", name_of(target_spec.dtype));

  const std::int64_t input_bytes = input_spec.shape.elements() * size_of(converts ? DType::fp64 : input_spec.dtype);
  slots.resize(static_cast<std::size_t>(std::max(1, options.prefetch)) + 1);
  for (Slot& slot : slots) {
    slot.input = allocate(max_batch * input_bytes);
    slot.target.resize(static_cast<std::size_t>(max_batch * target_spec.bytes()));
    slot.ids.resize(static_cast<std::size_t>(max_batch));
  }
  scratch.resize(static_cast<std::size_t>(std::max(1, options.threads)));
  if (converts)
    for (auto& pixels : scratch) pixels.resize(static_cast<std::size_t>(input_spec.shape.elements()));
}

DataLoader::State::~State() {
  {
    const std::lock_guard lock(mutex);
    stopping = true;
  }
  work_waiting.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void DataLoader::State::start_threads() {
  threads.reserve(static_cast<std::size_t>(options.threads));
  for (std::size_t i = 0; i < static_cast<std::size_t>(options.threads); ++i)
    threads.emplace_back([this, i] { work(i); });
}

void DataLoader::State::push(std::span<const std::int64_t> ids) {
  const auto count = static_cast<std::int64_t>(ids.size());
  PDL_CHECK(count <= max_batch, "a batch of ", count, " in a loader for ", max_batch);
  {
    const std::lock_guard lock(mutex);
    PDL_CHECK(pushed - returned < static_cast<std::int64_t>(slots.size()) - 1, pushed - returned,
              " batches are outstanding already");
    Slot& slot = slots[static_cast<std::size_t>(pushed) % slots.size()];
    std::copy(ids.begin(), ids.end(), slot.ids.begin());
    const Shape one_each{count};
    slot.batch.input =
        Tensor(slot.input.get(), converts ? DType::fp64 : input_spec.dtype, batched(count, input_spec.shape));
    slot.batch.target =
        Tensor(slot.target.data(), DType::int32, holds_images ? one_each : batched(count, target_spec.shape));
    slot.batch.sample_ids = Tensor(slot.ids.data(), DType::int64, one_each);
    slot.batch.size = count;
    slot.claimed = slot.finished = 0;
    slot.failed_sample = kNoFailure;
    slot.failure = nullptr;
    ++pushed;
  }
  work_waiting.notify_all();
}

const HostBatch& DataLoader::State::next() {
  std::unique_lock lock(mutex);
  PDL_CHECK(pushed > returned, "no batch was asked for");
  Slot& slot = slots[static_cast<std::size_t>(returned) % slots.size()];
  if (threads.empty()) {
    lock.unlock();
    read_part(slot, 0, slot.batch.size, scratch.front().data());
    lock.lock();
  } else {
    batch_finished.wait(lock, [&] { return slot.done(); });
  }
  ++returned;
  if (slot.failure) std::rethrow_exception(std::exchange(slot.failure, nullptr));
  return slot.batch;
}

Slot* DataLoader::State::oldest_unclaimed() {
  for (std::int64_t batch = returned; batch < pushed; ++batch) {
    Slot& slot = slots[static_cast<std::size_t>(batch) % slots.size()];
    if (slot.claimed < slot.batch.size) return &slot;
  }
  return nullptr;
}

void DataLoader::State::work(std::size_t thread) {
  std::unique_lock lock(mutex);
  while (true) {
    Slot* slot = nullptr;
    work_waiting.wait(lock, [&] { return stopping || (slot = oldest_unclaimed()) != nullptr; });
    if (stopping) return;
    // Small enough parts that the threads finish a batch together, large enough that the lock does not show.
    const std::int64_t part = std::max<std::int64_t>(1, slot->batch.size / (4 * options.threads));
    const std::int64_t begin = slot->claimed;
    const std::int64_t end = std::min(slot->batch.size, begin + part);
    slot->claimed = end;
    lock.unlock();
    read_part(*slot, begin, end, scratch[thread].data());
    lock.lock();
    if (slot->done()) batch_finished.notify_all();
  }
}

void DataLoader::State::read_part(Slot& slot, std::int64_t begin, std::int64_t end, float* pixels) {
  std::int64_t sample = begin;
  std::exception_ptr failure;
  try {
    for (; sample < end; ++sample) {
      if (stopping) break;
      read_sample(slot, sample, pixels);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const std::lock_guard lock(mutex);
  slot.finished += end - begin;
  // Parts are claimed in order, so the earliest failure of a batch is the same however the threads are scheduled.
  if (failure && (slot.failed_sample == kNoFailure || sample < slot.failed_sample)) {
    slot.failed_sample = sample;
    slot.failure = failure;
    slot.finished += slot.batch.size - std::max(slot.claimed, end);
    slot.claimed = slot.batch.size;
  }
}

void DataLoader::State::read_sample(Slot& slot, std::int64_t sample, float* pixels) const {
  const std::int64_t id = slot.ids[static_cast<std::size_t>(sample)];
  if (id < 0 || id >= dataset.size())
    throw Error(str("sample ", id, " of a data set of ", dataset.size()), ExitCode::data);
  const std::int64_t elements = input_spec.shape.elements();
  auto* target = reinterpret_cast<std::int32_t*>(slot.target.data()) + sample * target_spec.shape.elements();
  const Tensor target_view(target, DType::int32, target_spec.shape);
  if (!converts) {
    std::byte* input = static_cast<std::byte*>(slot.input.get()) + sample * input_spec.bytes();
    dataset.read(id, Tensor(input, input_spec.dtype, input_spec.shape), target_view);
    return;
  }
  dataset.read(id, Tensor(pixels, DType::fp32, input_spec.shape), target_view);
  std::copy_n(pixels, elements, static_cast<double*>(slot.input.get()) + sample * elements);
}

DataLoader::DataLoader(const Dataset& dataset, DataLoaderOptions options, std::int64_t max_batch,
                       const HostAllocator& allocate)
    : state_(std::make_unique<State>(dataset, options, max_batch, allocate ? allocate : on_the_heap)) {
  state_->start_threads();
}

DataLoader::~DataLoader() = default;

void DataLoader::push(std::span<const std::int64_t> ids) { state_->push(ids); }
const HostBatch& DataLoader::next() { return state_->next(); }
int DataLoader::capacity() const { return static_cast<int>(state_->slots.size()) - 1; }
int DataLoader::outstanding() const { return static_cast<int>(state_->pushed - state_->returned); }
const Dataset& DataLoader::dataset() const { return state_->dataset; }

}  // namespace pdl
