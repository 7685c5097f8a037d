// The NCCL communicator on several ranks, each with a GPU of its own; and what ranks are told that share one. Does
// nothing on a machine without a GPU.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// A rank and its GPU, if the host has any.
struct GpuRanks {
  std::unique_ptr<World> world = attach_world();
  int rank = world->info().rank, size = world->info().size;
  int gpus = device_count("cuda");
  bool own_gpus = gpus >= world->info().local_size;
  std::unique_ptr<Device> device =
      gpus == 0 ? nullptr : make_device({.kind = "cuda", .ordinal = world->info().local_rank % gpus});

  Stream& stream() const { return device->compute_stream(); }
  bool can_use_nccl() const { return PDL_WITH_NCCL && device && own_gpus; }
  std::unique_ptr<Communicator> communicator(const NcclOptions& options = {}) {
    return world->make_communicator(*device, {.kind = "nccl", .timeout_s = 60.0, .nccl = options});
  }
};

/// Values in the GPU's memory.
template <typename T>
class OnGpu {
 public:
  OnGpu(const GpuRanks& ranks, const std::vector<T>& values)
      : ranks_(ranks),
        count_(static_cast<std::int64_t>(values.size())),
        buffer_(ranks.device->allocate(bytes(), MemoryKind::workspace)) {
    set(values);
  }
  void set(const std::vector<T>& values) {
    ranks_.device->copy(buffer_.raw(), values.data(), bytes(), ranks_.stream());
    ranks_.stream().synchronize();
  }
  std::vector<T> values() const {
    std::vector<T> values(static_cast<std::size_t>(count_));
    ranks_.device->copy(values.data(), buffer_.raw(), bytes(), ranks_.stream());
    ranks_.stream().synchronize();
    return values;
  }
  Tensor tensor() const { return buffer_.tensor(DTypeOf<T>::value, Shape{count_}); }

 private:
  std::int64_t bytes() const { return count_ * static_cast<std::int64_t>(sizeof(T)); }
  const GpuRanks& ranks_;
  std::int64_t count_;
  Buffer buffer_;
};

/// Sums of floating-point numbers agree up to the rounding of another order of addition.
template <typename T>
bool agree(const std::vector<T>& a, const std::vector<T>& b, int size) {
  if (a.size() != b.size()) return false;
  const double tolerance = std::is_integral_v<T> ? 0.0 : size * 2000.0 * std::numeric_limits<T>::epsilon();
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])) <= tolerance)) return false;
  }
  return true;
}

template <typename T>
void check_reductions(GpuRanks& ranks, Communicator& group, std::int64_t part, ReduceOp op) {
  INFO("parts of " << part << " " << name_of(DTypeOf<T>::value) << ", op " << static_cast<int>(op));
  Stream& stream = ranks.stream();
  const std::int64_t whole = part * ranks.size;
  const std::vector<T> own = contributions<T>(ranks.rank, whole), result = serially_reduced<T>(ranks.size, whole, op);
  const auto begin = result.begin() + static_cast<std::ptrdiff_t>(ranks.rank * part);
  const std::vector<T> own_part(begin, begin + static_cast<std::ptrdiff_t>(part));
  OnGpu<T> in(ranks, own), all(ranks, own), scattered(ranks, std::vector<T>(own_part.size()));
  // Queued at once, waited for in the other order.
  Work first = group.all_reduce(all.tensor(), op, stream);
  Work second = group.reduce_scatter(scattered.tensor(), in.tensor(), op, stream);
  second.wait(stream);
  first.wait(stream);
  CHECK(agree(all.values(), result, ranks.size));
  CHECK(agree(scattered.values(), own_part, ranks.size));
  for (int root = 0; root < ranks.size; ++root) {
    const std::vector<T> untouched(own.size(), T{77});
    OnGpu<T> out(ranks, untouched);
    in.set(own);
    group.reduce(out.tensor(), in.tensor(), op, root, stream).wait(stream);
    CHECK(agree(out.values(), ranks.rank == root ? result : untouched, ranks.size));
  }
}

void check_moves(GpuRanks& ranks, Communicator& group, std::int64_t part) {
  INFO("parts of " << part << " elements");
  Stream& stream = ranks.stream();
  std::vector<float> expected;
  for (int rank = 0; rank < ranks.size; ++rank) {
    const std::vector<float> theirs = contributions<float>(rank, part);
    expected.insert(expected.end(), theirs.begin(), theirs.end());
  }
  const OnGpu<float> in(ranks, contributions<float>(ranks.rank, part));
  OnGpu<float> out(ranks, std::vector<float>(expected.size()));
  group.all_gather(out.tensor(), in.tensor(), stream).wait(stream);
  CHECK(out.values() == expected);
  std::vector<float> own_only(expected.size());
  const auto begin = static_cast<std::ptrdiff_t>(ranks.rank * part);
  std::copy_n(expected.begin() + begin, part, own_only.begin() + begin);
  out.set(own_only);
  group.all_gather(out.tensor(), out.tensor().range(ranks.rank * part, part), stream).wait(stream);
  CHECK(out.values() == expected);
  for (int root = 0; root < ranks.size; ++root) {
    const OnGpu<float> values(ranks, contributions<float>(ranks.rank, part));
    group.broadcast(values.tensor(), root, stream).wait(stream);
    CHECK(values.values() == contributions<float>(root, part));
  }
}

