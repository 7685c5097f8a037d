#include "engine/nn/layer_factory.h"

#include "engine/nn/layers/conv2d.h"
#include "engine/nn/layers/elementwise.h"
#include "engine/nn/layers/linear.h"
#include "engine/nn/layers/pooling.h"
#include "engine/nn/layers/text.h"

namespace pdl {

std::unique_ptr<Layer> LayerFactory::linear(std::string name, const LinearOptions& options) const {
  return std::make_unique<Linear>(std::move(name), options);
}
std::unique_ptr<Layer> LayerFactory::conv2d(std::string name, const ConvOptions& options) const {
  return std::make_unique<Conv2d>(std::move(name), options);
}
std::unique_ptr<Layer> LayerFactory::max_pool(std::string name, std::int64_t kernel) const {
  return std::make_unique<MaxPool>(std::move(name), kernel);
}
std::unique_ptr<Layer> LayerFactory::adaptive_avg_pool(std::string name, std::int64_t height,
                                                       std::int64_t width) const {
  return std::make_unique<AdaptiveAvgPool>(std::move(name), height, width);
}
std::unique_ptr<Layer> LayerFactory::flatten(std::string name) const {
  return std::make_unique<Flatten>(std::move(name));
}
std::unique_ptr<Layer> LayerFactory::dropout(std::string name, double rate, Split) const {
  return std::make_unique<Dropout>(std::move(name), rate);
}
std::unique_ptr<Layer> LayerFactory::layernorm(std::string name, std::int64_t width) const {
  return std::make_unique<LayerNorm>(std::move(name), width);
}
std::unique_ptr<Layer> LayerFactory::attention(std::string name, std::int64_t heads, std::int64_t width,
                                               double dropout) const {
  PDL_CHECK(heads > 0 && width % heads == 0, name, ": ", heads, " heads do not divide a width of ", width);
  return std::make_unique<Attention>(std::move(name), width / heads, dropout);
}
std::unique_ptr<Layer> LayerFactory::embedding(std::string name, const EmbeddingOptions& options) const {
  return std::make_unique<Embedding>(std::move(name), options);
}
std::unique_ptr<Layer> LayerFactory::lm_head(std::string name, std::int64_t width, std::int64_t vocabulary,
                                             std::string tied_to) const {
  return std::make_unique<LmHead>(std::move(name), width, vocabulary, std::move(tied_to));
}
std::unique_ptr<Layer> LayerFactory::loss(std::string name, std::int64_t classes) const {
  return std::make_unique<SoftmaxCrossEntropy>(std::move(name), classes);
}
std::unique_ptr<Layer> LayerFactory::lm_loss(std::string name, std::int64_t, std::int64_t classes) const {
  return loss(std::move(name), classes);
}

}  // namespace pdl
