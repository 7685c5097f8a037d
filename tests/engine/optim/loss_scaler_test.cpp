#include "engine/optim/loss_scaler.h"

#include <cmath>
#include <limits>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

LossScaleOptions read(const std::string& json, DType dtype = DType::fp64) {
  const ConfigDocument document = ConfigDocument::parse(json, "run.json");
  const LossScaleOptions options = read_loss_scale_options(document.root(), dtype);
  document.finish();
  return options;
}

/// The factors that the steps are made with: a letter a step, 'o' for one that overflows.
std::vector<double> scales(LossScaler& scaler, const std::string& steps) {
  std::vector<double> scales;
  for (const char step : steps) {
    scales.push_back(scaler.scale());
    scaler.step_done(step == 'o');
  }
  return scales;
}

}  // namespace

TEST_CASE("a dynamic loss scale falls at each overflow and grows after steps in a row without one") {
  LossScaler scaler({.name = "dynamic", .init_scale = 1024.0, .growth_interval = 3}, DType::fp16);
  CHECK(scaler.active());
  CHECK(scales(scaler, "oo....o..o....") == std::vector<double>{1024, 512, 256, 256, 256, 512, 512,  //
                                                                256, 256, 256, 128, 128, 128, 256});
  CHECK(scaler.state() == LossScaleState{256.0, 1, 4, 0});
  CHECK_FALSE(scaler.exhausted());
}

TEST_CASE("the factors of growth and backoff are the given ones") {
  LossScaler scaler(
      {.name = "dynamic", .init_scale = 8.0, .growth_factor = 3.0, .backoff_factor = 0.25, .growth_interval = 1},
      DType::fp32);
  CHECK(scales(scaler, "..o.") == std::vector<double>{8, 24, 72, 18});
  CHECK(scaler.scale() == 54.0);
}

TEST_CASE("a loss scale stops at its minimum, and gives up after ten skips in a row there") {
  LossScaler scaler({.name = "dynamic", .init_scale = 10.0, .min_scale = 4.0}, DType::fp16);
  CHECK(scales(scaler, "ooooooooooo") == std::vector<double>{10, 5, 4, 4, 4, 4, 4, 4, 4, 4, 4});
  CHECK(scaler.state().skips_at_minimum == 9);
  CHECK_FALSE(scaler.exhausted());
  scaler.step_done(false);
  CHECK(scaler.state().skips_at_minimum == 0);
  scales(scaler, "ooooooooo");
  CHECK_FALSE(scaler.exhausted());
  scaler.step_done(true);
  CHECK(scaler.exhausted());
  CHECK(scaler.state().skipped_steps == 21);
}

TEST_CASE("a static loss scale stays, skips, and gives up as one at its minimum") {
  LossScaler scaler({.name = "static", .scale = 128.0}, DType::fp16);
  CHECK(scaler.active());
  CHECK(scales(scaler, ".....ooooooooo.") == std::vector<double>(15, 128.0));
  CHECK_FALSE(scaler.exhausted());
  scales(scaler, "oooooooooo");
  CHECK(scaler.scale() == 128.0);
  CHECK(scaler.exhausted());
}

TEST_CASE("without loss scaling the factor is 1 and nothing is skipped") {
  LossScaler scaler(LossScaleOptions(), DType::fp32);
  CHECK_FALSE(scaler.active());
  CHECK(scaler.scale() == 1.0);
  CHECK_THROWS_AS(scaler.step_done(true), Error);
}

TEST_CASE("a loss scale grows up to where its inverse still has all digits") {
  for (const auto& [dtype, largest] : {std::pair(DType::fp16, 0x1p126), std::pair(DType::fp64, 0x1p1022)}) {
    CHECK(largest_loss_scale(dtype) == largest);
    LossScaler scaler({.name = "dynamic", .init_scale = largest / 4, .growth_interval = 1}, dtype);
    CHECK(scales(scaler, ".....") == std::vector<double>{largest / 4, largest / 2, largest, largest, largest});
  }
}

TEST_CASE("a restored loss scale goes on as the one before would have") {
  const LossScaleOptions options = {.name = "dynamic", .init_scale = 64.0, .growth_interval = 3, .min_scale = 16.0};
  LossScaler first(options, DType::fp16), second(options, DType::fp16);
  for (const std::string before : {"..", "ooooooo", "o"}) {
    scales(first, before);
    second.restore(first.state());
    CHECK(scales(first, "..o......ooo") == scales(second, "..o......ooo"));
    CHECK(first.state() == second.state());
  }
}

