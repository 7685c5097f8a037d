#include "parallel/sync/data_store.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/data/data_loader.h"

namespace pdl {
namespace {

constexpr std::int64_t kReadAtOnce = 16;  ///< samples of one request to storage

/// Which part of each step's samples a rank reads; none when there are no parts.
struct Reader {
  std::int64_t part = 0, parts = 0;
};

/// What one step moves. A record is a sample's input and behind it its target.
struct Movement {
  std::int64_t step = -1;
  std::vector<std::byte> arriving, leaving;  ///< records, by rank
  std::vector<Work> receives, sends;
  std::unordered_map<std::int64_t, const std::byte*> arrivals;  ///< where the record of a sample lies
};

}  // namespace

class DataStore::Exchange final : public SampleStaging {
 public:
  Exchange(std::unique_ptr<Dataset> from, std::unique_ptr<Communicator> group, Device& host,
           const DataStoreOptions& options);
  ~Exchange() override;

  void join(int part, int parts, int steps_ahead) override;
  void begin(const EpochPlan& plan) override;
  void begin_step(std::int64_t step) override { start(step + steps_ahead_); }
  bool at_hand(std::int64_t step) override;
  void wait(std::int64_t step) override;
  std::int64_t held_bytes() const override;

  /// The record of a sample that is kept here or at hand. Any thread.
  const std::byte* record(std::int64_t id) const;
  const Dataset& storage() const { return *storage_; }
  std::int64_t input_bytes() const { return input_bytes_; }

 private:
  using Ids = std::vector<std::int64_t>;

  int keeper(std::int64_t id) const { return static_cast<int>(id % ranks_->size()); }
  std::byte* kept(std::int64_t id) { return kept_.data() + id / ranks_->size() * record_bytes_; }
  Movement& movement(std::int64_t step) { return movements_[static_cast<std::size_t>(step) % movements_.size()]; }
  void start(std::int64_t step);
  void receive(Movement& movement, const std::vector<Ids>& from);
  void send(Movement& movement, const std::vector<Ids>& to);
  void read_from_storage(const Ids& ids);
  void settle(Movement& movement);
  void drain();

  std::unique_ptr<Dataset> storage_;
  std::unique_ptr<Communicator> ranks_;
  Device& host_;
  std::int64_t input_bytes_, record_bytes_;
  std::vector<std::byte> kept_;
  std::vector<char> is_kept_;           ///< of this rank's samples, those that were read from storage
  std::int64_t missing_ = 0;            ///< how many were not
  std::unique_ptr<DataLoader> loader_;  ///< of the storage, while samples are missing
  std::vector<Reader> readers_;         ///< of each rank
  int steps_ahead_ = 1;
  const EpochPlan* plan_ = nullptr;
  std::vector<Movement> movements_;     ///< steps take turns
  mutable std::shared_mutex arrivals_;  ///< of all movements: loader threads look while the next step is started
};

DataStore::Exchange::Exchange(std::unique_ptr<Dataset> from, std::unique_ptr<Communicator> group, Device& host,
                              const DataStoreOptions& options)
    : storage_(std::move(from)),
      ranks_(std::move(group)),
      host_(host),
      input_bytes_(storage_->input_spec().bytes()),
      record_bytes_(input_bytes_ + storage_->target_spec().bytes()) {
  const std::int64_t others = storage_->size() - ranks_->rank();  // this rank's first sample and all behind it
  missing_ = others > 0 ? (others + ranks_->size() - 1) / ranks_->size() : 0;
  kept_.resize(static_cast<std::size_t>(missing_ * record_bytes_));
  is_kept_.assign(static_cast<std::size_t>(missing_), 0);
  const DataLoaderOptions reading{.threads = options.loader_threads, .prefetch = 2, .image_dtype = DType::fp32};
  if (missing_ > 0) loader_ = std::make_unique<DataLoader>(*storage_, reading, kReadAtOnce);
  if (!options.preload) return;
  Ids all;
  for (std::int64_t id = ranks_->rank(); id < storage_->size(); id += ranks_->size()) all.push_back(id);
  read_from_storage(all);
}

DataStore::Exchange::~Exchange() {
  // After a failure the peers may be anywhere. Otherwise all ranks have started the same steps, so this ends.
  if (std::uncaught_exceptions() > 0) return;
  try {
    drain();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "warning: the data store's last messages: %s\n", error.what());
  }
}

