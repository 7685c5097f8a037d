// Optimizer updates of the CUDA backend against the CPU's in fp64, over segments that start anywhere.

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"
#include "tests/support/element_codec.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

// Segments with and without decay, odd starts, one of several pieces of work, one empty, and elements of no segment.
const std::vector<UpdateSegment> kSegments = {{0, 3, true},       {3, 41, false},    {50, 70001, true},
                                              {70051, 0, true},   {70051, 1, false}, {70055, 4096, true},
                                              {74151, 777, false}};
constexpr std::int64_t kElements = 75000, kUpdates = 3;
const auto kCount = static_cast<std::int64_t>(kSegments.size());

// Elements that ranges start behind a multiple of 64 bytes: shards start anywhere, each range in its own way.
struct Offsets {
  std::int64_t values, grads, moments;
};
const Offsets kOffsets[] = {{0, 0, 0}, {1, 1, 1}, {3, 0, 2}};

constexpr Tolerance kUpdated = {1e-6, 1e-6, 0.0, 0.0};
// Square roots of sums that started at zero, divided by each other.
constexpr Tolerance kDirection = {5e-6, 5e-6, 0.0, 0.0};

bool in_a_segment(std::int64_t element) {
  return std::any_of(kSegments.begin(), kSegments.end(),
                     [&](const UpdateSegment& s) { return element >= s.offset && element < s.offset + s.count; });
}

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

// Ranges of one run; the moments start at zero, so that updates from the first on are compared.
struct Ranges {
  Ranges(const Offsets& offsets, DType rounded_type)
      : w(random_twin(DType::fp32, {kElements}, 1, -1.0, 1.0, offsets.values)),
        first(DType::fp32, {kElements}, Values(kElements, 0.0), offsets.moments),
        second(DType::fp32, {kElements}, Values(kElements, 0.0), offsets.moments),
        norms(DType::fp64, {kCount, 2}) {
    if (is_half(rounded_type)) rounded.emplace(rounded_type, Shape{kElements}, offsets.values);
    for (std::int64_t update = 0; update < kUpdates; ++update) {
      grads.push_back(
          random_twin(DType::fp32, {kElements}, 100 + static_cast<std::uint64_t>(update), -1.0, 1.0, offsets.grads));
    }
  }
  // The CPU has no 16-bit types.
  Tensor rounded_on(const Side& on) const { return on.on_gpu && rounded ? rounded->tensor() : Tensor(); }
  const Twin& gradient(std::int64_t update) const { return grads[static_cast<std::size_t>(update - 1)]; }

  // The 16-bit weights are the weights rounded once, and nothing outside the segments has changed.
  void check_rest() const {
    const Values weights = w.values(), start = random_values(kElements, 1),
                 halves = rounded ? rounded->values() : weights;
    std::int64_t wrong_rounded = 0, touched = 0;
    for (std::int64_t element = 0; element < kElements; ++element) {
      const auto i = static_cast<std::size_t>(element);
      if (!in_a_segment(element)) {
        touched += weights[i] == static_cast<float>(start[i]) && (!rounded || std::isnan(halves[i])) ? 0 : 1;
      } else if (rounded) {
        wrong_rounded += halves[i] == rounded_to(rounded->tensor().dtype(), weights[i]) ? 0 : 1;
      }
    }
    CHECK(wrong_rounded == 0);
    CHECK(touched == 0);
    CHECK((!rounded || rounded->guards_intact()));
  }

  Twin w, first, second, norms;
  std::optional<DeviceTensor> rounded;
  std::vector<Twin> grads;
};

// Calls test(ranges) for all ways that ranges lie and all types of rounded weights (fp32 stands for none).
template <typename Test>
void for_all_ranges(Test test) {
  for (const Offsets& offsets : kOffsets) {
    for (const DType rounded : kComputeTypes) {
      INFO("offsets " << offsets.values << " " << offsets.grads << " " << offsets.moments << ", rounded to "
                      << name_of(rounded));
      Ranges ranges(offsets, rounded);
      test(ranges);
      ranges.check_rest();
    }
  }
}

}  // namespace

TEST_CASE("cuda: sgd with and without momentum and nesterov") {
  if (gpu() == nullptr) return;
  for_all_ranges([](Ranges& ranges) {
    for (const auto& [momentum, nesterov] : {std::pair{0.0, false}, {0.9, false}, {0.9, true}}) {
      INFO("momentum " << momentum << ", nesterov " << nesterov);
      const auto updates = [&, momentum = momentum, nesterov = nesterov](const Side& on) {
        for (std::int64_t update = 1; update <= kUpdates; ++update) {
          on->sgd_update(ranges.w[on], ranges.rounded_on(on), ranges.gradient(update)[on],
                         momentum == 0.0 ? Tensor() : ranges.first[on], kSegments.data(), kCount,
                         sgd(momentum, nesterov, update));
        }
      };
      agree(DType::fp32, {{ranges.w, "w", kUpdated}, {ranges.first, "momentum", kUpdated}}, updates);
    }
  });
}

