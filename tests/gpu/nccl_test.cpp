// The NCCL communicator on one rank: every operation is called, and is a copy. What several ranks compute is in
// tests/mpi/nccl_test.cpp.

#include "parallel/comm/counting_communicator.h"
#include "parallel/comm/world.h"
#include "tests/support/catch.h"
#include "tests/support/device_testing.h"
#if PDL_WITH_NCCL
#include "parallel/comm/nccl_communicator.h"
#endif

using namespace pdl;
using namespace pdl::testing;

namespace {

constexpr std::int64_t kElements = 1000;

/// Small whole numbers, which every type holds.
Values whole_numbers(std::int64_t first) {
  Values values;
  for (std::int64_t i = 0; i < kElements; ++i) values.push_back(static_cast<double>((first + 7 * i) % 100));
  return values;
}

void check_operations(Communicator& group, DType dtype) {
  INFO(name_of(dtype));
  Stream& stream = gpu()->device->compute_stream();
  const Values numbers = whole_numbers(3);
  DeviceTensor in(dtype, {kElements}), out(dtype, {kElements});
  const auto check = [&](const char* name, DeviceTensor& result, const std::function<Work()>& call) {
    INFO(name);
    in.set(numbers);
    out.poison();
    call().wait(stream);
    CHECK(result.values() == numbers);
    CHECK(result.guards_intact());
  };
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
    check("all_reduce", in, [&] { return group.all_reduce(in.tensor(), op, stream); });
    check("reduce_scatter", out, [&] { return group.reduce_scatter(out.tensor(), in.tensor(), op, stream); });
    check("reduce_scatter in place", in, [&] { return group.reduce_scatter(in.tensor(), in.tensor(), op, stream); });
    check("reduce", out, [&] { return group.reduce(out.tensor(), in.tensor(), op, 0, stream); });
    check("reduce in place", in, [&] { return group.reduce(in.tensor(), in.tensor(), op, 0, stream); });
  }
  check("all_gather", out, [&] { return group.all_gather(out.tensor(), in.tensor(), stream); });
  check("all_gather in place", in, [&] { return group.all_gather(in.tensor(), in.tensor(), stream); });
  check("broadcast", in, [&] { return group.broadcast(in.tensor(), 0, stream); });
  check("all_to_all", out,
        [&] { return group.all_to_all(out.tensor(), {kElements}, in.tensor(), {kElements}, stream); });
}

/// What is queued before an operation happens before it; what is queued after the wait, after it.
void check_order(Communicator& group) {
  Device& device = *gpu()->device;
  Stream& stream = device.compute_stream();
  constexpr std::int64_t kMany = 1 << 24;
  const auto bytes = kMany * size_of(DType::fp32);
  const Buffer from = device.allocate(bytes, MemoryKind::workspace), to = device.allocate(bytes, MemoryKind::workspace),
               gathered = device.allocate(bytes, MemoryKind::workspace);
  std::vector<float> values(static_cast<std::size_t>(kMany)), results(values.size());
  for (int round = 1; round <= 5; ++round) {
    std::fill(values.begin(), values.end(), static_cast<float>(round));
    device.copy(from.raw(), values.data(), bytes, stream);
    device.copy(to.raw(), from.raw(), bytes, stream);
    Work work = group.all_gather(gathered.tensor(DType::fp32, {kMany}), to.tensor(DType::fp32, {kMany}), stream);
    group.progress();
    work.wait(stream);
    device.copy(from.raw(), gathered.raw(), bytes, stream);
    device.copy(results.data(), from.raw(), bytes, stream);
    stream.synchronize();
    CHECK(results == values);
  }
}

void check_done(Communicator& group) {
  DeviceTensor values(DType::fp32, {kElements});
  values.set(whole_numbers(1));
  Stream& stream = gpu()->device->compute_stream();
  Work work = group.all_reduce(values.tensor(), ReduceOp::sum, stream);
  while (!work.done()) group.progress();
  work.wait(stream);
  CHECK_FALSE(work.pending());
  CHECK(values.values() == whole_numbers(1));
  const Tensor nothing = values.tensor().range(0, 0);
  group.all_reduce(nothing, ReduceOp::sum, stream).wait(stream);
  CHECK_THROWS_AS(group.send(values.tensor(), 0, 0, stream), Error);
  CHECK_THROWS_AS(group.recv(values.tensor(), 1, 0, stream), Error);
}

/// Waiting at once exposes the operation; computing in between hides it.
void check_measured(std::unique_ptr<Communicator> group) {
  Device& device = *gpu()->device;
  Stream& stream = device.compute_stream();
  CommLedger ledger;
  ledger.measure_on(device);
  const auto counted = make_counting_communicator(std::move(group), ledger);
  constexpr std::int64_t kMany = 1 << 26;
  const std::int64_t bytes = kMany * size_of(DType::fp32);
  const Buffer from = device.allocate(bytes, MemoryKind::workspace), to = device.allocate(bytes, MemoryKind::workspace),
               other = device.allocate(bytes, MemoryKind::workspace);
  const Tensor in = from.tensor(DType::fp32, {kMany}), out = to.tensor(DType::fp32, {kMany});
  counted->all_gather(out, in, stream).wait(stream);  // connects, and loads what it needs
  ledger.take();
  constexpr int kTimes = 10;
  CommCount counts[2];
  for (const bool hidden : {false, true}) {
    for (int i = 0; i < kTimes; ++i) {
      Work work = counted->all_gather(out, in, stream);
      if (hidden) {
        for (int copy = 0; copy < 8; ++copy) device.copy(other.raw(), from.raw(), bytes, stream);
      }
      work.wait(stream);
    }
    counts[hidden] = ledger.take().at("world.all_gather");
  }
  const double least_s = kTimes * 2.0 * static_cast<double>(bytes) / 20e12;  // no memory moves 20 TB/s
  CHECK(counts[0].busy_s > least_s);
  CHECK(counts[0].exposed_s > 0.5 * counts[0].busy_s);
  CHECK(counts[1].busy_s > least_s);
  CHECK(counts[1].exposed_s < 0.2 * counts[1].busy_s);
}

