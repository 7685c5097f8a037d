// Cross entropy of the CUDA backend against the CPU's in fp64.

#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  std::int64_t rows, width, classes;
};
// Image classes, GPT-2's vocabulary padded and not, odd widths, one class.
const Case kCases[] = {{9, 10, 10},     {300, 10, 10},   {5, 2, 2},         {4, 1, 1},         {7, 33, 30},
                       {6, 1057, 1057}, {3, 1000, 1000}, {8, 50304, 50257}, {4, 50257, 50257}, {130, 512, 500}};

constexpr Tolerance kLoss = {3e-6, 3e-6, 3e-6, 3e-6};  // fp32 from logits as they are
constexpr double kScale = 64.0;                        // as loss scaling would have it: fp16 keeps its normal numbers

// All tensors of one call. The padding's logits are the largest of all: nothing may come of them.
struct Loss {
  Loss(DType dtype, const Case& of_in, double range = 6.0)
      : of(of_in),
        logits(random_twin(dtype, {of.rows, of.width}, 1, -range, range)),
        targets(DType::int32, {of.rows}),
        dlogits(dtype, {of.rows, of.width}),
        row_loss(DType::fp32, {of.rows}),
        row_correct(DType::fp32, {of.rows}) {
    Values values = logits.values(), wanted;
    const RandomStream stream(2, RandomUse::synthetic, 0);
    for (std::int64_t row = 0; row < of.rows; ++row) {
      const auto start = values.begin() + row * of.width, end = start + of.classes;
      std::fill(end, start + of.width, 2.0 * range);
      // Targets of every third row are the first maximum, of every third another one: ties are common in bf16.
      const auto first = std::max_element(start, end);
      auto target = stream.below(static_cast<std::uint64_t>(row), static_cast<std::uint32_t>(of.classes));
      if (row % 3 == 1) target = static_cast<std::uint32_t>(first - start);
      if (row % 3 == 2 && target != first - start) start[target] = *first;
      wanted.push_back(target);
    }
    if (of.rows > 2) wanted[static_cast<std::size_t>(of.rows / 2)] = -1.0;
    logits.set(values);
    targets.set(wanted);
  }

  void run(const Side& on, const Twin& gradient, const Twin& from, double scale = kScale) const {
    on->cross_entropy(gradient[on], row_loss[on], row_correct[on], from[on], targets[on], of.classes, scale);
  }
  // Elements of dlogits that are no targets': their errors would drown in the targets'.
  Choice others() const {
    return [wanted = targets.values(), width = of.width](std::int64_t i) {
      return static_cast<double>(i % width) != wanted[static_cast<std::size_t>(i / width)];
    };
  }

  Case of;
  Twin logits, targets, dlogits, row_loss, row_correct;
};

std::string text(DType dtype, const Case& of) {
  return str(name_of(dtype), ", M ", of.rows, ", V ", of.width, ", classes ", of.classes);
}

}  // namespace

TEST_CASE("cuda: cross entropy and its gradient, padding and ignored rows included") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      Loss loss(dtype, of);
      agree(dtype,
            {{loss.row_loss, "loss", kLoss},
             {loss.row_correct, "correct", kExact},
             {loss.dlogits, "dlogits", kRounded},
             {loss.dlogits, "dlogits of others", kRounded, loss.others()}},
            [&](const Side& on) { loss.run(on, loss.dlogits, loss.logits); });
      const Values gradients = loss.dlogits.values();
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < loss.dlogits.elements(); ++i) {
        const bool zero = i % of.width >= of.classes || (of.rows > 2 && i / of.width == of.rows / 2);
        wrong += zero && gradients[static_cast<std::size_t>(i)] != 0.0 ? 1 : 0;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("cuda: cross entropy's gradient may take the logits' place, or be left out") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : {Case{11, 203, 203}, Case{8, 50304, 50257}, Case{40, 16, 10}}) {
      INFO(text(dtype, of));
      Loss loss(dtype, of);
      Twin in_place(dtype, loss.logits.shape(), loss.logits.values());
      agree(dtype,
            {{loss.row_loss, "loss", kLoss},
             {loss.row_correct, "correct", kExact},
             {in_place, "dlogits in logits", kRounded, loss.others()}},
            [&](const Side& on) { loss.run(on, in_place, in_place, 0.5 * kScale); });
      agree(dtype, {{loss.row_loss, "loss alone", kLoss}, {loss.row_correct, "correct", kExact}},
            [&](const Side& on) { loss.run(on, Twin(), loss.logits); });
    }
  }
}

