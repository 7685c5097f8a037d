#pragma once
// Parameters of which each rank of a group holds a slice, seen as wholes: norms and values. Slices are those of
// split_evenly along the first axis, in rank order; parameters that a rank holds whole are left alone.

#include <cstdint>
#include <vector>

#include "engine/nn/param.h"
#include "parallel/comm/communicator.h"

namespace pdl {

class SlicedParameters {
 public:
  /// Plans only; the store outlives it.
  SlicedParameters(const ParamStore& store, Communicator& group);

  /// Takes memory for sum_squares.
  void prepare(Device& device);
  /// Bytes that `prepare` takes, and those that a call of sum_squares sends.
  std::int64_t predicted_bytes() const;
  std::int64_t count() const { return static_cast<std::int64_t>(sliced_.size()); }

  /// squares[i], of params()[i]: those of slices become sums over the group, added in rank order. Collective.
  void sum_squares(std::vector<double>& squares) const;
  /// The same for what LAMB wants to know: fp64 [n, 2] on the device, of the n parameters from `first` on. Collective.
  void sum_norms(Tensor norms, std::int64_t first) const;
  /// The runs of slices among the `count` parameters from `first` on, as {begin, count}: one all-reduce each.
  std::vector<UpdateSegment> runs(std::int64_t first, std::int64_t count) const;

  /// Rank 0 gets the whole of params()[index] into `host`: the slices of `values`, by way of `scratch`, which is as
  /// long as a slice. Collective.
  void gather(int index, const Tensor& values, const Tensor& scratch, void* host) const;

 private:
  const ParamStore& store_;
  Communicator& group_;
  Device* device_ = nullptr;
  std::vector<std::int64_t> sliced_;  ///< indices into params()
  Buffer squares_;                    ///< fp64 [ranks, sliced]
};

}  // namespace pdl