/// An operation that takes longer than its deadline, as one does whose peers do not come (here: long copies are before
/// it in the stream of the communication): the wait for the stream ends with an Error, the communicator is gone, and
/// the GPU is as good as before.
void check_deadline(World& world) {
  Device& device = *gpu()->device;
  Stream& stream = device.compute_stream();
  constexpr std::int64_t kBytes = std::int64_t{16} << 30;  // at least 4 milliseconds to copy
  constexpr double kDeadline_s = 2.0;                      // enough to connect
  constexpr int kCopies = 800;                             // more than that
  const Buffer from = device.allocate(kBytes, MemoryKind::workspace),
               to = device.allocate(kBytes, MemoryKind::workspace);
  {
    const auto group = world.make_communicator(device, {.kind = "nccl", .timeout_s = kDeadline_s});
    CHECK(device.host_wait() != nullptr);
    const auto gather = [&] {
      group->all_gather(to.tensor(DType::uint8, {kBytes}), from.tensor(DType::uint8, {kBytes}), stream).wait(stream);
      stream.synchronize();
    };
    gather();  // connects
    for (int i = 0; i < kCopies; ++i) device.copy(to.raw(), from.raw(), kBytes, *group->own_stream());
    try {
      gather();
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::communication);
      CHECK_THAT(error.what(), StartsWith("rank 0 waited "));
      CHECK_THAT(error.what(), ContainsSubstring(" s in vain for all_gather of 17179869184 uint8 (operation "));
      CHECK_THAT(error.what(), EndsWith("all ranks of this host have arrived"));
    }
    CHECK(world.first_failure().code == ExitCode::communication);
    CHECK_THROWS_AS(stream.synchronize(), Error);
    CHECK_THROWS_WITH(group->progress(), ContainsSubstring("was aborted"));
    CHECK_THROWS_AS(group->all_gather(to.tensor(DType::uint8, {8}), from.tensor(DType::uint8, {8}), stream), Error);
  }
  CHECK(device.host_wait() == nullptr);
  device.copy(to.raw(), from.raw(), kBytes, stream);
  stream.synchronize();
}

}  // namespace

TEST_CASE("matrix products that leave multiprocessors to NCCL compute the same") {
  if (gpu() == nullptr) return;
  const auto backend = make_backend(*gpu()->device, {.deterministic = true, .sm_margin = 32});
  const Side ours{backend.get(), true}, oracle{gpu()->oracle.get(), false};
  const Twin x = random_twin(DType::bf16, {512, 256}, 1), w = random_twin(DType::bf16, {1024, 256}, 2);
  const Twin y(DType::bf16, {512, 1024});
  for (const Side& on : {oracle, ours}) {
    on->linear_forward(y[on], Tensor(), x[on], w[on], Tensor(), Activation::none);
  }
  CHECK(difference(y.values(), y.expected()) <= kRounded.bf16);
  CHECK_THROWS_WITH(make_backend(*gpu()->device, {.sm_margin = 1000}), ContainsSubstring("/nccl/gemm_sm_margin: 1000"));
}

// One test case: MPI starts once in a process.
TEST_CASE("NCCL on one rank") {
  if (gpu() == nullptr) return;
  int argc = 0;
  char** argv = nullptr;
  const std::unique_ptr<World> world = make_world(&argc, &argv);
  if (world->info().size > 1) return;
  CHECK(world->make_communicator(*gpu()->device, {})->transport() == "self");
#if PDL_WITH_NCCL
  CHECK_THAT(nccl_version(), StartsWith("2."));
  CHECK_THROWS_WITH(world->make_communicator(*gpu()->host, {.kind = "nccl"}), ContainsSubstring("CPU"));
  for (const NcclOptions& nccl : {NcclOptions{}, NcclOptions{.min_ctas = 2, .max_ctas = 4}}) {
    const auto group = world->make_communicator(*gpu()->device, {.kind = "nccl", .nccl = nccl});
    CHECK(group->transport() == "nccl");
    CHECK(group->size() == 1);
    for (const DType dtype :
         {DType::fp64, DType::fp32, DType::bf16, DType::fp16, DType::int64, DType::int32, DType::uint8}) {
      check_operations(*group, dtype);
    }
    check_order(*group);
    check_done(*group);
    CHECK(group->split(0, 0, "tp")->transport() == "self");
    check_done(*group);
    CHECK(group->library() == "NCCL " + nccl_version());
    CHECK(group->own_stream() != nullptr);
    check_measured(world->make_communicator(*gpu()->device, {.kind = "nccl", .nccl = nccl}));
  }
  check_deadline(*world);  // last: it spoils the world
#else
  CHECK_THROWS_WITH(world->make_communicator(*gpu()->device, {.kind = "nccl"}), ContainsSubstring("not in this build"));
#endif
}
