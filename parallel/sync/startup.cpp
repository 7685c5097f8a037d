#include "parallel/sync/startup.h"

#include <algorithm>
#include <cstdio>
#include <vector>

namespace pdl {
namespace {

/// FNV-1a of what makes two parameters the same.
std::int64_t fingerprint(const Param& param) {
  std::uint64_t hash = 1469598103934665603ull;
  for (char c : param.spec.name + param.spec.global_shape.to_string()) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  }
  return static_cast<std::int64_t>(hash);
}

constexpr std::int64_t kBroadcastBytes = 250ll << 20;

}  // namespace

void check_equal_shapes(const ParamStore& store, Communicator& group, Device& device) {
  Stream& stream = device.compute_stream();
  const auto count = static_cast<std::int64_t>(store.params().size());
  // The count goes first, since lists of unequal length cannot be exchanged. The last entry says how many ranks
  // disagree.
  Buffer memory = device.allocate((count + 2) * size_of(DType::int64), MemoryKind::communication);
  const Tensor flag = memory.tensor(DType::int64, Shape{1});
  const auto disagreeing_ranks = [&](std::int64_t mine) {
    device.copy(flag.raw(), &mine, sizeof mine, stream);
    group.all_reduce(flag, ReduceOp::sum, stream).wait(stream);
    device.copy(&mine, flag.raw(), sizeof mine, stream);
    stream.synchronize();
    return mine;
  };

  std::int64_t root_count = count;
  device.copy(flag.raw(), &root_count, sizeof root_count, stream);
  group.broadcast(flag, 0, stream).wait(stream);
  device.copy(&root_count, flag.raw(), sizeof root_count, stream);
  stream.synchronize();
  if (disagreeing_ranks(root_count != count ? 1 : 0) != 0) {
    throw Error(str("replicas differ: this rank holds ", count, " parameters, rank 0 holds ", root_count),
                ExitCode::communication);
  }

  std::vector<std::int64_t> mine;
  for (const Param& param : store.params()) mine.push_back(fingerprint(param));
  std::vector<std::int64_t> root = mine;
  const Tensor list = memory.tensor(DType::int64, Shape{count}, size_of(DType::int64));
  device.copy(list.raw(), root.data(), list.bytes(), stream);
  group.broadcast(list, 0, stream).wait(stream);
  device.copy(root.data(), list.raw(), list.bytes(), stream);
  stream.synchronize();
  const auto difference = std::mismatch(mine.begin(), mine.end(), root.begin()).first - mine.begin();
  if (disagreeing_ranks(difference != count ? 1 : 0) != 0) {
    const std::string what = difference == count
                                 ? "another rank differs from rank 0"
                                 : str("parameter ", store.params()[static_cast<std::size_t>(difference)].spec.name,
                                       " differs from rank 0's in name or shape");
    throw Error("replicas differ: " + what, ExitCode::communication);
  }
}

void check_equal_plans(const std::string& plan, Communicator& group, Device& device) {
  constexpr std::size_t kTextBytes = 256;
  Stream& stream = device.compute_stream();
  Buffer memory = device.allocate(kTextBytes + size_of(DType::int64), MemoryKind::communication);
  const Tensor text = memory.tensor(DType::uint8, Shape{kTextBytes});
  const Tensor number = memory.tensor(DType::int64, Shape{1}, kTextBytes);
  const auto plan_of = [&](int root) {
    std::string words = plan.substr(0, kTextBytes - 1);
    words.resize(kTextBytes, '\0');
    device.copy(text.raw(), words.data(), text.bytes(), stream);
    group.broadcast(text, root, stream).wait(stream);
    device.copy(words.data(), text.raw(), text.bytes(), stream);
    stream.synchronize();
    return std::string(words.c_str());
  };
  const std::string first = plan_of(0);
  std::int64_t other = first == plan.substr(0, kTextBytes - 1) ? group.size() : group.rank();
  device.copy(number.raw(), &other, sizeof other, stream);
  group.all_reduce(number, ReduceOp::min, stream).wait(stream);
  device.copy(&other, number.raw(), sizeof other, stream);
  stream.synchronize();
  if (other == group.size()) return;
  const std::string second = plan_of(static_cast<int>(other));
  throw Error(str("ranks have different plans: rank 0 means ", first, "; rank ", other, " means ", second),
              ExitCode::communication);
}

void broadcast_weights(const ParamStore& store, Communicator& group, Device& device) {
  Stream& stream = device.compute_stream();
  const std::int64_t chunk = kBroadcastBytes / size_of(store.weights().dtype());
  const auto broadcast_range = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t begin = first; begin < last; begin += chunk) {
      const Tensor part = store.weights().range(begin, std::min(chunk, last - begin));
      group.broadcast(part, 0, stream).wait(stream);
    }
  };
  std::int64_t begin = 0;  // of the parameters since the last slice
  for (const Param& param : store.params()) {
    if (param.spec.slice.axis < 0) continue;
    broadcast_range(begin, param.offset);
    begin = param.offset + param.count;
  }
  broadcast_range(begin, store.elements());
}

std::string mebibytes(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", static_cast<double>(bytes) / (1024.0 * 1024.0));
  return text;
}

}  // namespace pdl
