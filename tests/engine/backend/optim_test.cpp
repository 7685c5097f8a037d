// Optimizer updates against scalar code that follows the published rules one parameter at a time.

#include <cmath>
#include <functional>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

// Segments with and without decay, one longer than a piece of work, one empty, and elements that belong to none.
const std::vector<UpdateSegment> kSegments = {
    {0, 3, true}, {3, 41, false}, {50, 20000, true}, {20050, 0, true}, {20050, 1, false}};
constexpr std::int64_t kElements = 20060, kUpdates = 5;
const auto kCount = static_cast<std::int64_t>(kSegments.size());

OwnedTensor gradients_of(DType dtype, std::int64_t update) {
  return random_tensor(dtype, {kElements}, 100 + static_cast<std::uint64_t>(update));
}

// Calls visit(element, decays) for all elements of all segments.
void for_each_element(const std::function<void(std::int64_t, bool)>& visit) {
  for (const UpdateSegment& segment : kSegments) {
    for (std::int64_t i = segment.offset; i < segment.offset + segment.count; ++i) visit(i, segment.decay);
  }
}

bool in_a_segment(std::int64_t element) {
  bool found = false;
  for (const UpdateSegment& s : kSegments) found = found || (element >= s.offset && element < s.offset + s.count);
  return found;
}

double tolerance(DType dtype) { return dtype == DType::fp64 ? 1e-14 : 5e-7; }

SgdScalars sgd(double momentum, bool nesterov, std::int64_t update) {
  return {.lr = 0.1,
          .momentum = momentum,
          .weight_decay = 0.01,
          .grad_scale = 0.5,
          .nesterov = nesterov,
          .first_update = update == 1};
}

AdamScalars adam(bool decoupled, std::int64_t update) {
  return {.lr = 0.01,
          .beta1 = 0.9,
          .beta2 = 0.99,
          .epsilon = 1e-6,
          .weight_decay = 0.1,
          .decoupled_decay = decoupled,
          .update = update,
          .grad_scale = 0.5};
}

Values naive_sgd(double momentum, bool nesterov) {
  Values w = random_tensor(DType::fp64, {kElements}, 1).values(), buffer(w.size(), 0.0);
  for (std::int64_t update = 1; update <= kUpdates; ++update) {
    const Values grads = gradients_of(DType::fp64, update).values();
    for_each_element([&](std::int64_t element, bool decays) {
      const auto i = static_cast<std::size_t>(element);
      double step = 0.5 * grads[i] + (decays ? 0.01 * w[i] : 0.0);
      if (momentum != 0.0) {
        buffer[i] = update == 1 ? step : momentum * buffer[i] + step;
        step = nesterov ? step + momentum * buffer[i] : buffer[i];
      }
      w[i] -= 0.1 * step;
    });
  }
  return w;
}

Values naive_adam(bool decoupled) {
  Values w = random_tensor(DType::fp64, {kElements}, 1).values(), m(w.size(), 0.0), v(w.size(), 0.0);
  for (std::int64_t update = 1; update <= kUpdates; ++update) {
    const Values grads = gradients_of(DType::fp64, update).values();
    const double t = static_cast<double>(update);
    for_each_element([&](std::int64_t element, bool decays) {
      const auto i = static_cast<std::size_t>(element);
      double g = 0.5 * grads[i];
      if (decays && decoupled) w[i] -= 0.01 * 0.1 * w[i];
      if (decays && !decoupled) g += 0.1 * w[i];
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.99 * v[i] + 0.01 * g * g;
      const double m_hat = m[i] / (1.0 - std::pow(0.9, t)), v_hat = v[i] / (1.0 - std::pow(0.99, t));
      w[i] -= 0.01 * m_hat / (std::sqrt(v_hat) + 1e-6);
    });
  }
  return w;
}

