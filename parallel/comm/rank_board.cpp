#include "parallel/comm/rank_board.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

namespace pdl {
namespace {

constexpr std::array<const char*, 13> kCallNames = {
    "all_reduce", "all_gather", "reduce_scatter", "reduce",        "broadcast",           "all_to_all", "send",
    "recv",       "split",      "barrier",        "text exchange", "exchange of numbers", "set-up"};

/// The clock that all processes of a host share.
std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::uint64_t pack(const CallRecord& record) {
  return static_cast<std::uint64_t>(record.call) | static_cast<std::uint64_t>(record.dtype) << 8 |
         static_cast<std::uint64_t>(record.op) << 16 | static_cast<std::uint64_t>(record.root + 1) << 32;
}

CallRecord unpack(std::uint64_t call, std::int64_t count) {
  return {.call = static_cast<CommCall>(call & 0xff),
          .dtype = static_cast<DType>(call >> 8 & 0xff),
          .op = static_cast<ReduceOp>(call >> 16 & 0xff),
          .root = static_cast<int>(call >> 32) - 1,
          .count = count};
}

/// One more word in a running hash (the finaliser of splitmix64).
std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
  hash += word + 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebu;
  return hash ^ hash >> 31;
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

}  // namespace

std::string describe(const CallRecord& record) {
  std::string text = kCallNames[static_cast<std::size_t>(record.call)];
  if (record.op != ReduceOp::sum) text += record.op == ReduceOp::max ? " (max)" : " (min)";
  const bool has_no_data = record.call >= CommCall::split;
  if (record.call == CommCall::all_to_all) {
    text += str(" of ", name_of(record.dtype));
  } else if (!has_no_data) {
    text += str(" of ", record.count, " ", name_of(record.dtype));
  }
  if (record.root >= 0)
    text += str(record.call == CommCall::reduce || record.call == CommCall::send ? " to rank " : " from rank ",
                record.root);
  return text;
}

void BoardText::write(std::string_view text) {
  text = text.substr(0, kBytes);
  std::array<std::uint64_t, kBytes / 8> words{};
  std::memcpy(words.data(), text.data(), text.size());
  version_.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < words.size(); ++i) words_[i].store(words[i], std::memory_order_relaxed);
  version_.fetch_add(1);
}

std::string BoardText::read() const {
  std::array<std::uint64_t, kBytes / 8> words{};
  // A writer that was stopped in the middle must not hold the reader up: after a few tries a torn text has to do.
  for (int attempt = 0; attempt < 8; ++attempt) {
    const std::uint64_t before = version_.load();
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 == 0 && version_.load() == before) break;
  }
  std::array<char, kBytes + 1> text{};
  std::memcpy(text.data(), words.data(), kBytes);
  return text.data();
}

void CallRing::reset() {
  generation_.fetch_add(1);
  last_.store(0);
  reached_.store(0);
  for (Slot& slot : slots_) {
    slot.sequence.store(0);
    slot.history.store(0);
  }
}

std::int64_t CallRing::publish(const CallRecord& record, Executor executor) {
  const std::int64_t sequence = last_.load(std::memory_order_relaxed) + 1;
  const std::uint64_t call = pack(record);
  const Slot& previous = slots_[static_cast<std::size_t>((sequence - 1) % kEntries)];
  const std::uint64_t history = mix(mix(previous.history.load(), call), static_cast<std::uint64_t>(record.count));
  Slot& slot = slots_[static_cast<std::size_t>(sequence % kEntries)];
  slot.sequence.store(0);
  std::atomic_thread_fence(std::memory_order_release);
  slot.count.store(record.count, std::memory_order_relaxed);
  slot.call.store(call, std::memory_order_relaxed);
  slot.history.store(history, std::memory_order_relaxed);
  // Sequentially consistent: of two ranks that publish at once, at least one sees the other's call.
  slot.sequence.store(sequence);
  if (executor == Executor::host) reach(sequence);
  last_.store(sequence);
  return sequence;
}

bool CallRing::find(std::int64_t sequence, Entry& entry) const {
  const Slot& slot = slots_[static_cast<std::size_t>(sequence % kEntries)];
  if (sequence <= 0 || slot.sequence.load() != sequence) return false;
  entry.record = unpack(slot.call.load(std::memory_order_relaxed), slot.count.load(std::memory_order_relaxed));
  entry.history = slot.history.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return slot.sequence.load() == sequence;
}

HostBoard::HostBoard(std::vector<RankBoard*> boards, std::vector<int> world_ranks, int mine)
    : boards_(std::move(boards)), world_ranks_(std::move(world_ranks)), mine_(mine) {
  heartbeat();
}

const RankBoard* HostBoard::find(int world_rank) const {
  const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), world_rank);
  return found == world_ranks_.end() ? nullptr : boards_[static_cast<std::size_t>(found - world_ranks_.begin())];
}

void HostBoard::heartbeat() { mine().heartbeat_ns.store(now_ns(), std::memory_order_relaxed); }

int HostBoard::open_ring() {
  // In turn, so that a ring stays readable for as long as possible after its communicator is gone.
  for (int i = 0; i < RankBoard::kRings; ++i) {
    const int ring = std::exchange(next_ring_, (next_ring_ + 1) % RankBoard::kRings);
    if (ring_used_[static_cast<std::size_t>(ring)]) continue;
    ring_used_[static_cast<std::size_t>(ring)] = true;
    mine().rings[static_cast<std::size_t>(ring)].reset();
    return ring;
  }
  throw Error(str("more than ", RankBoard::kRings, " communicators at a time"));
}