TEST_CASE("cuda: sgd's first update does not read the momentum buffer") {
  if (gpu() == nullptr) return;
  const Ranges ranges(kOffsets[0], DType::fp32);
  Twin w = random_twin(DType::fp32, {kElements}, 1), momentum(DType::fp32, {kElements});
  agree(DType::fp32, {{w, "w", kUpdated}, {momentum, "momentum", kUpdated, in_a_segment}}, [&](const Side& on) {
    on->sgd_update(w[on], Tensor(), ranges.gradient(1)[on], momentum[on], kSegments.data(), kCount, sgd(0.9, false, 1));
  });
}

TEST_CASE("cuda: adam and adamw") {
  if (gpu() == nullptr) return;
  for_all_ranges([](Ranges& ranges) {
    for (const bool decoupled : {false, true}) {
      INFO("decoupled " << decoupled);
      agree(DType::fp32,
            {{ranges.w, "w", kUpdated}, {ranges.first, "first", kUpdated}, {ranges.second, "second", kUpdated}},
            [&](const Side& on) {
              for (std::int64_t update = 1; update <= kUpdates; ++update) {
                on->adam_update(ranges.w[on], ranges.rounded_on(on), ranges.gradient(update)[on], ranges.first[on],
                                ranges.second[on], kSegments.data(), kCount, adam(decoupled, update));
              }
            });
    }
  });
}

TEST_CASE("cuda: lamb, its direction apart or in place of the gradients") {
  if (gpu() == nullptr) return;
  constexpr Tolerance kNorms = {1e-5, 1e-5, 0.0, 0.0};
  for_all_ranges([&](Ranges& ranges) {
    Twin apart(DType::fp32, {kElements}, 1);
    for (const bool in_place : {false, true}) {
      INFO("in place " << in_place);
      std::vector<Output> outputs = {{ranges.w, "w", kDirection},
                                     {ranges.first, "first", kUpdated},
                                     {ranges.second, "second", kUpdated},
                                     {ranges.norms, "norms", kNorms}};
      if (!in_place) outputs.push_back({apart, "direction", kDirection, in_a_segment});
      for (Twin& grads : ranges.grads) {
        if (in_place) outputs.push_back({grads, "direction in gradients", kDirection, in_a_segment});
      }
      agree(DType::fp32, outputs, [&](const Side& on) {
        for (std::int64_t update = 1; update <= kUpdates; ++update) {
          const Tensor grads = ranges.gradient(update)[on], direction = in_place ? grads : apart[on];
          on->lamb_direction(direction, ranges.norms[on], ranges.w[on], grads, ranges.first[on], ranges.second[on],
                             kSegments.data(), kCount, adam(true, update));
          on->lamb_apply(ranges.w[on], ranges.rounded_on(on), direction, ranges.norms[on], kSegments.data(), kCount,
                         0.01);
        }
      });
    }
  });
}

TEST_CASE("cuda: lamb's norms are fp64 sums over the old weights and the new direction") {
  if (gpu() == nullptr) return;
  const Ranges ranges(kOffsets[1], DType::fp32);
  const Twin direction(DType::fp32, {kElements});
  for (const Mode& mode : modes_of(DType::fp32)) {
    const Side on = mode.side();
    on->lamb_direction(direction[on], ranges.norms[on], ranges.w[on], ranges.gradient(1)[on], ranges.first[on],
                       ranges.second[on], kSegments.data(), kCount, adam(true, 1));
    gpu()->wait();
    const Values norms = ranges.norms.values(), w = ranges.w.values(), d = direction.values();
    for (std::size_t s = 0; s < kSegments.size(); ++s) {
      INFO(mode.name() << ", segment " << s);
      double weights = 0.0, directions = 0.0;
      for (auto i = static_cast<std::size_t>(kSegments[s].offset), n = i + static_cast<std::size_t>(kSegments[s].count);
           i < n; ++i) {
        weights += w[i] * w[i];
        directions += d[i] * d[i];
      }
      CHECK(norms[2 * s] == Approx(weights).epsilon(1e-12).margin(0.0));
      CHECK(norms[2 * s + 1] == Approx(directions).epsilon(1e-12).margin(0.0));
    }
  }
}

TEST_CASE("cuda: lamb's ratio is 1 where weights or direction vanish, and comes from the norms as given") {
  if (gpu() == nullptr) return;
  const std::vector<UpdateSegment> segments = {{0, 2, true}, {2, 2, true}, {4, 2, true}};
  Twin w(DType::fp32, {6}, {0.0, 0.0, 3.0, 4.0, 3.0, 4.0});
  const Twin direction(DType::fp32, {6}, {1.0, -2.0, 0.0, 0.0, 1.0, -1.0});
  // The last one's norms are of a parameter of which only this part lies here.
  const Twin norms(DType::fp64, {3, 2}, {0.0, 5.0, 25.0, 0.0, 100.0, 16.0});
  agree(DType::fp32, {{w, "w", kUpdated}},
        [&](const Side& on) { on->lamb_apply(w[on], Tensor(), direction[on], norms[on], segments.data(), 3, 0.5); });
}

