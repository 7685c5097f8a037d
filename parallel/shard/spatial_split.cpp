#include "parallel/shard/spatial_split.h"

#include <utility>

#include "engine/data/batch_plan.h"
#include "parallel/comm/world.h"
#include "parallel/shard/image_rows.h"

namespace pdl {

SpatialOptions read_spatial_options(const ConfigReader& engine) {
  const ConfigReader reader = engine.section("spatial", "images divided over ranks, as far as convolutions go");
  SpatialOptions options;
  options.height = reader.get("height", options.height,
                              "ranks that share the rows of images; they hold as many times the samples", {1, 1 << 14});
  options.overlap = reader.get("overlap", options.overlap, "convolve while rows of the neighbours are on their way");
  return options;
}

bool check_spatial_options(const ConfigReader& engine, const SpatialOptions& options, const EngineContext& context) {
  const std::string obstacle = obstacle_to_split(context.model, options.height, context.world.size());
  if (obstacle.empty()) return true;
  engine.section("spatial", "").problem("height", str(options.height, ": ", obstacle));
  return false;
}

/// Puts layers on slices in place of some, and lets another factory make the rest.
class SpatialSplit::Factory final : public LayerFactory {
 public:
  Factory(const SpatialPlan& plan, const SpatialGroup& group, const LayerFactory& others)
      : plan_(plan), group_(group), others_(others) {}

  std::unique_ptr<Layer> conv2d(std::string name, const ConvOptions& options) const override {
    const SpatialLayer* const layer = plan_.find(name);
    if (layer != nullptr && layer->halo > 0) return std::make_unique<SpatialConv2d>(std::move(name), options, group_);
    return placed(others_.conv2d(std::move(name), options));
  }
  std::unique_ptr<Layer> max_pool(std::string name, std::int64_t kernel) const override {
    return placed(others_.max_pool(std::move(name), kernel));
  }
  std::unique_ptr<Layer> adaptive_avg_pool(std::string name, std::int64_t height, std::int64_t width) const override {
    return placed(others_.adaptive_avg_pool(std::move(name), height, width));
  }
  std::unique_ptr<Layer> flatten(std::string name) const override { return placed(others_.flatten(std::move(name))); }
  std::unique_ptr<Layer> linear(std::string name, const LinearOptions& options) const override {
    return placed(others_.linear(std::move(name), options));
  }
  std::unique_ptr<Layer> dropout(std::string name, double rate, Split below) const override {
    return placed(others_.dropout(std::move(name), rate, below));
  }
  std::unique_ptr<Layer> layernorm(std::string name, std::int64_t width) const override {
    return placed(others_.layernorm(std::move(name), width));
  }
  std::unique_ptr<Layer> attention(std::string name, std::int64_t heads, std::int64_t width,
                                   double dropout) const override {
    return placed(others_.attention(std::move(name), heads, width, dropout));
  }
  std::unique_ptr<Layer> embedding(std::string name, const EmbeddingOptions& options) const override {
    return placed(others_.embedding(std::move(name), options));
  }
  std::unique_ptr<Layer> lm_head(std::string name, std::int64_t width, std::int64_t vocabulary,
                                 std::string tied_to) const override {
    return placed(others_.lm_head(std::move(name), width, vocabulary, std::move(tied_to)));
  }
  std::unique_ptr<Layer> loss(std::string name, std::int64_t classes) const override {
    return placed(others_.loss(std::move(name), classes));
  }

 private:
  /// Pooling and 1 x 1 convolutions work on slices as they are.
  std::unique_ptr<Layer> placed(std::unique_ptr<Layer> layer) const {
    if (layer->name() != plan_.whole_from) return layer;
    return std::make_unique<WholeSamples>(std::move(layer), group_);
  }