TEST_CASE("cuda: classes at minus infinity count for nothing, wherever they stand") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : {Case{4, 64, 50}, Case{3, 1057, 1057}, Case{3, 50304, 50257}}) {
      INFO(text(dtype, of));
      Loss loss(dtype, of);
      Values logits = loss.logits.values();
      Values wanted(static_cast<std::size_t>(of.rows), static_cast<double>(of.classes - 1));
      for (std::int64_t i = 0; i < loss.logits.elements(); ++i) {
        const std::int64_t row = i / of.width, column = i % of.width;
        const bool hidden = row == 0 ? column < of.classes - 2 : column % 2 != (of.classes - 1) % 2;
        if (hidden) logits[static_cast<std::size_t>(i)] = -kInfinity;
      }
      loss.logits.set(logits);
      loss.targets.set(wanted);
      agree(
          dtype,
          {{loss.row_loss, "loss", kLoss}, {loss.row_correct, "correct", kExact}, {loss.dlogits, "dlogits", kRounded}},
          [&](const Side& on) { loss.run(on, loss.dlogits, loss.logits); });
    }
  }
}

TEST_CASE("cuda: cross entropy survives huge logits and reports broken ones") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    INFO(name_of(dtype));
    const double huge = dtype == DType::fp16 ? 6e4 : 1e30;
    Loss loss(dtype, {3, 4, 4});
    loss.logits.set({huge, 0.0, 0.0, -huge, 1000.0, 1001.0, 999.0, 0.0, -1e4, -1e4, -1e4, -1e4});
    loss.targets.set({0.0, 1.0, 2.0});
    agree(dtype,
          {{loss.row_loss, "loss", kLoss}, {loss.row_correct, "correct", kExact}, {loss.dlogits, "dlogits", kRounded}},
          [&](const Side& on) { loss.run(on, loss.dlogits, loss.logits); });

    const Side on = {gpu()->deterministic.get(), true};
    for (const double broken : {std::nan(""), kInfinity}) {
      for (const std::int64_t width : {4, 5000}) {
        for (const std::int64_t place : {std::int64_t{0}, std::int64_t{1}, width - 1}) {
          INFO("a logit of " << broken << " at " << place << " of " << width);
          Loss bad(dtype, {1, width, width});
          Values logits = bad.logits.values();
          logits[static_cast<std::size_t>(place)] = broken;
          bad.logits.set(logits);
          bad.targets.set({1.0});
          bad.dlogits.set(Values(static_cast<std::size_t>(width), 0.0));
          bad.row_loss.set({0.0});
          bad.run(on, bad.dlogits, bad.logits);
          CHECK(std::isnan(bad.row_loss.values()[0]));
          CHECK(std::isnan(bad.dlogits.values()[2]));
        }
      }
    }
  }
}

TEST_CASE("cuda: cross entropy's gradient keeps its precision where the model is sure") {
  if (gpu() == nullptr) return;
  Loss loss(DType::fp32, {1, 3, 3});
  loss.logits.set({12.0, 0.0, 0.0});
  loss.targets.set({0.0});
  // 1 - p = 1.2e-5: sums in fp32 know it to 1e-7 / 1.2e-5.
  constexpr Tolerance kSure = {1e-2, 1e-2, 0.0, 0.0};
  agree(DType::fp32, {{loss.dlogits, "others", kLoss, loss.others()}, {loss.dlogits, "dlogits", kSure}},
        [&](const Side& on) { loss.run(on, loss.dlogits, loss.logits, 1.0); });
}