Values naive_lamb() {
  Values w = random_tensor(DType::fp64, {kElements}, 1).values(), m(w.size(), 0.0), v(w.size(), 0.0),
         direction(w.size(), 0.0);
  for (std::int64_t update = 1; update <= kUpdates; ++update) {
    const Values grads = gradients_of(DType::fp64, update).values();
    const double t = static_cast<double>(update);
    for (const UpdateSegment& segment : kSegments) {
      double w_norm = 0.0, d_norm = 0.0;
      const auto first = static_cast<std::size_t>(segment.offset),
                 last = first + static_cast<std::size_t>(segment.count);
      for (std::size_t i = first; i < last; ++i) {
        const double g = 0.5 * grads[i];
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.99 * v[i] + 0.01 * g * g;
        direction[i] = m[i] / (1.0 - std::pow(0.9, t)) / (std::sqrt(v[i] / (1.0 - std::pow(0.99, t))) + 1e-6);
        if (segment.decay) direction[i] += 0.1 * w[i];
        w_norm += w[i] * w[i];
        d_norm += direction[i] * direction[i];
      }
      const double ratio = w_norm > 0.0 && d_norm > 0.0 ? std::sqrt(w_norm / d_norm) : 1.0;
      for (std::size_t i = first; i < last; ++i) w[i] -= 0.01 * ratio * direction[i];
    }
  }
  return w;
}

// Values and state of one run; state starts at zero, momentum poisoned.
struct Run {
  explicit Run(DType type)
      : dtype(type),
        w(random_tensor(type, {kElements}, 1)),
        first(type, {kElements}),
        second(type, {kElements}),
        norms(DType::fp64, {kCount, 2}) {}

  Run& sgd_updates(Backend& backend, double momentum, bool nesterov) {
    for (std::int64_t update = 1; update <= kUpdates; ++update) {
      backend.sgd_update(w, Tensor(), gradients_of(dtype, update), momentum == 0.0 ? Tensor() : first.tensor(),
                         kSegments.data(), kCount, sgd(momentum, nesterov, update));
    }
    return *this;
  }
  Run& adam_updates(Backend& backend, bool decoupled) {
    zero_moments();
    for (std::int64_t update = 1; update <= kUpdates; ++update) {
      backend.adam_update(w, Tensor(), gradients_of(dtype, update), first, second, kSegments.data(), kCount,
                          adam(decoupled, update));
    }
    return *this;
  }
  Run& lamb_updates(Backend& backend, bool in_place) {
    zero_moments();
    for (std::int64_t update = 1; update <= kUpdates; ++update) {
      const OwnedTensor grads = gradients_of(dtype, update);
      OwnedTensor apart(dtype, {kElements});
      const Tensor direction = in_place ? grads.tensor() : apart.tensor();
      backend.lamb_direction(direction, norms, w, grads, first, second, kSegments.data(), kCount, adam(true, update));
      backend.lamb_apply(w, Tensor(), direction, norms, kSegments.data(), kCount, 0.01);
    }
    return *this;
  }
  void zero_moments() {
    first.set(Values(kElements, 0.0));
    second.set(Values(kElements, 0.0));
  }
  // Elements outside all segments are as they were, and so is the memory around.
  bool spared_the_rest() const {
    const OwnedTensor start = random_tensor(dtype, {kElements}, 1);
    bool spared = w.guards_intact() && first.guards_intact() && second.guards_intact() && norms.guards_intact();
    for (std::int64_t i = 0; i < kElements; ++i) spared = spared && (in_a_segment(i) || w.get(i) == start.get(i));
    return spared;
  }

  DType dtype;
  OwnedTensor w, first, second, norms;
};

}  // namespace

TEST_CASE("sgd follows PyTorch's rule with and without momentum and nesterov") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const auto& [momentum, nesterov] : {std::pair{0.0, false}, {0.9, false}, {0.9, true}}) {
      CAPTURE(name_of(dtype), momentum, nesterov);
      const Run run = std::move(Run(dtype).sgd_updates(*cpu.backend, momentum, nesterov));
      CHECK(worst_error(run.w.values(), naive_sgd(momentum, nesterov)) < tolerance(dtype));
      CHECK(run.spared_the_rest());
    }
  }
}

