#include "engine/data/data_loader.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

using namespace pdl;
using namespace std::chrono_literals;

namespace {

double seconds_of(const std::function<void()>& action) {
  const auto start = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Images [2, 3, 1] with pixels id, id + 1/4, ...; the label is id modulo 10.
class Images final : public Dataset {
 public:
  explicit Images(std::int64_t samples, std::chrono::microseconds delay = 0us) : samples_(samples), delay_(delay) {}
  DatasetInfo info() const override { return {}; }
  std::int64_t size() const override { return samples_; }
  TensorSpec input_spec() const override { return {DType::fp32, Shape{2, 3, 1}}; }
  TensorSpec target_spec() const override { return {DType::int32, Shape{1}}; }
  void read(std::int64_t id, Tensor input, Tensor target) const override {
    ++reads;
    if (delay_ > 0us) std::this_thread::sleep_for(delay_);
    if (fails && fails(id)) throw std::runtime_error("sample " + std::to_string(id) + " is broken");
    for (int i = 0; i < 6; ++i) input.data<float>()[i] = static_cast<float>(id) + 0.25f * static_cast<float>(i);
    target.data<std::int32_t>()[0] = static_cast<std::int32_t>(id % 10);
  }
  mutable std::atomic<std::int64_t> reads = 0;
  std::function<bool(std::int64_t)> fails;

 private:
  std::int64_t samples_;
  std::chrono::microseconds delay_;
};

/// Tokens [T]: id, id + 1, ...
class Tokens final : public Dataset {
 public:
  explicit Tokens(std::int64_t length) : length_(length) {}
  DatasetInfo info() const override { return {}; }
  std::int64_t size() const override { return 100; }
  TensorSpec input_spec() const override { return {DType::int32, Shape{length_}}; }
  TensorSpec target_spec() const override { return input_spec(); }
  void read(std::int64_t id, Tensor input, Tensor target) const override {
    for (std::int64_t t = 0; t < length_; ++t) {
      input.data<std::int32_t>()[t] = static_cast<std::int32_t>(id + t);
      target.data<std::int32_t>()[t] = static_cast<std::int32_t>(id + t + 1);
    }
  }

 private:
  std::int64_t length_;
};

template <typename T>
void check_images(const HostBatch& batch, const std::vector<std::int64_t>& ids) {
  const auto count = static_cast<std::int64_t>(ids.size());
  REQUIRE(batch.size == count);
  REQUIRE(batch.input.shape() == Shape({count, 2, 3, 1}));
  REQUIRE(batch.target.shape() == Shape({count}));
  REQUIRE(batch.sample_ids.shape() == Shape({count}));
  bool same = true;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t id = ids[static_cast<std::size_t>(n)];
    same &= batch.sample_ids.data<std::int64_t>()[n] == id && batch.target.data<std::int32_t>()[n] == id % 10;
    for (int i = 0; i < 6; ++i)
      same &= batch.input.data<T>()[6 * n + i] == static_cast<T>(static_cast<double>(id) + 0.25 * i);
  }
  CHECK(same);
}

}  // namespace

TEST_CASE("batches come back in the order asked for, with any number of threads and any prefetch") {
  const Images set(1000);
  for (const int threads : {0, 1, 2, 5}) {
    for (const int prefetch : {0, 1, 2, 4}) {
      DataLoader loader(set, {threads, prefetch, DType::fp32}, 7);
      CHECK(loader.capacity() == std::max(1, prefetch));
      std::int64_t pushed = 0, returned = 0;
      const auto ids_of = [](std::int64_t batch) {
        std::vector<std::int64_t> ids(static_cast<std::size_t>(batch % 8));  // empty and ragged ones as well
        std::iota(ids.begin(), ids.end(), 11 * batch);
        return ids;
      };
      while (returned < 40) {
        while (loader.outstanding() < loader.capacity()) loader.push(ids_of(pushed++));
        check_images<float>(loader.next(), ids_of(returned++));
      }
    }
  }
}

TEST_CASE("images become fp64 when asked for") {
  const Images set(50);
  for (const int threads : {0, 2}) {
    DataLoader loader(set, {threads, 2, DType::fp64}, 8);
    const std::vector<std::int64_t> ids = {3, 1, 4, 1, 5};
    loader.push(ids);
    check_images<double>(loader.next(), ids);
  }
  CHECK_THROWS_AS(DataLoader(set, {1, 2, DType::bf16}, 8), Error);
}

