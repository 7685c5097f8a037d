#pragma once
// A communicator that can be told to do nothing, to find out what communication costs: the median step with it less the
// median step without it. That is more than the exposed time, since operations that overlap with computing slow it
// down.
//
// When silent, nothing leaves a rank and nothing arrives: each keeps its own part, and what others would have sent
// stays as it was. So numbers are wrong but finite, and shapes, memory and computing are those of the real run. Groups
// of the control axis are never silent: ranks must still agree on when to stop.

#include <memory>

#include "parallel/comm/communicator.h"

namespace pdl {

/// `inner` while `silent`, which all ranks change at the same point and which outlives the communicator, is false.
/// `device` is where the tensors of all calls lie.
std::unique_ptr<Communicator> make_silent_communicator(std::unique_ptr<Communicator> inner, Device& device,
                                                       const bool& silent);

}  // namespace pdl