/// Rank r sends (r + 2 p) % 5 elements to rank p.
void check_all_to_all(GpuRanks& ranks, Communicator& group) {
  const auto elements = [](int from, int to) { return (from + 2 * to) % 5; };
  std::vector<std::int64_t> in_counts, out_counts;
  std::vector<std::int32_t> sent, expected;
  for (int peer = 0; peer < ranks.size; ++peer) {
    in_counts.push_back(elements(ranks.rank, peer));
    out_counts.push_back(elements(peer, ranks.rank));
    for (int i = 0; i < elements(ranks.rank, peer); ++i) sent.push_back(100 * ranks.rank + 10 * peer + i);
    for (int i = 0; i < elements(peer, ranks.rank); ++i) expected.push_back(100 * peer + 10 * ranks.rank + i);
  }
  const OnGpu<std::int32_t> in(ranks, sent), out(ranks, std::vector<std::int32_t>(expected.size(), -1));
  group.all_to_all(out.tensor(), out_counts, in.tensor(), in_counts, ranks.stream()).wait(ranks.stream());
  CHECK(out.values() == expected);
}

}  // namespace

TEST_CASE("ranks that share a GPU talk by way of host memory, and are told why NCCL cannot be had") {
  GpuRanks ranks;
  if (!ranks.device || ranks.own_gpus || ranks.size < 2) return;
  CHECK(ranks.world->make_communicator(*ranks.device, {})->transport() == "mpi, host-staged");
#if PDL_WITH_NCCL
  CHECK_THROWS_WITH(ranks.communicator(), ContainsSubstring("share GPU-") && ContainsSubstring("comm=mpi"));
#endif
}