TEST_CASE("adam and adamw follow PyTorch's rules") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const bool decoupled : {false, true}) {
      CAPTURE(name_of(dtype), decoupled);
      const Run run = std::move(Run(dtype).adam_updates(*cpu.backend, decoupled));
      CHECK(worst_error(run.w.values(), naive_adam(decoupled)) < tolerance(dtype));
      CHECK(run.spared_the_rest());
    }
  }
}

TEST_CASE("adam's first update moves every weight by the learning rate") {
  const CpuUnderTest cpu;
  OwnedTensor w(DType::fp64, {3}, {1.0, 2.0, 3.0}), m(DType::fp64, {3}, {0.0, 0.0, 0.0}),
      v(DType::fp64, {3}, {0.0, 0.0, 0.0});
  const OwnedTensor grads(DType::fp64, {3}, {1e-3, -5.0, 100.0});
  const UpdateSegment all = {0, 3, false};
  AdamScalars scalars = adam(true, 1);
  scalars.epsilon = 0.0;
  cpu.backend->adam_update(w, Tensor(), grads, m, v, &all, 1, scalars);
  CHECK(worst_error(w.values(), {0.99, 2.01, 2.99}) < 1e-14);
}

TEST_CASE("lamb follows You et al. with bias correction; its direction may replace the gradients") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    const Run run = std::move(Run(dtype).lamb_updates(*cpu.backend, false));
    CHECK(worst_error(run.w.values(), naive_lamb()) < 4.0 * tolerance(dtype));
    CHECK(run.spared_the_rest());
    const Run in_place = std::move(Run(dtype).lamb_updates(*cpu.backend, true));
    CHECK(same_bits(in_place.w, run.w));
    CHECK(same_bits(in_place.norms, run.norms));
  }
}

TEST_CASE("lamb's norms are those of the old weights and the new direction, zero for an empty segment") {
  const CpuUnderTest cpu;
  Run run(DType::fp32);
  run.zero_moments();
  OwnedTensor direction(DType::fp32, {kElements});
  cpu.backend->lamb_direction(direction, run.norms, run.w, gradients_of(DType::fp32, 1), run.first, run.second,
                              kSegments.data(), kCount, adam(true, 1));
  for (std::int64_t s = 0; s < kCount; ++s) {
    const UpdateSegment& segment = kSegments[static_cast<std::size_t>(s)];
    double weights = 0.0, directions = 0.0;
    for (std::int64_t i = segment.offset; i < segment.offset + segment.count; ++i) {
      weights += run.w.get(i) * run.w.get(i);
      directions += direction.get(i) * direction.get(i);
    }
    CHECK(run.norms.get(2 * s) == Approx(weights).epsilon(1e-12).margin(0.0));
    CHECK(run.norms.get(2 * s + 1) == Approx(directions).epsilon(1e-12).margin(0.0));
  }
}

TEST_CASE("lamb's ratio is 1 where weights or direction vanish, and comes from the norms as given") {
  const CpuUnderTest cpu;
  const std::vector<UpdateSegment> segments = {{0, 2, true}, {2, 2, true}, {4, 2, true}};
  OwnedTensor w(DType::fp64, {6}, {0.0, 0.0, 3.0, 4.0, 3.0, 4.0});
  const OwnedTensor direction(DType::fp64, {6}, {1.0, -2.0, 0.0, 0.0, 1.0, -1.0});
  // The last one's norms are of a parameter of which only this part lies here.
  const OwnedTensor norms(DType::fp64, {3, 2}, {0.0, 5.0, 25.0, 0.0, 100.0, 16.0});
  cpu.backend->lamb_apply(w, Tensor(), direction, norms, segments.data(), 3, 0.5);
  CHECK(w.values() == Values{-0.5, 1.0, 3.0, 4.0, 3.0 - 0.5 * 2.5, 4.0 + 0.5 * 2.5});
}