void DataStore::Exchange::read_from_storage(const Ids& ids) {
  const std::vector<Part> pieces = split_in_pieces(static_cast<std::int64_t>(ids.size()), kReadAtOnce);
  auto ahead = pieces.begin();
  for (std::size_t done = 0; done < pieces.size(); ++done) {
    for (; ahead != pieces.end() && loader_->outstanding() < loader_->capacity(); ++ahead) {
      loader_->push(
          std::span(ids).subspan(static_cast<std::size_t>(ahead->begin), static_cast<std::size_t>(ahead->count)));
    }
    const HostBatch& batch = loader_->next();
    for (std::int64_t i = 0; i < batch.size; ++i) {
      const std::int64_t id = batch.sample_ids.data<std::int64_t>()[i];
      const Tensor input = batch.input.rows(i, 1), target = batch.target.rows(i, 1);
      std::memcpy(kept(id), input.raw(), static_cast<std::size_t>(input.bytes()));
      std::memcpy(kept(id) + input_bytes_, target.raw(), static_cast<std::size_t>(target.bytes()));
      is_kept_[static_cast<std::size_t>(id / ranks_->size())] = 1;
      --missing_;
    }
  }
  if (missing_ == 0) loader_.reset();
}

void DataStore::Exchange::join(int part, int parts, int steps_ahead) {
  PDL_CHECK(steps_ahead >= 1, steps_ahead, " steps ahead");
  drain();
  steps_ahead_ = steps_ahead;
  movements_.clear();
  movements_.resize(static_cast<std::size_t>(steps_ahead) + 1);
  const Reader mine{part, parts};
  readers_.assign(static_cast<std::size_t>(ranks_->size()), {});
  std::vector<std::int64_t> of_all(2 * readers_.size()), own = {mine.part, mine.parts};
  const Tensor all(of_all.data(), DType::int64, Shape{static_cast<std::int64_t>(of_all.size())});
  ranks_->all_gather(all, Tensor(own.data(), DType::int64, Shape{2}), host_.compute_stream())
      .wait(host_.compute_stream());
  for (std::size_t rank = 0; rank < readers_.size(); ++rank) readers_[rank] = {of_all[2 * rank], of_all[2 * rank + 1]};
}

void DataStore::Exchange::begin(const EpochPlan& plan) {
  PDL_CHECK(!movements_.empty(), "nobody has said which samples this rank reads");
  drain();
  plan_ = &plan;
  for (std::int64_t step = 0; step < steps_ahead_; ++step) start(step);
}

void DataStore::Exchange::start(std::int64_t step) {
  if (step >= plan_->steps()) return;
  const int here = ranks_->rank();
  const std::span<const std::int64_t> ids = plan_->step_ids(step);
  std::vector<Ids> from(readers_.size()), to(readers_.size());
  Ids unread;
  for (std::size_t rank = 0; rank < readers_.size(); ++rank) {
    const Reader& reader = readers_[rank];
    if (reader.parts == 0) continue;
    const Part part = split_evenly(static_cast<std::int64_t>(ids.size()), reader.parts, reader.part);
    for (const std::int64_t id :
         ids.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.count))) {
      const int keeps = keeper(id);
      if (keeps != here) {
        if (static_cast<int>(rank) == here) from[static_cast<std::size_t>(keeps)].push_back(id);
        continue;
      }
      if (static_cast<int>(rank) != here) to[rank].push_back(id);
      char& is_kept = is_kept_[static_cast<std::size_t>(id / ranks_->size())];
      if (is_kept == 0) unread.push_back(id);
      is_kept = 1;
    }
  }
  Movement& moved = movement(step);
  settle(moved);
  moved.step = step;
  receive(moved, from);
  read_from_storage(unread);
  send(moved, to);
}

void DataStore::Exchange::receive(Movement& moved, const std::vector<Ids>& from) {
  std::int64_t records = 0;
  for (const Ids& ids : from) records += static_cast<std::int64_t>(ids.size());
  const std::unique_lock lock(arrivals_);
  moved.arrivals.clear();
  moved.arriving.resize(static_cast<std::size_t>(records * record_bytes_));
  std::byte* record = moved.arriving.data();
  for (std::size_t rank = 0; rank < from.size(); ++rank) {
    if (from[rank].empty()) continue;
    const Tensor message(record, DType::uint8, Shape{static_cast<std::int64_t>(from[rank].size()) * record_bytes_});
    moved.receives.push_back(ranks_->recv(message, static_cast<int>(rank), 0, host_.compute_stream()));
    for (const std::int64_t id : from[rank]) {
      moved.arrivals[id] = record;
      record += record_bytes_;
    }
  }
}