TEST_CASE("cuda: cross entropy refuses tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Loss loss(DType::bf16, {2, 5, 5}), longer(DType::bf16, {3, 5, 5});
  const Twin doubles(DType::fp64, {2, 5});
  const Side on = {gpu()->deterministic.get(), true};
  const auto run = [&](const Twin& dlogits, const Loss& rows, const Twin& logits, const Twin& targets,
                       std::int64_t classes) {
    on->cross_entropy(dlogits[on], rows.row_loss[on], rows.row_correct[on], logits[on], targets[on], classes, 1.0);
  };
  CHECK_THROWS_AS(run(longer.dlogits, loss, loss.logits, loss.targets, 5), Error);
  CHECK_THROWS_AS(run(Twin(), longer, loss.logits, loss.targets, 5), Error);
  CHECK_THROWS_AS(run(Twin(), loss, doubles, loss.targets, 5), Error);
  CHECK_THROWS_AS(run(Twin(), loss, loss.logits, loss.row_loss, 5), Error);
  CHECK_THROWS_AS(run(Twin(), loss, loss.logits, loss.targets, 6), Error);
  CHECK_THROWS_AS(run(Twin(), loss, loss.logits, loss.targets, 0), Error);
  gpu()->wait();
}

namespace {

// The rows of a Loss from three shards of its classes, the last of which has the padding; one may have no class at all.
struct LossShards {
  LossShards(DType dtype, const Loss& whole) : stats(DType::fp32, {3, whole.of.rows, 4}) {
    const std::int64_t classes = whole.of.classes, cut = std::max<std::int64_t>(classes / 3 / 8 * 8, 1);
    const std::int64_t ends[] = {cut, std::min(2 * cut + 8, classes), whole.of.width};
    const Values values = whole.logits.values();
    std::int64_t first = 0;
    for (const std::int64_t end : ends) {
      Values own;
      for (std::int64_t row = 0; row < whole.of.rows; ++row) {
        const auto start = values.begin() + row * whole.of.width;
        own.insert(own.end(), start + first, start + end);
      }
      parts.push_back({first, std::min(end, classes) - std::min(first, classes),
                       Twin(dtype, {whole.of.rows, end - first}, own), Twin(dtype, {whole.of.rows, end - first})});
      first = end;
    }
  }
  struct Part {
    std::int64_t first, classes;
    Twin logits, dlogits;
  };
  std::vector<Part> parts;
  Twin stats;
};

}  // namespace

TEST_CASE("cuda: shards of the classes, and what they make of each other's stats") {
  if (gpu() == nullptr) return;
  constexpr Tolerance kSums = {1e-5, 1e-5, 1e-5, 1e-5};
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : {Case{9, 30, 30}, Case{7, 33, 30}, Case{6, 1057, 1057}, Case{8, 50304, 50257},
                           Case{130, 512, 500}, Case{40, 8, 6}}) {
      INFO(text(dtype, of));
      Loss loss(dtype, of);
      LossShards shards(dtype, loss);
      agree(dtype,
            {{shards.stats, "stats", kLoss}, {shards.stats, "sums", kSums, [](std::int64_t i) { return i % 4 == 1; }}},
            [&](const Side& on) {
              for (std::int64_t s = 0; s < 3; ++s) {
                const LossShards::Part& part = shards.parts[static_cast<std::size_t>(s)];
                on->cross_entropy_shard(shards.stats[on].rows(s, 1), part.logits[on], loss.targets[on], part.first,
                                        part.classes);
              }
            });
      for (LossShards::Part& part : shards.parts) {
        if (part.logits.shape()[1] == 0) continue;
        INFO("classes from " << part.first);
        agree(dtype,
              {{loss.row_loss, "loss", kLoss},
               {loss.row_correct, "correct", kExact},
               {part.dlogits, "dlogits", kRounded}},
              [&](const Side& on) {
                on->cross_entropy_join(part.dlogits[on], loss.row_loss[on], loss.row_correct[on], part.logits[on],
                                       loss.targets[on], shards.stats[on], part.first, part.classes, kScale);
              });
        agree(dtype, {{loss.row_loss, "loss alone", kLoss}}, [&](const Side& on) {
          on->cross_entropy_join(Tensor(), loss.row_loss[on], loss.row_correct[on], part.logits[on], loss.targets[on],
                                 shards.stats[on], part.first, part.classes, kScale);
        });
      }
    }
  }
}
