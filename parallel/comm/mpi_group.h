#pragma once
// A group of ranks with its MPI communicator and its place on the board, and one operation in it.

#include <mpi.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/gpu_wait.h"
#include "parallel/comm/mpi_call.h"
#include "parallel/comm/mpi_wait.h"
#include "parallel/comm/rank_board.h"

namespace pdl {

/// What all groups of one process share. `open` ends with the World: afterwards neither MPI nor the boards may be
/// touched.
struct MpiContext {
  explicit MpiContext(HostBoard host_board) : board(std::move(host_board)), waiter(board), gpu(board, waiter) {}
  MpiContext(const MpiContext&) = delete;
  MpiContext& operator=(const MpiContext&) = delete;

  HostBoard board;
  MpiWaiter waiter;
  GpuWaiter gpu;
  bool open = true;
};

class MpiGroup {
 public:
  /// Takes over `comm`, which no other group uses. Collective over its ranks. `label` completes "operation 17 of ...".
  MpiGroup(std::shared_ptr<MpiContext> context, MPI_Comm comm, std::string label, double timeout_s);
  ~MpiGroup();
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  MpiContext& context() const { return *context_; }
  const std::shared_ptr<MpiContext>& shared_context() const { return context_; }
  MPI_Comm comm() const { return comm_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& label() const { return label_; }
  const GroupBoard& board() const { return board_; }
  double timeout_s() const { return timeout_s_; }
  void set_timeout(double seconds) { timeout_s_ = seconds; }

  /// Announces a collective before it is posted and returns its sequence number. Throws Error(communication) when a
  /// peer has already announced another one as its operation of that number: so two that differ are never both posted
  /// on one host.
  std::int64_t publish(const CallRecord& record, Executor executor = Executor::host);
  /// This rank's GPU has come to a collective that was published for it.
  void reach(std::int64_t sequence) { board_.reach(sequence); }
  /// Throws Error(communication) when a peer's operation of that number differs.
  void check(std::int64_t sequence) const;

  /// An operation in words, "all_reduce of 64 fp32 (operation 17 of axis dp)". A message has sequence number 0.
  std::string describe(const CallRecord& record, std::int64_t sequence) const;
  /// Who keeps this rank waiting in it, after `waited_s` seconds.
  std::string describe_late(const CallRecord& record, std::int64_t sequence, double waited_s) const;

  /// A communicator over the same ranks, made without blocking.
  MPI_Comm duplicate();
  /// The group of the ranks with this rank's color, ordered by key. Collective; `label` as for the constructor.
  std::unique_ptr<MpiGroup> split(int color, int key, std::string label);

  /// Operations that have not come to their end; with any left, the communicator cannot be freed.
  int unfinished = 0;

 private:
  std::shared_ptr<MpiContext> context_;
  MPI_Comm comm_;
  std::string label_;
  double timeout_s_;
  int rank_ = 0, size_ = 1;
  GroupBoard board_;
};

/// An operation of a group: a collective, which has a sequence number, or a message (sequence 0, the peer is the
/// record's root).
class MpiOperation : public Work::State, public MpiWaitable {
 public:
  MpiOperation(MpiGroup& group, CallRecord record, std::int64_t sequence);
  ~MpiOperation() override;
  MpiOperation(const MpiOperation&) = delete;
  MpiOperation& operator=(const MpiOperation&) = delete;

  void wait(Stream&) override { wait(); }
  void wait();
  bool done() override;

  bool test() final;
  void check_peers() final;
  std::string describe() const final { return group_.describe(record_, sequence_); }
  std::string describe_late(double waited_s) const final { return group_.describe_late(record_, sequence_, waited_s); }

 protected:
  /// True once all messages are through; never waits.
  virtual bool poll() = 0;
  /// What is left to do on this rank once the data has come.
  virtual void finish() {}
  MpiGroup& group() { return group_; }
  const CallRecord& record() const { return record_; }

 private:
  MpiGroup& group_;
  CallRecord record_;
  std::int64_t sequence_;
  bool over_ = false, waited_ = false;
};

/// An operation that is some MPI requests and perhaps a copy at the end.
class MpiRequestOperation final : public MpiOperation {
 public:
  using MpiOperation::MpiOperation;
  MpiRequests& requests() { return requests_; }
  void at_end(std::function<void()> action) { at_end_ = std::move(action); }

 protected:
  bool poll() override;
  void finish() override {
    if (at_end_) at_end_();
  }

 private:
  MpiRequests requests_;
  std::function<void()> at_end_;
};

}  // namespace pdl