bool HostBoard::claim_failure(ExitCode code, const std::string& message) {
  if (first_failure().rank == world_rank()) return true;
  mine().failure.write(message);
  std::int64_t nobody = 0;
  return boards_.front()->first_failure.compare_exchange_strong(nobody,
                                                                (world_rank() + 1) * 256 + static_cast<int>(code));
}

FirstFailure HostBoard::first_failure() const {
  const std::int64_t word = boards_.front()->first_failure.load();
  if (word == 0) return {};
  FirstFailure failure{
      .rank = static_cast<int>(word / 256) - 1, .code = static_cast<ExitCode>(word % 256), .message = ""};
  if (const RankBoard* board = find(failure.rank)) failure.message = board->failure.read();
  return failure;
}

GroupBoard::GroupBoard(HostBoard& host) : host_(host), ring_(host.open_ring()) {}

BoardMember GroupBoard::mine() {
  const std::uint64_t generation = host_.mine().rings[static_cast<std::size_t>(ring_)].generation();
  return {.world_rank = host_.world_rank(), .ring = ring_, .generation = generation};
}

std::int64_t GroupBoard::publish(const CallRecord& record, Executor executor) {
  host_.heartbeat();
  return host_.mine().rings[static_cast<std::size_t>(ring_)].publish(record, executor);
}

void GroupBoard::reach(std::int64_t sequence) { host_.mine().rings[static_cast<std::size_t>(ring_)].reach(sequence); }

std::string GroupBoard::describe(CallRecord record) const {
  if (record.root >= 0 && record.root < static_cast<int>(members_.size())) {
    record.root = static_cast<int>(members_[static_cast<std::size_t>(record.root)].world_rank);
  }
  return pdl::describe(record);
}

const CallRing* GroupBoard::ring_of(const BoardMember& member) const {
  const RankBoard* board = host_.find(static_cast<int>(member.world_rank));
  if (board == nullptr) return nullptr;
  const CallRing& ring = board->rings[static_cast<std::size_t>(member.ring)];
  return ring.generation() == member.generation ? &ring : nullptr;
}

std::string GroupBoard::difference(std::int64_t sequence, const std::string& label) const {
  const CallRing& own_ring = host_.mine().rings[static_cast<std::size_t>(ring_)];
  CallRing::Entry own, other;
  for (const BoardMember& member : members_) {
    const CallRing* ring = member.world_rank == host_.world_rank() ? nullptr : ring_of(member);
    if (ring == nullptr) continue;
    const std::int64_t last = std::min(sequence, ring->last());
    if (!own_ring.find(last, own) || !ring->find(last, other)) continue;
    if (own.record == other.record && own.history == other.history) continue;
    const bool first = host_.world_rank() < member.world_rank;
    const auto low = first ? host_.world_rank() : member.world_rank,
               high = first ? member.world_rank : host_.world_rank();
    if (own.record == other.record) {
      return str("rank ", low, " and rank ", high, " agree on ", describe(own.record), " (operation ", last, " of ",
                 label, ") but called different operations before it");
    }
    return str("rank ", low, " called ", describe(first ? own.record : other.record), " (operation ", last, " of ",
               label, ") while rank ", high, " called ", describe(first ? other.record : own.record));
  }
  return "";
}

std::string GroupBoard::late_members(std::int64_t sequence, double silent_s) const {
  std::string text;
  int unseen = 0;
  for (std::size_t member = 0; member < members_.size(); ++member) {
    const RankBoard* board = host_.find(static_cast<int>(members_[member].world_rank));
    if (members_[member].world_rank == host_.world_rank()) continue;
    if (board == nullptr) {
      ++unseen;
      continue;
    }
    const CallRing* ring = ring_of(members_[member]);
    const double mute_s = 1e-9 * static_cast<double>(now_ns() - board->heartbeat_ns.load());
    std::string state;
    if (ring == nullptr) {
      state = "has left this group";
    } else if (ring->last() < sequence) {
      state = "has not arrived";
    } else if (mute_s > silent_s) {
      state = str("has arrived but has been silent for ", seconds(mute_s));
    } else if (ring->reached() < sequence) {
      state = "has queued it, but its GPU has not been seen in it";
    } else {
      continue;
    }
    text += str(text.empty() ? "" : "; ", "rank ", members_[member].world_rank, " ", state, " (",
                describe_member(static_cast<int>(member)), ")");
  }
  if (text.empty()) text = "all ranks of this host have arrived";
  if (unseen > 0) text += str("; ranks on other hosts, which cannot be seen from here: ", unseen);
  return text;
}

std::string GroupBoard::describe_member(int member) const {
  const BoardMember& place = members_[static_cast<std::size_t>(member)];
  const RankBoard* board = host_.find(static_cast<int>(place.world_rank));
  if (board == nullptr) return "on another host";
  const CallRing* ring = ring_of(place);
  const std::int64_t last = ring == nullptr ? 0 : ring->last();
  CallRing::Entry entry;
  std::string text = last == 0 ? "no operation yet" : str("its last operation is ", last);
  if (last > 0 && ring->find(last, entry)) text += str(", ", describe(entry.record));
  if (const std::string waiting = board->waiting.read(); !waiting.empty()) text += str("; it waits for ", waiting);
  if (const std::string phase = board->phase.read(); !phase.empty()) text += str("; it announced \"", phase, "\"");
  return text;
}

}  // namespace pdl
