#include "parallel/pipeline/tied_exchange.h"

#include <algorithm>

#include "parallel/comm/world.h"

namespace pdl {
namespace {

constexpr int kTags = 1 << 14;

}  // namespace

TiedExchange::TiedExchange(const EngineContext& context, const PipelinePlan& plan, StagePart& part, int rank, int delay)
    : context_(context), plan_(plan), part_(part), rank_(rank), delay_(delay) {
  PDL_CHECK(plan.tied().size() <= 1, plan.tied().size(), " parameters are shared by two stages; this knows one");
  if (plan.tied().empty()) return;
  const TiedPair& tied = plan.tied()[0];
  owner_stage_ = plan.stage_of(tied.rank);
  copy_stage_ = plan.stage_of(tied.copy_rank);
  owns_ = plan.stage_of(rank) == owner_stage_;
  copies_ = plan.stage_of(rank) == copy_stage_;
  for (std::size_t i = 0; i < part.store.params().size(); ++i) {
    const std::string& name = part.store.params()[i].spec.name;
    if ((owns_ && name == tied.name) || (copies_ && name == tied.copy_name)) index_ = static_cast<int>(i);
  }
  PDL_CHECK(index_ >= 0 || (!owns_ && !copies_), tied.name, " is not in its stage");
}

int TiedExchange::replica() const { return rank_ - plan_.first_rank_of(plan_.stage_of(rank_)); }

/// Each replica of the last stage gets its totals from one of the first.
std::vector<int> TiedExchange::total_peers() const {
  const int owners = plan_.replicas_of(owner_stage_), copies = plan_.replicas_of(copy_stage_);
  if (copies_) return {plan_.first_rank_of(owner_stage_) + replica() % owners};
  std::vector<int> peers;
  for (int copy = replica(); owns_ && copy < copies; copy += owners) {
    peers.push_back(plan_.first_rank_of(copy_stage_) + copy);
  }
  return peers;
}

std::int64_t TiedExchange::bytes() const {
  return part_.store.params()[static_cast<std::size_t>(index_)].count * size_of(wide_dtype(context_.training.dtype));
}

/// Messages that may have to wait at the receiver, and one that is on its way.
int TiedExchange::pending() const {
  const int owners = plan_.replicas_of(owner_stage_), copies = plan_.replicas_of(copy_stage_);
  return delay_ + 2 + (copies_ ? (copies - 1) / owners : 0);
}

void TiedExchange::prepare() {
  if (plan_.tied().empty()) return;
  gradients_ = context_.world.split(0, rank_, "tied");
  totals_ = context_.world.split(0, rank_, "tied");
  if (!owns_ && !copies_) return;
  inbox_.allocate(context_.device, {{pending(), bytes()}}, MemoryKind::communication,
                  static_cast<std::size_t>(pending()));
  const int sent_at_a_time = owns_ ? static_cast<int>(total_peers().size()) : 1;
  outbox_.allocate(context_.device, 2 * sent_at_a_time, bytes());
}

MemoryByKind TiedExchange::predicted_memory() const {
  MemoryByKind memory;
  if (plan_.tied().empty()) return memory;
  if (context_.training.deterministic) {
    memory[MemoryKind::communication] += 2 * deterministic_scratch_bytes(context_.world.size());
  }
  if (!owns_ && !copies_) return memory;
  const int sent_at_a_time = owns_ ? static_cast<int>(total_peers().size()) : 1;
  memory[MemoryKind::communication] += (pending() + 2 * sent_at_a_time) * bytes();
  return memory;
}

CommCounts TiedExchange::predicted_traffic() const {
  CommCounts counts;
  if (!owns_ && !copies_) return counts;
  const auto sends = owns_ ? static_cast<std::int64_t>(total_peers().size()) : 1;
  if (sends > 0) counts["tied.send"] = {.calls = sends, .bytes = sends * bytes()};
  counts["tied.recv"].calls = 1;
  return counts;
}

void TiedExchange::begin(int rounds) {
  if (!owns_ && !copies_) return;
  const int owners = plan_.replicas_of(owner_stage_), copies = plan_.replicas_of(copy_stage_);
  const Tensor like = gradient();
  const TensorSpec spec{like.dtype(), like.shape()};
  std::vector<Expected> messages;
  for (int round = 0; round < rounds; ++round) {
    const int unit = round * owners + replica();  // owner: the micro-batch of which it gets the gradient
    const int peer = owns_ ? plan_.first_rank_of(copy_stage_) + unit % copies : total_peers()[0];
    messages.push_back({peer, round % kTags, 0, spec});
  }
  inbox_.expect(std::move(messages));
  inbox_.post(owns_ ? *gradients_ : *totals_, context_.device.compute_stream());
}

void TiedExchange::limit(int rounds) {
  if (owns_ || copies_) inbox_.expect_only(static_cast<std::size_t>(rounds));
}

void TiedExchange::send_gradient(int round) {
  const int owners = plan_.replicas_of(owner_stage_);
  const int unit = round * plan_.replicas_of(copy_stage_) + replica();
  outbox_.send(gradient(), plan_.first_rank_of(owner_stage_) + unit % owners, unit / owners % kTags, *gradients_,
               context_.backend, context_.device.compute_stream());
}

void TiedExchange::take_total() {
  Stream& stream = context_.device.compute_stream();
  const Tensor total = inbox_.take(*totals_, stream);
  context_.backend.copy(gradient(), total);
  inbox_.release(total);
}

void TiedExchange::add_gradient() {
  const Tensor of_copy = inbox_.take(*gradients_, context_.device.compute_stream());
  context_.backend.add(gradient(), of_copy, 1.0);
  inbox_.release(of_copy);
}

void TiedExchange::send_total(int round) {
  for (const int peer : total_peers()) {
    outbox_.send(gradient(), peer, round % kTags, *totals_, context_.backend, context_.device.compute_stream());
  }
}

void TiedExchange::progress() {
  if (!owns_ && !copies_) return;
  inbox_.post(owns_ ? *gradients_ : *totals_, context_.device.compute_stream());
  gradients_->progress();
  totals_->progress();
}

void TiedExchange::drain() {
  if (owns_ || copies_) outbox_.drain(context_.device.compute_stream());
}

}  // namespace pdl
