#pragma once
// The shapes that collectives demand, checked the same way by every transport. All throw Error on the caller's rank:
// these are mistakes of one call, found before anything is sent.

#include <cstdint>
#include <vector>

#include "engine/tensor/tensor.h"

namespace pdl {

/// `out` [size * n], `in` [n], one element type.
void check_all_gather(const Tensor& out, const Tensor& in, int size);
/// `out` [n], `in` [size * n], one element type.
void check_reduce_scatter(const Tensor& out, const Tensor& in, int size);
/// At the root `out` is as long as `in`, of the same element type.
void check_reduce(const Tensor& out, const Tensor& in, int root, int rank, int size);
/// The root is a member.
void check_root(int root, int size);
/// One count per member, none negative, which add up to the tensor; equal counts for the own part.
void check_all_to_all(const Tensor& out, const std::vector<std::int64_t>& out_counts, const Tensor& in,
                      const std::vector<std::int64_t>& in_counts, int rank, int size);
/// The peer is another member and the tag lies in [0, `tags`).
void check_peer(int peer, int tag, int rank, int size, int tags);

}  // namespace pdl
