#pragma once
// What each rank of a host lets the others see without talking to them: memory that all of them map.
//
// A rank that waits in vain cannot ask its peers why, so every rank writes down what it is about to do before it does
// it. For each communicator that is a ring of its last operations; beside it stand the phase it announced, what it
// waits for at the moment, a heartbeat, and the first failure of the host. Each word is written by one rank only, the
// failure word apart, and read by any. Only ranks of one host share a board: for ranks elsewhere there is just the
// deadline.

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/error.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/world.h"

namespace pdl {

enum class CommCall : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  reduce,
  broadcast,
  all_to_all,
  send,
  recv,
  split,
  barrier,
  text,
  numbers,
  setup
};

/// One call on a communicator. The ranks' records of one collective must be equal in all but the tag.
struct CallRecord {
  CommCall call = CommCall::barrier;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  int root = -1;           ///< or the peer of send and recv; -1: none
  std::int64_t count = 0;  ///< elements, 0 where ranks may differ
  int tag = -1;            ///< of send and recv, not compared
  bool operator==(const CallRecord&) const = default;
};

/// Who carries out a call. The host is in an operation from when it announces it; what it queues on a GPU begins later.
enum class Executor { host, gpu };

/// "all_reduce (max) of 64 fp32", "broadcast of 32 fp32 from rank 0".
std::string describe(const CallRecord& record);

/// Text that one rank writes and others read; a reader never blocks and may see an old text.
class BoardText {
 public:
  static constexpr std::size_t kBytes = 192;
  void write(std::string_view text);  ///< cut at kBytes
  std::string read() const;

 private:
  std::atomic<std::uint64_t> version_{0};  ///< odd while a write is going on
  std::array<std::atomic<std::uint64_t>, kBytes / 8> words_{};
};

/// The last calls of one rank on one communicator. Sequence numbers start at 1.
class CallRing {
 public:
  static constexpr std::int64_t kEntries = 64;

  void reset();
  /// Returns the sequence number of this call.
  std::int64_t publish(const CallRecord& record, Executor executor);
  std::int64_t last() const { return last_.load(); }
  /// This rank has come to this call: on its GPU, as its host has seen, if that carries the call out.
  void reach(std::int64_t sequence) {
    if (sequence > reached_.load(std::memory_order_relaxed)) reached_.store(sequence);
  }
  std::int64_t reached() const { return reached_.load(); }
  std::uint64_t generation() const { return generation_.load(); }

  /// What is known about one call: `history` stands for all calls up to and including it.
  struct Entry {
    CallRecord record;
    std::uint64_t history = 0;
  };
  /// False when the call is not there yet or no longer.
  bool find(std::int64_t sequence, Entry& entry) const;

 private:
  struct Slot {
    std::atomic<std::int64_t> sequence{0};  ///< 0 while it is being written
    std::atomic<std::int64_t> count{0};
    std::atomic<std::uint64_t> call{0}, history{0};
  };
  std::atomic<std::uint64_t> generation_{0};  ///< counts the communicators that used this ring
  std::atomic<std::int64_t> last_{0}, reached_{0};
  std::array<Slot, kEntries> slots_;
};

/// Everything of one rank.
struct RankBoard {
  static constexpr int kRings = 32;  ///< communicators that a rank may hold at a time
  std::atomic<std::int64_t> heartbeat_ns{0};
  std::atomic<std::int64_t> first_failure{0};  ///< used on the host's first rank: 0, or (rank + 1) * 256 + exit code
  BoardText phase, waiting, failure;
  std::array<CallRing, kRings> rings;
};

/// This process's view of the boards of all ranks of its host.
class HostBoard {
 public:
  /// Boards in the order of local ranks, with their world ranks; `mine` is the own local rank.
  HostBoard(std::vector<RankBoard*> boards, std::vector<int> world_ranks, int mine);

  RankBoard& mine() { return *boards_[static_cast<std::size_t>(mine_)]; }
  int ranks() const { return static_cast<int>(boards_.size()); }  ///< of this host
  int world_rank() const { return world_ranks_[static_cast<std::size_t>(mine_)]; }
  /// nullptr for a rank of another host.
  const RankBoard* find(int world_rank) const;

  void heartbeat();
  /// A free ring of this rank, emptied. Throws Error when a rank holds too many communicators.
  int open_ring();
  void close_ring(int ring) { ring_used_[static_cast<std::size_t>(ring)] = false; }

  /// True for the one rank of this host that was first, each time that it asks; what it said first stands.
  bool claim_failure(ExitCode code, const std::string& message);
  /// rank -1 when nobody has failed.
  FirstFailure first_failure() const;

 private:
  std::vector<RankBoard*> boards_;
  std::vector<int> world_ranks_;
  int mine_;
  int next_ring_ = 0;
  std::array<bool, RankBoard::kRings> ring_used_{};
};

/// Where a member of a group writes down its calls.
struct BoardMember {
  std::int64_t world_rank = 0;
  std::int64_t ring = 0;
  std::uint64_t generation = 0;
};

/// The members of one communicator, as seen on the boards.
class GroupBoard {
 public:
  explicit GroupBoard(HostBoard& host);
  ~GroupBoard() { host_.close_ring(ring_); }
  GroupBoard(const GroupBoard&) = delete;
  GroupBoard& operator=(const GroupBoard&) = delete;

  BoardMember mine();
  /// All members in the order of their ranks in the group.
  void set_members(std::vector<BoardMember> members) { members_ = std::move(members); }
  const std::vector<BoardMember>& members() const { return members_; }

  std::int64_t publish(const CallRecord& record, Executor executor = Executor::host);
  /// This rank's GPU has come to the operation.
  void reach(std::int64_t sequence);
  /// Compares operation `sequence` with the peers', or with a peer that has not come so far its last one:
  /// "rank 0 called ... (operation 17 of axis dp) while rank 1 called ...", empty when all that is known agrees.
  std::string difference(std::int64_t sequence, const std::string& label) const;
  /// Who keeps the group waiting in operation `sequence`, in words; `silent_s` is how long a rank must have been mute
  /// to count.
  std::string late_members(std::int64_t sequence, double silent_s) const;
  /// The record in words, with world ranks.
  std::string describe(CallRecord record) const;
  /// What is known about one member: its last operation, what it waits for, its phase.
  std::string describe_member(int member) const;

 private:
  const CallRing* ring_of(const BoardMember& member) const;  ///< nullptr when it cannot be seen

  HostBoard& host_;
  int ring_;
  std::vector<BoardMember> members_;
};

}  // namespace pdl