TEST_CASE("a range updated in two shards has the bits of the whole") {
  const CpuUnderTest cpu;
  Run whole(DType::fp32), parts(DType::fp32);
  whole.adam_updates(*cpu.backend, true);
  parts.zero_moments();
  const std::int64_t cut = 7777;  // inside the long segment
  const Tensor &w = parts.w, &first = parts.first, &second = parts.second;
  for (std::int64_t update = 1; update <= kUpdates; ++update) {
    const OwnedTensor grads = gradients_of(DType::fp32, update);
    const Tensor& g = grads;
    const std::vector<UpdateSegment> left = {{0, 3, true}, {3, 41, false}, {50, cut - 50, true}};
    const std::vector<UpdateSegment> right = {{0, 20050 - cut, true}, {20050 - cut, 1, false}};
    const std::int64_t rest = kElements - cut;
    cpu.backend->adam_update(w.range(0, cut), Tensor(), g.range(0, cut), first.range(0, cut), second.range(0, cut),
                             left.data(), 3, adam(true, update));
    cpu.backend->adam_update(w.range(cut, rest), Tensor(), g.range(cut, rest), first.range(cut, rest),
                             second.range(cut, rest), right.data(), 2, adam(true, update));
  }
  CHECK(same_bits(whole.w, parts.w));
}

TEST_CASE("optimizer updates give the same bits with any number of threads") {
  const CpuUnderTest cpu;
  const auto run = [&](int threads) {
    std::vector<Values> results;
    with_threads(threads, [&] {
      results.push_back(Run(DType::fp32).sgd_updates(*cpu.backend, 0.9, true).w.values());
      results.push_back(Run(DType::fp32).adam_updates(*cpu.backend, true).w.values());
      results.push_back(Run(DType::fp32).lamb_updates(*cpu.backend, false).w.values());
    });
    return results;
  };
  const auto one = run(1);
  CHECK((one == run(2)));
  CHECK((one == run(3)));
}

TEST_CASE("optimizer updates refuse what does not belong together") {
  const CpuUnderTest cpu;
  Run run(DType::fp32);
  run.zero_moments();
  const OwnedTensor grads = gradients_of(DType::fp32, 1), grads64 = gradients_of(DType::fp64, 1);
  OwnedTensor shorter(DType::fp32, {kElements - 1}), narrow_norms(DType::fp32, {kCount, 2}),
      few_norms(DType::fp64, {kCount, 1});
  const UpdateSegment* segments = kSegments.data();
  const UpdateSegment outside = {kElements - 1, 2, true};
  Backend& backend = *cpu.backend;
  CHECK_THROWS_AS(backend.sgd_update(run.w, Tensor(), grads, Tensor(), segments, kCount, sgd(0.9, false, 1)), Error);
  CHECK_THROWS_AS(backend.sgd_update(run.w, Tensor(), grads, Tensor(), segments, kCount, sgd(0.0, true, 1)), Error);
  CHECK_THROWS_AS(backend.sgd_update(run.w, Tensor(), grads64, run.first, segments, kCount, sgd(0.9, false, 1)), Error);
  CHECK_THROWS_AS(backend.adam_update(run.w, Tensor(), grads, run.first, shorter, segments, kCount, adam(true, 1)),
                  Error);
  CHECK_THROWS_AS(backend.adam_update(run.w, Tensor(), grads, run.first, run.second, segments, kCount, adam(true, 0)),
                  Error);
  CHECK_THROWS_AS(backend.adam_update(run.w, Tensor(), grads, run.first, run.second, &outside, 1, adam(true, 1)),
                  Error);
  CHECK_THROWS_AS(
      backend.lamb_direction(shorter, run.norms, run.w, grads, run.first, run.second, segments, kCount, adam(true, 1)),
      Error);
  for (const OwnedTensor* norms : {&narrow_norms, &few_norms}) {
    CHECK_THROWS_AS(
        backend.lamb_direction(grads, *norms, run.w, grads, run.first, run.second, segments, kCount, adam(true, 1)),
        Error);
    CHECK_THROWS_AS(backend.lamb_apply(run.w, Tensor(), grads, *norms, segments, kCount, 0.1), Error);
  }
  CHECK(same_bits(run.w, random_tensor(DType::fp32, {kElements}, 1)));  // nothing was touched on the way
}