TEST_CASE("cuda: a range updated in two shards has the bits of the whole") {
  if (gpu() == nullptr) return;
  const Side on = {gpu()->deterministic.get(), true};
  const Ranges whole(kOffsets[0], DType::bf16), parts(kOffsets[0], DType::bf16);
  const std::int64_t cut = 7777, rest = kElements - cut;  // inside the long segment
  const std::vector<UpdateSegment> left = {{0, 3, true}, {3, 41, false}, {50, cut - 50, true}};
  std::vector<UpdateSegment> right = {{0, 70051 - cut, true}};
  for (std::size_t s = 4; s < kSegments.size(); ++s) {
    right.push_back({kSegments[s].offset - cut, kSegments[s].count, kSegments[s].decay});
  }
  const auto update_part = [&](const Ranges& of, std::int64_t start, std::int64_t count,
                               const std::vector<UpdateSegment>& segments, std::int64_t update) {
    const auto range = [&](const Tensor& tensor) { return tensor.range(start, count); };
    on->adam_update(range(of.w[on]), range(of.rounded_on(on)), range(of.gradient(update)[on]), range(of.first[on]),
                    range(of.second[on]), segments.data(), static_cast<std::int64_t>(segments.size()),
                    adam(true, update));
  };
  for (std::int64_t update = 1; update <= kUpdates; ++update) {
    update_part(whole, 0, kElements, kSegments, update);
    update_part(parts, 0, cut, left, update);
    update_part(parts, cut, rest, right, update);
  }
  CHECK((whole.w.bytes() == parts.w.bytes()));
  CHECK((whole.rounded->bytes() == parts.rounded->bytes()));
}

TEST_CASE("cuda: updates read their segments anew on every call") {
  if (gpu() == nullptr) return;
  const Twin grads = random_twin(DType::fp32, {1000}, 3);
  Twin w = random_twin(DType::fp32, {1000}, 2);
  agree(DType::fp32, {{w, "w", kUpdated}}, [&](const Side& on) {
    std::vector<UpdateSegment> segments = {{0, 100, true}, {120, 50, false}};
    for (int call = 0; call < 4; ++call) {  // other segments, at the same address
      on->sgd_update(w[on], Tensor(), grads[on], Tensor(), segments.data(), 2, sgd(0.0, false, 1));
      for (UpdateSegment& segment : segments) {
        segment.offset += 201;
        segment.count += 3;
        segment.decay = !segment.decay;
      }
    }
  });
}

TEST_CASE("cuda: optimizer updates refuse what does not belong together") {
  if (gpu() == nullptr) return;
  const Ranges ranges(kOffsets[0], DType::bf16);
  const Side on = {gpu()->deterministic.get(), true};
  const Tensor w = ranges.w[on], grads = ranges.gradient(1)[on], first = ranges.first[on], second = ranges.second[on];
  const Twin shorter(DType::fp32, {kElements - 1}), halves(DType::bf16, {kElements - 1}),
      few_norms(DType::fp64, {kCount, 1});
  const UpdateSegment* const segments = kSegments.data();
  const UpdateSegment outside = {kElements - 1, 2, true};
  const Tensor none;
  CHECK_THROWS_AS(on->sgd_update(w, none, grads, none, segments, kCount, sgd(0.9, false, 1)), Error);
  CHECK_THROWS_AS(on->sgd_update(w, none, grads, none, segments, kCount, sgd(0.0, true, 1)), Error);
  CHECK_THROWS_AS(on->sgd_update(w, none, shorter[on], first, segments, kCount, sgd(0.9, false, 1)), Error);
  CHECK_THROWS_AS(on->adam_update(w, none, grads, first, shorter[on], segments, kCount, adam(true, 1)), Error);
  CHECK_THROWS_AS(on->adam_update(w, halves[on], grads, first, second, segments, kCount, adam(true, 1)), Error);
  CHECK_THROWS_AS(on->adam_update(w, none, grads, first, second, segments, kCount, adam(true, 0)), Error);
  CHECK_THROWS_AS(on->adam_update(w, none, grads, first, second, &outside, 1, adam(true, 1)), Error);
  CHECK_THROWS_AS(
      on->lamb_direction(shorter[on], ranges.norms[on], w, grads, first, second, segments, kCount, adam(true, 1)),
      Error);
  CHECK_THROWS_AS(on->lamb_direction(grads, few_norms[on], w, grads, first, second, segments, kCount, adam(true, 1)),
                  Error);
  CHECK_THROWS_AS(on->lamb_apply(w, none, grads, few_norms[on], segments, kCount, 0.1), Error);
  gpu()->wait();
  CHECK(difference(ranges.w.values(), ranges.w.expected()) == 0.0);  // nothing was touched on the way
}
