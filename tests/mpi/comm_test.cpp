// Every operation of the MPI communicator, on as many ranks as the launcher gives.

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel/comm/counting_communicator.h"
#include "parallel/comm/rank_order.h"
#include "parallel/comm/staged_communicator.h"
#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Sums agree: bit by bit, or up to the rounding of another order of addition.
template <typename T>
bool agree(const std::vector<T>& a, const std::vector<T>& b, bool bit_equal, int size) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double tolerance =
        bit_equal || std::is_integral_v<T> ? 0.0 : size * 2000.0 * std::numeric_limits<T>::epsilon();
    if (!(std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])) <= tolerance)) return false;
  }
  return true;
}

template <typename T>
void check_all_reduce(Ranks& ranks, Communicator& group, std::int64_t count, ReduceOp op, bool bit_equal) {
  std::vector<T> values = contributions<T>(ranks.rank, count);
  group.all_reduce(tensor_of(values), op, ranks.stream).wait(ranks.stream);
  INFO(count << " elements of " << name_of(DTypeOf<T>::value) << ", op " << static_cast<int>(op));
  CHECK(agree(values, serially_reduced<T>(ranks.size, count, op), bit_equal || op != ReduceOp::sum, ranks.size));
}

void check_reductions(Ranks& ranks, Communicator& group, std::int64_t part, bool bit_equal) {
  INFO("parts of " << part << " elements");
  const auto begin = static_cast<std::ptrdiff_t>(ranks.rank * part);
  const std::vector<float> sum = serially_reduced<float>(ranks.size, part * ranks.size, ReduceOp::sum);
  const std::vector<float> own(sum.begin() + begin, sum.begin() + begin + static_cast<std::ptrdiff_t>(part));

  std::vector<float> in = contributions<float>(ranks.rank, part * ranks.size),
                     out(static_cast<std::size_t>(part), -1.0f);
  group.reduce_scatter(tensor_of(out), tensor_of(in), ReduceOp::sum, ranks.stream).wait(ranks.stream);
  CHECK(agree(out, own, bit_equal, ranks.size));
  in = contributions<float>(ranks.rank, part * ranks.size);
  const Tensor inside = tensor_of(in).range(ranks.rank * part, part);
  group.reduce_scatter(inside, tensor_of(in), ReduceOp::sum, ranks.stream).wait(ranks.stream);
  CHECK(agree(std::vector<float>(in.begin() + begin, in.begin() + begin + static_cast<std::ptrdiff_t>(part)), own,
              bit_equal, ranks.size));

  for (int root = 0; root < ranks.size; ++root) {
    in = contributions<float>(ranks.rank, part * ranks.size);
    std::vector<float> result(in.size(), -1.0f);
    group.reduce(tensor_of(result), tensor_of(in), ReduceOp::sum, root, ranks.stream).wait(ranks.stream);
    CHECK(agree(result, ranks.rank == root ? sum : std::vector<float>(in.size(), -1.0f), bit_equal, ranks.size));
    group.reduce(tensor_of(in), tensor_of(in), ReduceOp::sum, root, ranks.stream).wait(ranks.stream);
    if (ranks.rank == root) CHECK(agree(in, sum, bit_equal, ranks.size));
  }
}

void check_moves(Ranks& ranks, Communicator& group, std::int64_t part) {
  INFO("parts of " << part << " elements");
  const auto width = static_cast<std::size_t>(part);
  std::vector<float> expected;
  for (int rank = 0; rank < ranks.size; ++rank) {
    const std::vector<float> theirs = contributions<float>(rank, part);
    expected.insert(expected.end(), theirs.begin(), theirs.end());
  }
  std::vector<float> in = contributions<float>(ranks.rank, part), out(width * static_cast<std::size_t>(ranks.size));
  group.all_gather(tensor_of(out), tensor_of(in), ranks.stream).wait(ranks.stream);
  CHECK(out == expected);
  out.assign(out.size(), 0.0f);
  std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(ranks.rank * part));
  group.all_gather(tensor_of(out), tensor_of(out).range(ranks.rank * part, part), ranks.stream).wait(ranks.stream);
  CHECK(out == expected);

  for (int root = 0; root < ranks.size; ++root) {
    std::vector<float> values = contributions<float>(ranks.rank, part);
    group.broadcast(tensor_of(values), root, ranks.stream).wait(ranks.stream);
    CHECK(values == contributions<float>(root, part));
  }
}