TEST_CASE("norm, factor and overflow come from the sum of squares") {
  const GradientScaling plain = gradient_scaling(25.0, 1.0, 0.0);
  CHECK(plain.norm == 5.0);
  CHECK(plain.factor == 1.0);
  CHECK_FALSE(plain.overflow);
  const GradientScaling scaled = gradient_scaling(25.0 * 64.0 * 64.0, 64.0, 0.0);
  CHECK(scaled.norm == 5.0);
  CHECK(scaled.factor == 1.0 / 64.0);
  // The limit holds for gradients without the scale: 5 is above 2, however large they were in between.
  for (const double scale : {1.0, 64.0, 0x1p100, 0x1p-10}) {
    const GradientScaling clipped = gradient_scaling(25.0 * scale * scale, scale, 2.0);
    CHECK(clipped.norm == 5.0);
    CHECK(clipped.factor == 2.0 / (5.0 + 1e-6) / scale);
    CHECK(gradient_scaling(25.0 * scale * scale, scale, 6.0).factor == 1.0 / scale);
  }
  for (const double sum : {kInfinity, std::nan("")}) {
    CHECK(gradient_scaling(sum, 1024.0, 0.0).overflow);
    CHECK(gradient_scaling(sum, 1024.0, 1.0).overflow);
  }
  CHECK_FALSE(gradient_scaling(0.0, 1024.0, 1.0).overflow);
}

TEST_CASE("loss scaling is dynamic by default in fp16 and off elsewhere, with PyTorch's defaults") {
  CHECK(read("{}", DType::fp16).name == "dynamic");
  for (const DType dtype : {DType::fp64, DType::fp32, DType::bf16}) CHECK(read("{}", dtype).name == "none");
  CHECK(read(R"({"name": "none"})", DType::fp16).name == "none");
  const LossScaleOptions options = read(R"({"name": "dynamic"})");
  CHECK(options.init_scale == 65536.0);
  CHECK(options.growth_factor == 2.0);
  CHECK(options.backoff_factor == 0.5);
  CHECK(options.growth_interval == 2000);
  CHECK(options.min_scale == 1.0);
}

TEST_CASE("loss scaling's keys are read") {
  CHECK(read(R"({"name": "static", "scale": 512})").scale == 512.0);
  const LossScaleOptions options = read(
      R"({"name": "dynamic", "init_scale": 8, "growth_factor": 3, "backoff_factor": 0.25, "growth_interval": 7,
          "min_scale": 0.5})");
  CHECK(options.init_scale == 8.0);
  CHECK(options.growth_factor == 3.0);
  CHECK(options.backoff_factor == 0.25);
  CHECK(options.growth_interval == 7);
  CHECK(options.min_scale == 0.5);
}

TEST_CASE("loss scaling's keys that cannot act are problems") {
  CHECK_THROWS_WITH(read(R"({"name": "dynamc"})"), ContainsSubstring("did you mean \"dynamic\""));
  CHECK_THROWS_WITH(read(R"({"name": "dynamc", "init_scale": 8})"), !ContainsSubstring("init_scale"));
  CHECK_THROWS_WITH(read(R"({"name": "static"})"), ContainsSubstring("/scale"));
  CHECK_THROWS_WITH(read(R"({"name": "static", "scale": 0})"), ContainsSubstring("/scale"));
  CHECK_THROWS_WITH(read(R"({"name": "dynamic", "scale": 8})"), ContainsSubstring("acts with name=static only"));
  CHECK_THROWS_WITH(read(R"({"scale": 8})"), ContainsSubstring("name is none"));
  CHECK_THROWS_WITH(read(R"({"name": "static", "scale": 8, "growth_interval": 9})"),
                    ContainsSubstring("acts with name=dynamic only"));
  CHECK_THROWS_WITH(read(R"({"name": "dynamic", "growth_factor": 1})"), ContainsSubstring("must be above 1"));
  for (const char* factor : {"0", "1"}) {
    CHECK_THROWS_WITH(read(str(R"({"name": "dynamic", "backoff_factor": )", factor, "}")),
                      ContainsSubstring(str("must lie between 0 and 1, got ", factor)));
  }
  CHECK_THROWS_WITH(read(R"({"name": "dynamic", "growth_interval": 0})"), ContainsSubstring("/growth_interval"));
  CHECK_THROWS_WITH(read(R"({"name": "dynamic", "init_scal": 8})"), ContainsSubstring("did you mean \"init_scale\""));
  CHECK_THROWS_WITH(read(R"({"name": "dynamic", "init_scale": 8, "min_scale": 16})"),
                    ContainsSubstring("16 is above init_scale, 8"));
  CHECK(read(R"({"name": "static", "scale": 1e300})", DType::fp64).scale == 1e300);
  CHECK_THROWS_WITH(read(R"({"name": "static", "scale": 1e300})", DType::fp32), ContainsSubstring("8.50706e+37"));
}
