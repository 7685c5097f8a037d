#include "parallel/comm/collective_checks.h"

#include <numeric>

namespace pdl {
namespace {

void check_types(const Tensor& out, const Tensor& in) {
  PDL_CHECK(out.dtype() == in.dtype(), "out holds ", name_of(out.dtype()), ", in holds ", name_of(in.dtype()));
}

void check_counts(const std::vector<std::int64_t>& counts, const Tensor& tensor, int size) {
  PDL_CHECK(counts.size() == static_cast<std::size_t>(size), counts.size(), " counts for ", size, " ranks");
  for (const std::int64_t count : counts) PDL_CHECK(count >= 0, "a count of ", count);
  const std::int64_t sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  PDL_CHECK(sum == tensor.elements(), "counts add up to ", sum, ", the tensor has ", tensor.elements(), " elements");
}

}  // namespace

void check_all_gather(const Tensor& out, const Tensor& in, int size) {
  check_types(out, in);
  PDL_CHECK(out.elements() == size * in.elements(), "all_gather of ", in.elements(), " elements from ", size,
            " ranks into ", out.elements());
}

void check_reduce_scatter(const Tensor& out, const Tensor& in, int size) {
  check_types(out, in);
  PDL_CHECK(in.elements() == size * out.elements(), "reduce_scatter of ", in.elements(), " elements over ", size,
            " ranks into ", out.elements());
}

void check_reduce(const Tensor& out, const Tensor& in, int root, int rank, int size) {
  check_root(root, size);
  if (rank != root) return;
  check_types(out, in);
  PDL_CHECK(out.elements() == in.elements(), "reduce of ", in.elements(), " elements into ", out.elements());
}

void check_root(int root, int size) { PDL_CHECK(root >= 0 && root < size, "root ", root, " in a group of ", size); }

void check_all_to_all(const Tensor& out, const std::vector<std::int64_t>& out_counts, const Tensor& in,
                      const std::vector<std::int64_t>& in_counts, int rank, int size) {
  check_types(out, in);
  check_counts(out_counts, out, size);
  check_counts(in_counts, in, size);
  const auto own = static_cast<std::size_t>(rank);
  PDL_CHECK(out_counts[own] == in_counts[own], "own part of ", in_counts[own], " elements goes into ", out_counts[own]);
}

void check_peer(int peer, int tag, int rank, int size, int tags) {
  PDL_CHECK(peer >= 0 && peer < size && peer != rank, "peer ", peer, " of rank ", rank, " in a group of ", size);
  PDL_CHECK(tag >= 0 && tag < tags, "tag ", tag, " is not below ", tags);
}

}  // namespace pdl
