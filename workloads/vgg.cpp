// VGG (Simonyan and Zisserman 2015), configurations A (vgg11) and D (vgg16), without batch norm.
//
//   features: 3x3 convolutions with ReLU, a 2x2 maximum after each group;  classifier: two hidden linear layers with
//   ReLU and dropout, then the classes.
//
// Layers carry torchvision's names, so parameter names are those of its state_dict. Two differences in layout:
// convolution weights lie as [K, R, S, C], and the first classifier weight takes the last map in [H, W, C] order.
//
// Images of 224 pixels end as a 7x7 map. Larger ones are averaged down to 7x7, as in torchvision. Smaller ones (CIFAR's
// 32) keep their own map and have a narrower classifier: 4096 wide it would hold nearly all parameters of a small
// model.
//
// Initial values are torchvision's: convolutions normal with standard deviation sqrt(2 / (K R S)), linear layers
// normal(0, 0.01), biases 0. For smaller images linear weights are uniform within 1 / sqrt(inputs) instead, PyTorch's
// default: 0.01 suits thousands of inputs. With 512 each layer would shrink signals and gradients about sixfold, and
// training would not leave the loss of guessing for hundreds of steps.

#include <algorithm>
#include <cmath>

#include "workloads/models.h"

namespace pdl {

ModelFamily vgg_models();

namespace {

constexpr std::int64_t kFullImage = 224;
constexpr std::int64_t kFullMap = 7;
constexpr std::int64_t kFullClassifier = 4096, kSmallClassifier = 512;
constexpr std::int64_t kClasses = 1000;
constexpr std::int64_t kReduction = 32;  ///< image extent over last map's extent: five pools
constexpr std::int64_t kPool = 0;        ///< stands for a pool in a list of output channels

struct VggKind {
  const char* name;
  const char* summary;
  std::vector<std::int64_t> plan;  ///< output channels of each convolution, kPool for a pool
};

const VggKind* find_kind(const std::string& name) {
  static const std::vector<VggKind> kinds = {
      {"vgg11",
       "VGG-11: 8 convolutions, 3 linear layers",
       {64, kPool, 128, kPool, 256, 256, kPool, 512, 512, kPool, 512, 512, kPool}},
      {"vgg16",
       "VGG-16: 13 convolutions, 3 linear layers",
       {64, 64, kPool, 128, 128, kPool, 256, 256, 256, kPool, 512, 512, 512, kPool, 512, 512, 512, kPool}}};
  const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const VggKind& kind) { return name == kind.name; });
  PDL_CHECK(found != kinds.end(), name);
  return &*found;
}

struct VggOptions {
  const VggKind* kind = nullptr;
  std::int64_t image_size = kFullImage;
  double width_multiplier = 1.0;                    ///< of every convolution's output channels
  std::int64_t classifier_width = kFullClassifier;  ///< 0: the classifier is a single linear layer
  double dropout = 0.5;

  /// Output channels of each convolution, kPool for a pool.
  std::vector<std::int64_t> plan() const {
    std::vector<std::int64_t> scaled = kind->plan;
    for (std::int64_t& out : scaled) {
      if (out != kPool) out = std::max<std::int64_t>(1, std::llround(static_cast<double>(out) * width_multiplier));
    }
    return scaled;
  }
  /// Extent of the last map, and of what the classifier sees of it.
  std::int64_t map() const { return image_size / kReduction; }
  std::int64_t pooled_map() const { return image_size >= kFullImage ? kFullMap : map(); }
};

VggOptions read_vgg(const std::string& name, const ConfigReader& workload) {
  VggOptions options;
  options.kind = find_kind(name);
  options.image_size =
      workload.get<std::int64_t>("image_size", kFullImage, "pixels a side, a multiple of 32", {kReduction, 1 << 14});
  options.width_multiplier =
      workload.get("width_multiplier", 1.0, "scales the channels of every convolution", {0.001, 16});
  options.dropout = workload.get("dropout", 0.5, "rate in the classifier", {0, 1});
  const std::int64_t usual_width = options.image_size >= kFullImage ? kFullClassifier : kSmallClassifier;
  options.classifier_width = workload.get<std::int64_t>(
      "classifier_width", usual_width, "width of the two hidden layers of the classifier; 0: one linear layer only",
      {0, 1 << 20});
  if (options.image_size % kReduction != 0) {
    const std::int64_t below = options.image_size / kReduction * kReduction;
    workload.problem("image_size", str("must be a multiple of ", kReduction, ", got ", options.image_size,
                                       "; nearest: ", below, " or ", below + kReduction));
  }
  if (options.dropout >= 1.0) workload.problem("dropout", "must be below 1: nothing would be left");
  return options;
}

/// Extents of the classifier's linear layers, from the flattened map to the classes.
std::vector<std::int64_t> classifier_extents(const VggOptions& options, std::int64_t classes) {
  const std::vector<std::int64_t> plan = options.plan();
  const std::int64_t last_channels = plan[plan.size() - 2];  // the last entry is a pool
  const std::int64_t inputs = options.pooled_map() * options.pooled_map() * last_channels;
  if (options.classifier_width == 0) return {inputs, classes};
  return {inputs, options.classifier_width, options.classifier_width, classes};
}

InitRule classifier_init(const VggOptions& options, std::int64_t inputs) {
  if (options.image_size >= kFullImage) return {InitRule::Kind::normal, 0.01};
  return {InitRule::Kind::uniform, 1.0 / std::sqrt(static_cast<double>(inputs))};
}