TEST_CASE("NCCL: reductions and moves of every kind") {
  GpuRanks ranks;
  if (!ranks.can_use_nccl()) return;
  const auto group = ranks.communicator({.min_ctas = 1, .max_ctas = 4});
  CHECK(group->transport() == "nccl");
  if (ranks.size > 1) CHECK(ranks.world->make_communicator(*ranks.device, {})->transport() == "nccl");
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
    for (const std::int64_t part : {1, 3, 5000}) {
      check_reductions<double>(ranks, *group, part, op);
      check_reductions<float>(ranks, *group, part, op);
      check_reductions<std::int64_t>(ranks, *group, part, op);
      check_reductions<std::int32_t>(ranks, *group, part, op);
      check_reductions<std::uint8_t>(ranks, *group, part, op);
    }
  }
  check_reductions<float>(ranks, *group, 0, ReduceOp::sum);
  for (const std::int64_t part : {0, 1, 3, 70'001}) check_moves(ranks, *group, part);
  check_all_to_all(ranks, *group);
}

TEST_CASE("NCCL: the same sums have the same bits every time") {
  GpuRanks ranks;
  if (!ranks.can_use_nccl()) return;
  const auto group = ranks.communicator();
  const std::vector<float> own = contributions<float>(ranks.rank, 300'007);
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    const OnGpu<float> values(ranks, own);
    group->all_reduce(values.tensor(), ReduceOp::sum, ranks.stream()).wait(ranks.stream());
    if (run == 0) first = values.values();
    CHECK(values.values() == first);
  }
}

TEST_CASE("NCCL: messages of a pair keep their order, and those of other pairs and directions do not hold them up") {
  GpuRanks ranks;
  if (!ranks.can_use_nccl() || ranks.size < 2) return;
  const auto group = ranks.communicator();
  Stream& stream = ranks.stream();
  const int next = (ranks.rank + 1) % ranks.size, previous = (ranks.rank + ranks.size - 1) % ranks.size;
  for (int round = 0; round < 3; ++round) {
    // Up and down the ring at once; some ranks send first, some receive first. Of two ranks the next is the previous
    // one too, and one channel has all messages of a rank, in this order.
    constexpr std::int64_t kLong = 3'000'000;
    const OnGpu<float> up(ranks, contributions<float>(ranks.rank, kLong)), down(ranks, {1.0F * ranks.rank}),
        last(ranks, {100.0F + ranks.rank});
    const OnGpu<float> from_below(ranks, std::vector<float>(kLong)), from_above(ranks, {-1.0F}), end(ranks, {-1.0F});
    std::vector<Work> works;
    for (const bool sends : {(ranks.rank + round) % 2 == 0, (ranks.rank + round) % 2 != 0}) {
      if (sends) {
        works.push_back(group->send(up.tensor(), next, 1, stream));
        works.push_back(group->send(down.tensor(), previous, 2, stream));
        works.push_back(group->send(last.tensor(), next, 3, stream));
      } else {
        works.push_back(group->recv(from_below.tensor(), previous, 1, stream));
        works.push_back(group->recv(from_above.tensor(), next, 2, stream));
        works.push_back(group->recv(end.tensor(), previous, 3, stream));
      }
    }
    std::rotate(works.begin(), works.begin() + (ranks.rank + round) % 6, works.end());
    for (Work& work : works) work.wait(stream);
    CHECK(from_below.values() == contributions<float>(previous, kLong));
    CHECK(from_above.values()[0] == static_cast<float>(next));
    CHECK(end.values()[0] == 100.0F + static_cast<float>(previous));
  }
  CHECK_THROWS_AS(group->send(Tensor(), ranks.rank, 0, stream), Error);
}

TEST_CASE("NCCL: groups of a split work side by side, ordered by key") {
  GpuRanks ranks;
  if (!ranks.can_use_nccl()) return;
  const auto world = ranks.communicator();
  const auto parity = world->split(ranks.rank % 2, -ranks.rank, "tp");
  const int members = (ranks.size + 1 - ranks.rank % 2) / 2;
  CHECK(parity->size() == members);
  CHECK(parity->rank() == members - 1 - ranks.rank / 2);
  CHECK(parity->axis() == "tp");
  CHECK(parity->transport() == (members == 1 ? "self" : "nccl"));
  const OnGpu<std::int32_t> sum(ranks, {ranks.rank}), everybody(ranks, {1});
  Work wide = world->all_reduce(everybody.tensor(), ReduceOp::sum, ranks.stream());
  parity->all_reduce(sum.tensor(), ReduceOp::sum, ranks.stream()).wait(ranks.stream());
  wide.wait(ranks.stream());
  int expected = 0;
  for (int rank = ranks.rank % 2; rank < ranks.size; rank += 2) expected += rank;
  CHECK(sum.values()[0] == expected);
  CHECK(everybody.values()[0] == ranks.size);
}

TEST_CASE("NCCL: ranks that wait for one that does not come are told in time who it is, and can free their memory") {
  const GpuRanks ranks;
  if (!ranks.can_use_nccl() || ranks.size < 2) return;
  GpuRanks failed;  // a world of its own, which the failure spoils
  const OnGpu<float> values(failed, {1.0F, 2.0F});
  auto group = failed.world->make_communicator(*failed.device, {.kind = "nccl", .timeout_s = 1.0});
  group->all_reduce(values.tensor(), ReduceOp::sum, failed.stream()).wait(failed.stream());
  failed.stream().synchronize();
  ranks.world->barrier();
  if (ranks.rank == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(4));
  } else {
    const auto start = std::chrono::steady_clock::now();
    try {
      group->all_reduce(values.tensor(), ReduceOp::sum, failed.stream()).wait(failed.stream());
      const std::vector<float> lost = values.values();
      FAIL("a sum without rank 1: " << lost[0]);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::communication);
      CHECK_THAT(error.what(), ContainsSubstring(" s in vain for all_reduce of 2 fp32 (operation 3 of axis world): "));
      CHECK_THAT(error.what(), ContainsSubstring("rank 1 has not arrived"));
    }
    group.reset();
    const OnGpu<float> more(failed, {3.0F});
    CHECK(more.values()[0] == 3.0F);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(4));
  }
  ranks.world->barrier();
}

TEST_CASE("NCCL: calls that differ end in an error that names both") {
  GpuRanks ranks;
  if (!ranks.can_use_nccl() || ranks.size < 2) return;
  const OnGpu<float> values(ranks, {1.0F, 2.0F});  // freed after the communicator, which ends the kernel that waits
  const auto group = ranks.communicator();
  const auto names_one = ContainsSubstring("all_reduce"), other = ContainsSubstring("broadcast");
  // The first rank comes alone: its operation is on its way when the others, who see it, refuse to start another.
  if (ranks.rank == 0) {
    Work work = group->all_reduce(values.tensor(), ReduceOp::sum, ranks.stream());
    ranks.world->barrier();
    ranks.world->barrier();
    CHECK_FALSE(work.done());
    CHECK_THROWS_WITH(group->progress(), names_one && other);
    work.wait(ranks.stream());  // of the stream, not of the host
  } else {
    ranks.world->barrier();
    CHECK_THROWS_WITH(group->broadcast(values.tensor(), 0, ranks.stream()), names_one && other);
    ranks.world->barrier();
  }
}
