#pragma once
// Counts what passes through a communicator: calls, bytes, time. No engine counts its own traffic or reads a clock.

#include <memory>
#include <string>

#include "parallel/comm/comm_ledger.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// `ledger` outlives the communicator and all that are split from it.
std::unique_ptr<Communicator> make_counting_communicator(std::unique_ptr<Communicator> inner, CommLedger& ledger);

/// Bytes that one rank sends in a collective over `size` ranks whose whole tensor (all_gather: the output;
/// reduce_scatter: the input) has `bytes`: the formula behind CommCount::bytes, for plans.
std::int64_t ring_bytes(const std::string& operation, int size, std::int64_t bytes);

}  // namespace pdl
