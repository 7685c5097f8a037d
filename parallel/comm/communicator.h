#pragma once
// Collectives and point-to-point between ranks, ordered on streams.
//
// An operation is queued after what is already queued on the given stream and returns a Work at once;
// `Work::wait(stream)` makes what is queued later on that stream wait for it (on the CPU: the calling thread waits).
// All ranks of a communicator issue its collectives in the same order; a mismatch of operation, size or type is an
// Error(communication) that names rank, operation and sequence number. Tensors stay valid and untouched until the wait.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/device.h"

namespace pdl {

enum class ReduceOp { sum, max, min };

/// The axis of the few bytes by which all ranks agree, after each step, on loss and stopping.
inline constexpr const char* kControlAxis = "control";

/// An operation in flight. Move-only; destroying one that was not waited for is a bug that a debug build reports.
class Work {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void wait(Stream& stream) = 0;
    virtual bool done() = 0;  ///< never waits; gives the transport a chance to move
  };
  Work() = default;
  explicit Work(std::unique_ptr<State> state) : state_(std::move(state)) {}

  /// Waits once; later calls and empty Works return at once.
  void wait(Stream& stream) {
    if (state_) state_->wait(stream);
    state_.reset();
  }
  bool done() { return !state_ || state_->done(); }
  bool pending() const { return state_ != nullptr; }

 private:
  std::unique_ptr<State> state_;
};

/// The members of one group and their order of communication. rank and size are those of the group.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string transport() const = 0;  ///< "self", "mpi", "nccl"
  virtual std::string axis() const = 0;       ///< which grid axis this group is: "dp", "tp", "pp", "world"
  /// Name and version of the library that carries it, "NCCL 2.28.9"; empty for MPI, which the World names.
  virtual std::string library() const { return ""; }
  /// The stream in which collectives run; null when the host carries them. Messages may run in others.
  virtual Stream* own_stream() { return nullptr; }

  /// In place. Deterministic mode adds contributions in rank order, element by element, on every rank alike; NCCL has
  /// an order of its own, the same in every run of the same ranks on the same machine.
  virtual Work all_reduce(Tensor inout, ReduceOp op, Stream& stream) = 0;
  /// out [size * n] = the ranks' `in` [n] in rank order. `in` may be this rank's part of `out`.
  virtual Work all_gather(Tensor out, Tensor in, Stream& stream) = 0;
  /// out [n] = this rank's part of the sum of all `in` [size * n]; same order of summation as all_reduce, except on
  /// NCCL. `in` may be overwritten; `out` may be this rank's part of `in`.
  virtual Work reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) = 0;
  /// out at `root` = reduction of all `in`; elsewhere out is untouched. out may be in.
  virtual Work reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) = 0;
  virtual Work broadcast(Tensor inout, int root, Stream& stream) = 0;
  /// Part r of `in` goes to rank r, part r of `out` comes from rank r; parts in elements, in rank order, given by
  /// counts.
  virtual Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                          const std::vector<std::int64_t>& in_counts, Stream& stream) = 0;
  /// Messages of one pair and tag arrive in the order in which they were sent. Portable code receives all messages of a
  /// pair in that order: NCCL knows no tags.
  virtual Work send(Tensor in, int peer, int tag, Stream& stream) = 0;
  virtual Work recv(Tensor out, int peer, int tag, Stream& stream) = 0;

  /// Lets operations in flight move: called between layers, where the transport has no thread of its own.
  virtual void progress() = 0;
  /// Groups of equal colour, ordered by key. Collective.
  virtual std::unique_ptr<Communicator> split(int color, int key, std::string axis) = 0;
};

}  // namespace pdl