void DataStore::Exchange::send(Movement& moved, const std::vector<Ids>& to) {
  std::int64_t records = 0;
  for (const Ids& ids : to) records += static_cast<std::int64_t>(ids.size());
  moved.leaving.resize(static_cast<std::size_t>(records * record_bytes_));
  std::byte* record = moved.leaving.data();
  for (std::size_t rank = 0; rank < to.size(); ++rank) {
    if (to[rank].empty()) continue;
    const Tensor message(record, DType::uint8, Shape{static_cast<std::int64_t>(to[rank].size()) * record_bytes_});
    for (const std::int64_t id : to[rank]) {
      std::memcpy(record, kept(id), static_cast<std::size_t>(record_bytes_));
      record += record_bytes_;
    }
    moved.sends.push_back(ranks_->send(message, static_cast<int>(rank), 0, host_.compute_stream()));
  }
}

bool DataStore::Exchange::at_hand(std::int64_t step) {
  Movement& moved = movement(step);
  if (moved.step != step) return false;
  std::erase_if(moved.receives, [](Work& work) { return work.done(); });
  return moved.receives.empty();
}

void DataStore::Exchange::wait(std::int64_t step) {
  Movement& moved = movement(step);
  PDL_CHECK(moved.step == step, "the samples of step ", step, " are not on their way");
  for (Work& work : moved.receives) work.wait(host_.compute_stream());
  moved.receives.clear();
}

/// Waits for the messages of a step.
void DataStore::Exchange::settle(Movement& moved) {
  for (Work& work : moved.receives) work.wait(host_.compute_stream());
  for (Work& work : moved.sends) work.wait(host_.compute_stream());
  moved.receives.clear();
  moved.sends.clear();
}

void DataStore::Exchange::drain() {
  for (Movement& moved : movements_) {
    settle(moved);
    moved.step = -1;
    const std::unique_lock lock(arrivals_);
    moved.arrivals.clear();
  }
}

std::int64_t DataStore::Exchange::held_bytes() const {
  std::size_t bytes = kept_.size();
  for (const Movement& moved : movements_) bytes += moved.arriving.capacity() + moved.leaving.capacity();
  return static_cast<std::int64_t>(bytes);
}

const std::byte* DataStore::Exchange::record(std::int64_t id) const {
  if (keeper(id) == ranks_->rank()) {
    const std::int64_t place = id / ranks_->size();
    if (is_kept_[static_cast<std::size_t>(place)] != 0) return kept_.data() + place * record_bytes_;
  }
  const std::shared_lock lock(arrivals_);
  for (const Movement& moved : movements_) {
    const auto found = moved.arrivals.find(id);
    if (found != moved.arrivals.end()) return found->second;
  }
  throw Error(str("sample ", id, " was not brought to rank ", ranks_->rank(), ": nobody said that it would be read"));
}

DataStore::DataStore(std::unique_ptr<Dataset> storage, std::unique_ptr<Communicator> ranks, Device& host,
                     const DataStoreOptions& options)
    : exchange_(std::make_unique<Exchange>(std::move(storage), std::move(ranks), host, options)) {}

DataStore::~DataStore() = default;

DatasetInfo DataStore::info() const { return exchange_->storage().info(); }
std::int64_t DataStore::size() const { return exchange_->storage().size(); }
TensorSpec DataStore::input_spec() const { return exchange_->storage().input_spec(); }
TensorSpec DataStore::target_spec() const { return exchange_->storage().target_spec(); }
SampleStaging* DataStore::staging() const { return exchange_.get(); }

void DataStore::read(std::int64_t id, Tensor input, Tensor target) const {
  const std::byte* const record = exchange_->record(id);
  std::memcpy(input.raw(), record, static_cast<std::size_t>(input.bytes()));
  std::memcpy(target.raw(), record + exchange_->input_bytes(), static_cast<std::size_t>(target.bytes()));
}

}  // namespace pdl