/// Rank r sends (r + 2 p) % 5 elements to rank p.
void check_all_to_all(Ranks& ranks, Communicator& group) {
  const auto elements = [](int from, int to) { return (from + 2 * to) % 5; };
  std::vector<std::int64_t> in_counts, out_counts;
  std::vector<std::int32_t> in, expected;
  for (int peer = 0; peer < ranks.size; ++peer) {
    in_counts.push_back(elements(ranks.rank, peer));
    out_counts.push_back(elements(peer, ranks.rank));
    for (int i = 0; i < elements(ranks.rank, peer); ++i) in.push_back(100 * ranks.rank + 10 * peer + i);
    for (int i = 0; i < elements(peer, ranks.rank); ++i) expected.push_back(100 * peer + 10 * ranks.rank + i);
  }
  std::vector<std::int32_t> out(expected.size(), -1);
  group.all_to_all(tensor_of(out), out_counts, tensor_of(in), in_counts, ranks.stream).wait(ranks.stream);
  CHECK(out == expected);
}

}  // namespace

TEST_CASE("all_reduce of every type, size and reduction") {
  Ranks ranks;
  for (const bool deterministic : {false, true}) {
    const auto group = ranks.communicator(deterministic);
    for (const std::int64_t count : {0, 1, 2, 3, 5, 64, 1001, 300'007}) {
      check_all_reduce<float>(ranks, *group, count, ReduceOp::sum, deterministic);
    }
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
      for (const std::int64_t count : {1, 7, 5000}) {
        check_all_reduce<double>(ranks, *group, count, op, deterministic);
        check_all_reduce<float>(ranks, *group, count, op, deterministic);
        check_all_reduce<std::int64_t>(ranks, *group, count, op, true);
        check_all_reduce<std::int32_t>(ranks, *group, count, op, true);
        check_all_reduce<std::uint8_t>(ranks, *group, count, op, true);
      }
    }
  }
}

