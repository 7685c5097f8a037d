#include "parallel/comm/mpi_group.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

namespace pdl {

MpiGroup::MpiGroup(std::shared_ptr<MpiContext> context, MPI_Comm comm, std::string label, double timeout_s)
    : context_(std::move(context)),
      comm_(comm),
      label_(std::move(label)),
      timeout_s_(timeout_s),
      board_(context_->board) {
  PDL_MPI(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  PDL_MPI(MPI_Comm_rank(comm_, &rank_));
  PDL_MPI(MPI_Comm_size(comm_, &size_));
  std::vector<BoardMember> members(static_cast<std::size_t>(size_));
  const BoardMember mine = board_.mine();
  MpiRequestOperation exchange(*this, {.call = CommCall::setup}, 0);
  PDL_MPI(MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, members.data(), sizeof mine, MPI_BYTE, comm_,
                         exchange.requests().add()));
  exchange.wait();
  board_.set_members(std::move(members));
}

MpiGroup::~MpiGroup() {
  // MPI_Comm_free is collective on paper and local in the libraries we know. After a failure the peers may be anywhere.
  if (context_->open && unfinished == 0 && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
}

std::int64_t MpiGroup::publish(const CallRecord& record, Executor executor) {
  const std::int64_t sequence = board_.publish(record, executor);
  check(sequence);
  return sequence;
}

void MpiGroup::check(std::int64_t sequence) const {
  const std::string difference = board_.difference(sequence, label_);
  if (!difference.empty()) throw Error(difference, ExitCode::communication);
}

std::string MpiGroup::describe(const CallRecord& record, std::int64_t sequence) const {
  std::string place = sequence > 0 ? str("operation ", sequence, " of ", label_) : label_;
  if (record.tag >= 0) place = str("tag ", record.tag, ", ", place);
  return str(board_.describe(record), " (", place, ")");
}

std::string MpiGroup::describe_late(const CallRecord& record, std::int64_t sequence, double waited_s) const {
  if (board_.members().empty()) return "the group is still being set up";
  // A rank that is merely busy with something else will usually have been heard from in half of the wait.
  if (sequence > 0) return board_.late_members(sequence, std::max(1.0, 0.5 * waited_s));
  return str("rank ", board_.members()[static_cast<std::size_t>(record.root)].world_rank, " has not ",
             record.call == CommCall::recv ? "sent" : "received", " it (", board_.describe_member(record.root), ")");
}

MPI_Comm MpiGroup::duplicate() {
  MPI_Comm copy = MPI_COMM_NULL;
  MpiRequestOperation operation(*this, {.call = CommCall::setup}, publish({.call = CommCall::setup}));
  PDL_MPI(MPI_Comm_idup(comm_, &copy, operation.requests().add()));
  operation.wait();
  return copy;
}

std::unique_ptr<MpiGroup> MpiGroup::split(int color, int key, std::string label) {
  struct Wish {
    int color = 0, key = 0;
  };
  const Wish mine{color, key};
  std::vector<Wish> wishes(static_cast<std::size_t>(size_));
  const CallRecord record{.call = CommCall::split};
  MpiRequestOperation exchange(*this, record, publish(record));
  PDL_MPI(MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, wishes.data(), sizeof mine, MPI_BYTE, comm_,
                         exchange.requests().add()));
  exchange.wait();
  const bool is_copy =
      std::all_of(wishes.begin(), wishes.end(), [&](const Wish& wish) { return wish.color == color; }) &&
      std::is_sorted(wishes.begin(), wishes.end(), [](const Wish& a, const Wish& b) { return a.key < b.key; });
  MPI_Comm part = MPI_COMM_NULL;
  if (is_copy) {
    part = duplicate();
  } else {
    // It has no non-blocking form, so ranks that share cores wait for each other at full load. The exchange before it
    // has the deadline: all ranks are known to come.
    PDL_MPI(MPI_Comm_split(comm_, color, key, &part));
  }
  return std::make_unique<MpiGroup>(context_, part, std::move(label), timeout_s_);
}

MpiOperation::MpiOperation(MpiGroup& group, CallRecord record, std::int64_t sequence)
    : group_(group), record_(record), sequence_(sequence) {
  ++group_.unfinished;
}

MpiOperation::~MpiOperation() {
#ifndef NDEBUG
  if (!over_ && !waited_ && std::uncaught_exceptions() == 0)
    std::fprintf(stderr, "bug: nobody waited for %s\n", describe().c_str());
#endif
}

void MpiOperation::wait() {
  waited_ = true;
  group_.context().waiter.wait(*this, group_.timeout_s());
}

bool MpiOperation::done() {
  if (over_) return true;
  group_.context().waiter.advance();
  return test();
}

bool MpiOperation::test() {
  if (over_) return true;
  if (!poll()) return false;
  check_peers();  // before anybody uses the data
  finish();
  over_ = true;
  --group_.unfinished;
  return true;
}

void MpiOperation::check_peers() {
  if (sequence_ > 0) group_.check(sequence_);
}

bool MpiRequestOperation::poll() {
  std::string problem;
  if (!requests_.test(mpi_type(record().dtype), problem)) return false;
  if (problem.empty()) return true;
  check_peers();  // a call that differs explains more than MPI can
  throw Error(str(describe(), ": ", problem), ExitCode::communication);
}

}  // namespace pdl