/// Layers with weights come in pairs, a column layer and the row layer that takes its outputs, from the first layer
/// that may be divided on. A last one without a partner stays whole.
class Pairs {
 public:
  Pairs(const VggOptions& options, const LayerFactory& factory) {
    const std::vector<std::int64_t> plan = options.plan();
    const auto convolutions = std::count_if(plan.begin(), plan.end(), [](std::int64_t out) { return out != kPool; });
    first_ = factory.divides_convolutions() ? 0 : convolutions;
    layers_ = convolutions + (options.classifier_width == 0 ? 1 : 3);
  }
  /// Of the layer that comes next.
  Split next() {
    const std::int64_t layer = next_++ - first_;
    if (layer < 0 || (layer % 2 == 0 && layer + 1 == layers_ - first_)) return Split::none;
    return layer % 2 == 0 ? Split::column : Split::row;
  }

 private:
  std::int64_t first_ = 0, layers_ = 0, next_ = 0;
};

void add_features(LayerList& layers, const VggOptions& options, Pairs& pairs, const LayerFactory& factory) {
  std::int64_t channels = 3;
  int place = 0;  // torchvision counts a convolution, its ReLU and a pool as one place each
  for (std::int64_t out : options.plan()) {
    const std::string name = str("features.", place);
    if (out == kPool) {
      layers.push_back(factory.max_pool(name, 2));
      place += 1;
      continue;
    }
    ConvOptions conv;
    conv.in = channels;
    conv.out = out;
    conv.geometry = {.kernel = 3, .stride = 1, .padding = 1};
    conv.activation = Activation::relu;
    conv.split = pairs.next();
    conv.weight_init = {InitRule::Kind::normal, std::sqrt(2.0 / static_cast<double>(out * 3 * 3))};
    layers.push_back(factory.conv2d(name, conv));
    channels = out;
    place += 2;
  }
}

void add_classifier(LayerList& layers, const VggOptions& options, std::int64_t classes, Pairs& pairs,
                    const LayerFactory& factory) {
  const std::vector<std::int64_t> extents = classifier_extents(options, classes);
  int place = 0;  // torchvision counts a linear layer, its ReLU and its dropout as one place each
  for (std::size_t i = 0; i + 1 < extents.size(); ++i) {
    const bool hidden = i + 2 < extents.size();
    LinearOptions linear;
    linear.in = extents[i];
    linear.out = extents[i + 1];
    linear.activation = hidden ? Activation::relu : Activation::none;
    linear.split = pairs.next();
    if (i == 0) linear.pixels = options.pooled_map() * options.pooled_map();
    linear.weight_init = classifier_init(options, extents[i]);
    layers.push_back(factory.linear(str("classifier.", place), linear));
    if (hidden) layers.push_back(factory.dropout(str("classifier.", place + 2), options.dropout, linear.split));
    place += 3;
  }
}

LayerList build_vgg(const VggOptions& options, std::int64_t classes, const LayerFactory& factory) {
  LayerList layers;
  Pairs pairs(options, factory);
  add_features(layers, options, pairs, factory);
  if (options.map() != options.pooled_map()) layers.push_back(factory.adaptive_avg_pool("avgpool", kFullMap, kFullMap));
  layers.push_back(factory.flatten("flatten"));
  add_classifier(layers, options, classes, pairs, factory);
  layers.push_back(factory.loss("loss", classes));
  return layers;
}

/// Of one sample: three times the forward products of convolutions and linear layers, less the first convolution's data
/// gradient, which nobody needs.
double training_flops(const VggOptions& options, std::int64_t classes) {
  double products = 0.0, first = 0.0;
  std::int64_t channels = 3, extent = options.image_size;
  for (std::int64_t out : options.plan()) {
    if (out == kPool) {
      extent /= 2;
      continue;
    }
    products += static_cast<double>(extent * extent * 9 * channels * out);
    if (first == 0.0) first = products;
    channels = out;
  }
  const std::vector<std::int64_t> extents = classifier_extents(options, classes);
  for (std::size_t i = 0; i + 1 < extents.size(); ++i) products += static_cast<double>(extents[i] * extents[i + 1]);
  return 2.0 * (3.0 * products - first);
}

ModelOptions read_model(const std::string& name, const ConfigReader& workload) {
  const VggOptions options = read_vgg(name, workload);
  ModelOptions model;
  model.sample_input = {DType::fp32, {options.image_size, options.image_size, 3}};
  model.sample_target = {DType::int32, {1}};
  model.usual_outputs = kClasses;
  model.build = [options](std::int64_t classes) {
    ModelDescription description;
    description.build = [options, classes](const LayerFactory& factory) {
      return build_vgg(options, classes, factory);
    };
    description.predictions_per_sample = 1;
    description.training_flops_per_sample = training_flops(options, classes);
    description.flops_formula =
        "2 (3 P - P1): P products of convolutions and linear layers, P1 those of the first convolution";
    return description;
  };
  return model;
}

}  // namespace

ModelFamily vgg_models() {
  ModelFamily family;
  family.name = "vgg";
  for (const char* name : {"vgg11", "vgg16"}) family.members.push_back({name, find_kind(name)->summary});
  family.read = read_model;
  return family;
}

}  // namespace pdl
