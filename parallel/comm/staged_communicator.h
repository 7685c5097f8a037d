#pragma once
// A communicator for tensors in device memory on top of one for host memory: operands go down to page-locked host
// memory, the operation runs there, results come up again. Right for several ranks that share a GPU, and portable; the
// host waits for every copy, so nothing overlaps and its times say nothing about the strategy.

#include <memory>

#include "parallel/comm/communicator.h"

namespace pdl {

/// `inner` works in memory of `host`, which it uses for scratch. `device` is where the tensors of all calls lie.
std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> inner,
                                                       std::shared_ptr<Device> host, Device& device);

}  // namespace pdl