TEST_CASE("reduce_scatter and reduce, also in place") {
  Ranks ranks;
  for (const bool deterministic : {false, true}) {
    const auto group = ranks.communicator(deterministic);
    for (const std::int64_t part : {0, 1, 3, 1000, 70'001}) check_reductions(ranks, *group, part, deterministic);
  }
}

TEST_CASE("all_gather, broadcast and all_to_all, also in place") {
  Ranks ranks;
  const auto group = ranks.communicator();
  CHECK(group->rank() == ranks.rank);
  CHECK(group->size() == ranks.size);
  CHECK(group->transport() == "mpi");
  CHECK(group->axis() == "world");
  for (const std::int64_t part : {0, 1, 3, 1000, 70'001}) check_moves(ranks, *group, part);
  check_all_to_all(ranks, *group);
}

TEST_CASE("what exceeds an MPI count goes in chunks") {
  Ranks ranks;
  const auto group = ranks.chunked(7);
  for (const std::int64_t count : {1, 7, 8, 1001}) check_all_reduce<float>(ranks, *group, count, ReduceOp::sum, false);
  for (const std::int64_t part : {1, 3, 50}) {
    check_reductions(ranks, *group, part, false);
    check_moves(ranks, *group, part);
  }
  check_all_to_all(ranks, *group);
  if (ranks.size < 2) return;
  const int next = (ranks.rank + 1) % ranks.size, previous = (ranks.rank + ranks.size - 1) % ranks.size;
  std::vector<float> in = contributions<float>(ranks.rank, 100), out(100);
  Work receive = group->recv(tensor_of(out), previous, 0, ranks.stream),
       send = group->send(tensor_of(in), next, 0, ranks.stream);
  receive.wait(ranks.stream);
  send.wait(ranks.stream);
  CHECK(out == contributions<float>(previous, 100));
}

TEST_CASE("deterministic sums have the same bits whoever forms them, and every time") {
  Ranks ranks;
  const auto group = ranks.communicator(true);
  const std::int64_t part = 100'003, whole = part * ranks.size;
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    std::vector<float> all = contributions<float>(ranks.rank, whole), in = all, out(static_cast<std::size_t>(part));
    Work reduce = group->all_reduce(tensor_of(all), ReduceOp::sum, ranks.stream);
    Work scatter = group->reduce_scatter(tensor_of(out), tensor_of(in), ReduceOp::sum, ranks.stream);
    scatter.wait(ranks.stream);
    reduce.wait(ranks.stream);
    CHECK(all == serially_reduced<float>(ranks.size, whole, ReduceOp::sum));
    CHECK(std::equal(out.begin(), out.end(), all.begin() + static_cast<std::ptrdiff_t>(ranks.rank * part)));
    if (run == 0) first = all;
    CHECK(all == first);
  }
}

TEST_CASE("deterministic mode takes its scratch once, as predicted") {
  Ranks ranks;
  const std::int64_t before = ranks.device->memory().current()[MemoryKind::communication];
  const auto group = ranks.communicator(true);
  const std::int64_t taken = ranks.device->memory().current()[MemoryKind::communication] - before;
  CHECK(taken == deterministic_scratch_bytes(ranks.size));
  ranks.device->seal();
  check_all_reduce<float>(ranks, *group, 2'000'003, ReduceOp::sum, true);
}

TEST_CASE("16-bit floats are added in fp32 in rank order") {
  Ranks ranks;
  const auto group = ranks.communicator(false);
  std::vector<std::uint16_t> values(1000), expected(1000);
  for (std::size_t i = 0; i < values.size(); ++i) {
    float sum = 0.0f;
    for (int rank = 0; rank < ranks.size; ++rank) {
      const float term = bf16_to_fp32(fp32_to_bf16(contribution<float>(rank, static_cast<std::int64_t>(i))));
      sum = rank == 0 ? term : sum + term;
    }
    expected[i] = fp32_to_bf16(sum);
    values[i] = fp32_to_bf16(contribution<float>(ranks.rank, static_cast<std::int64_t>(i)));
  }
  group->all_reduce(Tensor(values.data(), DType::bf16, Shape{1000}), ReduceOp::sum, ranks.stream).wait(ranks.stream);
  CHECK(values == expected);
}

TEST_CASE("many operations in flight, waited for in any order") {
  Ranks ranks;
  for (const bool deterministic : {false, true}) {
    const auto group = ranks.communicator(deterministic);
    std::vector<std::vector<float>> values;
    std::vector<Work> works;
    for (int i = 0; i < 100; ++i) values.push_back(contributions<float>(ranks.rank, 1 + i * i));
    for (std::vector<float>& each : values) {
      works.push_back(group->all_reduce(tensor_of(each), ReduceOp::sum, ranks.stream));
      group->progress();
    }
    // Every rank has its own order.
    for (std::size_t i = 0; i < works.size(); ++i)
      works[(i * 37 + static_cast<std::size_t>(ranks.rank) * 11) % works.size()].wait(ranks.stream);
    int wrong = 0;
    for (int i = 0; i < 100; ++i) {
      wrong += !agree(values[static_cast<std::size_t>(i)],
                      serially_reduced<float>(ranks.size, 1 + i * i, ReduceOp::sum), deterministic, ranks.size);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("done moves an operation to its end") {
  Ranks ranks;
  for (const bool deterministic : {false, true}) {
    const auto group = ranks.communicator(deterministic);
    std::vector<float> values = contributions<float>(ranks.rank, 50'000);
    Work work = group->all_reduce(tensor_of(values), ReduceOp::sum, ranks.stream);
    while (!work.done()) group->progress();
    work.wait(ranks.stream);
    CHECK(agree(values, serially_reduced<float>(ranks.size, 50'000, ReduceOp::sum), deterministic, ranks.size));
  }
}

TEST_CASE("messages find their receiver by tag, and keep their order within one") {
  Ranks ranks;
  if (ranks.size < 2) return;
  const auto group = ranks.communicator();
  const int next = (ranks.rank + 1) % ranks.size, previous = (ranks.rank + ranks.size - 1) % ranks.size;
  std::vector<std::vector<std::int32_t>> in, out;
  std::vector<Work> works;
  const std::vector<int> tags = {7, 0, 30'000, 7};
  for (int tag_index = 0; tag_index < 4; ++tag_index) {
    in.push_back(
        std::vector<std::int32_t>(static_cast<std::size_t>(1 + 20'000 * tag_index), 1000 * ranks.rank + tag_index));
    out.push_back(std::vector<std::int32_t>(in.back().size(), -1));
  }
  for (std::size_t i = 0; i < 4; ++i) works.push_back(group->send(tensor_of(in[i]), next, tags[i], ranks.stream));
  for (const std::size_t i : {2u, 0u, 3u, 1u}) {
    works.push_back(group->recv(tensor_of(out[i]), previous, tags[i], ranks.stream));
  }
  for (Work& work : works) work.wait(ranks.stream);
  for (int i = 0; i < 4; ++i) {
    CHECK(out[static_cast<std::size_t>(i)] ==
          std::vector<std::int32_t>(out[static_cast<std::size_t>(i)].size(), 1000 * previous + i));
  }
  CHECK_THROWS_AS(group->send(tensor_of(in[0]), ranks.rank, 0, ranks.stream), Error);
  CHECK_THROWS_AS(group->send(tensor_of(in[0]), ranks.size, 0, ranks.stream), Error);
  CHECK_THROWS_AS(group->send(tensor_of(in[0]), next, -1, ranks.stream), Error);
}

TEST_CASE("groups of a split work side by side, ordered by key") {
  Ranks ranks;
  const auto world = ranks.communicator(true);
  const auto parity = world->split(ranks.rank % 2, -ranks.rank, "tp");
  const int members = (ranks.size + 1 - ranks.rank % 2) / 2;
  CHECK(parity->size() == members);
  CHECK(parity->rank() == members - 1 - ranks.rank / 2);
  CHECK(parity->axis() == "tp");
  CHECK(parity->transport() == (members == 1 ? "self" : "mpi"));
  std::vector<std::int32_t> sum = {ranks.rank}, everybody = {1};
  Work wide = world->all_reduce(tensor_of(everybody), ReduceOp::sum, ranks.stream);
  parity->all_reduce(tensor_of(sum), ReduceOp::sum, ranks.stream).wait(ranks.stream);
  wide.wait(ranks.stream);
  int expected = 0;
  for (int rank = ranks.rank % 2; rank < ranks.size; rank += 2) expected += rank;
  CHECK(sum[0] == expected);
  CHECK(everybody[0] == ranks.size);
  const auto alone = world->split(ranks.rank, 0, "pp");
  CHECK(alone->size() == 1);
  CHECK(alone->transport() == "self");
}

TEST_CASE("a wait in one group moves the others") {
  Ranks ranks;
  if (ranks.size < 2) return;
  const auto sums = ranks.communicator(true), messages = ranks.communicator(false);
  std::vector<float> values = contributions<float>(ranks.rank, 1'000'000);
  std::vector<std::int32_t> word = {ranks.rank};
  Work sum = sums->all_reduce(tensor_of(values), ReduceOp::sum, ranks.stream);
  // The last rank's sum needs this rank's next phases while this rank waits for the last one's word.
  if (ranks.rank + 1 == ranks.size) {
    sum.wait(ranks.stream);
    for (int peer = 0; peer + 1 < ranks.size; ++peer)
      messages->send(tensor_of(word), peer, 1, ranks.stream).wait(ranks.stream);
  } else {
    messages->recv(tensor_of(word), ranks.size - 1, 1, ranks.stream).wait(ranks.stream);
    sum.wait(ranks.stream);
  }
  CHECK(word[0] == ranks.size - 1);
  CHECK(values == serially_reduced<float>(ranks.size, 1'000'000, ReduceOp::sum));
}

TEST_CASE("counting on top of MPI") {
  Ranks ranks;
  CommLedger ledger;
  const auto group = make_counting_communicator(ranks.communicator(), ledger);
  std::vector<float> values(1000, 1.0f);
  Work work = group->all_reduce(tensor_of(values), ReduceOp::sum, ranks.stream);
  group->progress();
  work.wait(ranks.stream);
  const CommCount count = ledger.take().at("world.all_reduce");
  CHECK(count.bytes == ring_bytes("all_reduce", ranks.size, 4000));
  CHECK(count.busy_s > 0.0);
  CHECK(values[999] == static_cast<float>(ranks.size));
}

TEST_CASE("every operation by way of host memory") {
  Ranks ranks;
  for (const bool deterministic : {false, true}) {
    const std::shared_ptr<Device> host = make_device({.kind = "cpu"});
    const auto group = make_staged_communicator(ranks.communicator(deterministic), host, *ranks.device);
    CHECK(group->transport() == "mpi, host-staged");
    for (int again = 0; again < 2; ++again) {  // the second time in buffers that are there
      for (const std::int64_t count : {1, 64, 5000}) {
        check_all_reduce<float>(ranks, *group, count, ReduceOp::sum, deterministic);
        check_all_reduce<double>(ranks, *group, count, ReduceOp::max, true);
      }
      check_reductions(ranks, *group, 100, deterministic);
      check_moves(ranks, *group, 100);
      check_all_to_all(ranks, *group);
    }
    // Two operations at a time, waited for in the other order; messages round the ring; a group of its own.
    std::vector<float> a = contributions<float>(ranks.rank, 10), b = contributions<float>(ranks.rank, 20);
    Work first = group->all_reduce(tensor_of(a), ReduceOp::max, ranks.stream);
    Work second = group->all_reduce(tensor_of(b), ReduceOp::max, ranks.stream);
    second.wait(ranks.stream);
    first.wait(ranks.stream);
    CHECK(a == serially_reduced<float>(ranks.size, 10, ReduceOp::max));
    CHECK(b == serially_reduced<float>(ranks.size, 20, ReduceOp::max));
    const int before = (ranks.rank + ranks.size - 1) % ranks.size;
    std::vector<float> out = contributions<float>(ranks.rank, 7), in(7, -1.0f);
    Work sent = group->send(tensor_of(out), (ranks.rank + 1) % ranks.size, 3, ranks.stream);
    group->recv(tensor_of(in), before, 3, ranks.stream).wait(ranks.stream);
    sent.wait(ranks.stream);
    CHECK(in == contributions<float>(before, 7));
    const auto half = group->split(ranks.rank % 2, ranks.rank, "half");
    CHECK(half->size() == (ranks.size + 1 - ranks.rank % 2) / 2);
  }
}