  const SpatialPlan& plan_;
  const SpatialGroup& group_;
  const LayerFactory& others_;
};

namespace {

/// The model whose images are one slice of rows.
ModelDescription model_of_slices(const ModelDescription& whole, int parts) {
  ModelDescription model = whole;
  if (parts > 1) model.sample_input.shape[0] /= parts;
  return model;
}

std::unique_ptr<Dataset> slice_of(const std::unique_ptr<Dataset>& images, int part, int parts) {
  if (images == nullptr) return nullptr;
  const std::int64_t height = images->input_spec().shape[0];
  return std::make_unique<ImageRows>(*images, part * height / parts, height / parts);
}

}  // namespace

SpatialSplit::SpatialSplit(const EngineContext& context, const SpatialOptions& options, const LayerFactory& others)
    : dense_(context),
      options_(options),
      plan_(plan_spatial(context.model, options.height)),
      model_(model_of_slices(context.model, options.height)),
      context_{.world = context.world,
               .device = context.device,
               .backend = context.backend,
               .model = model_,
               .training = context.training,
               .data = options.height > 1 ? data_ : context.data,
               .train_samples = context.train_samples,
               .validation_samples = context.validation_samples,
               .loader = context.loader,
               .max_steps_per_epoch = context.max_steps_per_epoch,
               .stop_requested = context.stop_requested},
      slices_{.rank = context.world.rank() % options.height,
              .size = options.height,
              .stream = &context.device.compute_stream(),
              .overlap = options.overlap},
      factory_(std::make_unique<Factory>(plan_, slices_, others)) {
  if (options.height == 1) return;
  data_.train = slice_of(context.data.train, slices_.rank, slices_.size);
  data_.validation = slice_of(context.data.validation, slices_.rank, slices_.size);
}

SpatialSplit::~SpatialSplit() = default;

const LayerFactory& SpatialSplit::factory() const { return *factory_; }

void SpatialSplit::prepare() {
  if (options_.height == 1) return;
  ranks_ = dense_.world.split(group(), slices_.rank, "spatial");
  slices_.ranks = ranks_.get();
}

std::int64_t SpatialSplit::predicted_bytes() const {
  return dense_.training.deterministic ? deterministic_scratch_bytes(options_.height) : 0;
}

CommCounts SpatialSplit::traffic(std::int64_t samples) const {
  CommCounts counts;
  if (options_.height == 1) return counts;
  const std::int64_t size = size_of(dense_.training.dtype);
  const std::int64_t neighbours = (slices_.rank > 0 ? 1 : 0) + (slices_.rank + 1 < slices_.size ? 1 : 0);
  CommCount &sent = counts["spatial.send"], &received = counts["spatial.recv"];
  for (const SpatialLayer& layer : plan_.layers) {
    if (layer.halo == 0) continue;
    const std::int64_t pixels = samples * layer.halo * layer.input[2];
    sent.calls += neighbours * (layer.is_first ? 1 : 2);
    sent.bytes += neighbours * pixels * (layer.input[3] + (layer.is_first ? 0 : layer.out)) * size;
  }
  received.calls = sent.calls;
  // Slices of others' samples leave on the way forward, others' slices of own samples on the way back.
  const std::int64_t own = split_evenly(samples, slices_.size, slices_.rank).count;
  const std::int64_t slice = plan_.whole_input.elements() / slices_.size;
  counts["spatial.all_to_all"] = {.calls = 2,
                                  .bytes = ((samples - own) * slice + own * (slices_.size - 1) * slice) * size};
  return counts;
}

PlanTable SpatialSplit::table() const {
  PlanTable table{.title = str("layers on slices of images, ", options_.height, " ranks each; samples are whole from ",
                               plan_.whole_from, " on"),
                  .columns = {"layer", "rows", "rows of a slice", "halo", "sent forward", "sent backward"},
                  .rows = {}};
  for (const SpatialLayer& layer : plan_.layers) {
    const std::int64_t pixels = 2 * layer.halo * layer.input[2];  // at both ends
    table.rows.push_back({layer.name, str(layer.input[1]), str(layer.input[1] / slices_.size), str(layer.halo),
                          str(pixels * layer.input[3]), str(layer.is_first ? 0 : pixels * layer.out)});
  }
  return table;
}

}  // namespace pdl