TEST_CASE("tokens keep their type and their length, even of one") {
  for (const std::int64_t length : {1, 5}) {
    const Tokens set(length);
    DataLoader loader(set, {1, 2, DType::fp64}, 3);
    loader.push(std::vector<std::int64_t>{7, 9});
    const HostBatch& batch = loader.next();
    REQUIRE(batch.input.shape() == Shape({2, length}));
    REQUIRE(batch.target.shape() == Shape({2, length}));
    CHECK(batch.input.data<std::int32_t>()[length] == 9);
    CHECK(batch.target.data<std::int32_t>()[2 * length - 1] == 9 + length);
  }
}

TEST_CASE("a batch stays valid until the next one is asked for, while later ones are read") {
  const Images set(1000);
  DataLoader loader(set, {2, 3, DType::fp32}, 4);
  for (std::int64_t i = 0; i < 3; ++i) loader.push(std::vector<std::int64_t>{4 * i, 4 * i + 1});
  const HostBatch& first = loader.next();
  loader.push(std::vector<std::int64_t>{40, 41});
  while (set.reads < 8) std::this_thread::yield();
  check_images<float>(first, {0, 1});
}

TEST_CASE("as many batches as prefetch says are read before anyone asks") {
  const Images set(1000);
  DataLoader loader(set, {1, 4, DType::fp32}, 5);
  for (std::int64_t i = 0; i < 4; ++i) loader.push(std::vector<std::int64_t>{i, i + 1, i + 2, i + 3, i + 4});
  for (int i = 0; i < 2000 && set.reads < 20; ++i) std::this_thread::sleep_for(1ms);
  CHECK(set.reads == 20);
  CHECK(loader.outstanding() == 4);
}

TEST_CASE("several threads share one batch of a slow set") {
  const Images set(1000, 20ms);
  std::vector<std::int64_t> ids(32);
  std::iota(ids.begin(), ids.end(), 0);
  DataLoader loader(set, {8, 1, DType::fp32}, 32);
  loader.push(ids);
  // 0.64 s of waiting in one thread; sleeping threads need no cores.
  CHECK(seconds_of([&] { loader.next(); }) < 0.4);
}

TEST_CASE("asking wrongly is refused") {
  const Images set(10);
  DataLoader loader(set, {1, 2, DType::fp32}, 2);
  CHECK_THROWS_AS(loader.next(), Error);
  CHECK_THROWS_AS(loader.push(std::vector<std::int64_t>{1, 2, 3}), Error);
  loader.push(std::vector<std::int64_t>{1});
  loader.push(std::vector<std::int64_t>{2});
  CHECK_THROWS_AS(loader.push(std::vector<std::int64_t>{3}), Error);
  check_images<float>(loader.next(), {1});
  loader.push(std::vector<std::int64_t>{10});
  check_images<float>(loader.next(), {2});
  CHECK_THROWS_WITH(loader.next(), ContainsSubstring("sample 10"));
}

TEST_CASE("a reader's exception comes out of next, for the earliest sample, and later batches still come") {
  for (const int threads : {0, 1, 4}) {
    for (int round = 0; round < 20; ++round) {
      Images set(1000);
      set.fails = [](std::int64_t id) { return id >= 100 && id < 200 && id % 3 == 0; };
      DataLoader loader(set, {threads, 3, DType::fp32}, 60);
      std::vector<std::int64_t> bad(60);
      std::iota(bad.begin(), bad.end(), 91);
      loader.push(std::vector<std::int64_t>{1, 2});
      loader.push(bad);
      loader.push(std::vector<std::int64_t>{5});
      check_images<float>(loader.next(), {1, 2});
      CHECK_THROWS_WITH(loader.next(), "sample 102 is broken");
      CHECK(loader.outstanding() == 1);
      check_images<float>(loader.next(), {5});
    }
  }
}

TEST_CASE("a loader can go at any time, whatever is outstanding") {
  const std::vector<std::int64_t> ids(64, 1);
  for (const int threads : {0, 1, 3}) {
    const Images slow(100, 5ms);
    const double taken = seconds_of([&] {
      DataLoader loader(slow, {threads, 4, DType::fp32}, 64);
      for (int i = 0; i < 4; ++i) loader.push(ids);
      if (threads > 0)
        while (slow.reads == 0) std::this_thread::yield();
    });
    CHECK(slow.reads < 4 * 64);
    CHECK(taken < 0.4);  // reading all would take 1.3 s in one thread, 0.43 s in three
  }
  Images failing(100);
  failing.fails = [](std::int64_t) { return true; };
  DataLoader loader(failing, {2, 2, DType::fp32}, 64);
  loader.push(ids);
  loader.push(ids);
}
