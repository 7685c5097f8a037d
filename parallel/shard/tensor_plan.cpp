// What tensor parallelism does to a model, found by asking the model for its layers: which numbers have to divide, and
// what its layers send.

#include <algorithm>
#include <utility>
#include <vector>

#include "parallel/comm/counting_communicator.h"
#include "parallel/shard/tensor_parallel.h"

namespace pdl {
namespace {

enum class Kind { column, row, embedding, loss };

/// A divided layer, which may be a part of a block.
struct Divided {
  std::string name;
  Kind kind = Kind::column;
  std::int64_t width = 0;  ///< inputs of a column layer, outputs of a row layer or of the embedding
};

/// A number that must be a multiple of the ranks, or, of a vocabulary, at least as large.
struct Extent {
  std::string what;
  std::int64_t count = 0;
  bool must_divide = true;
};

/// What a model's layers say of their division, in the order of the model.
struct Division {
  std::vector<Divided> layers;
  std::vector<Extent> heads, extents;

  /// Heads first, which say more to a user than the rows that they are.
  std::vector<Extent> all_extents() const {
    std::vector<Extent> all = heads;
    all.insert(all.end(), extents.begin(), extents.end());
    return all;
  }
};

/// Makes dense layers and notes what would be divided.
class DivisionReader final : public LayerFactory {
 public:
  DivisionReader(SpreadOver spread, Division& found) : spread_(spread), found_(found) {}

  std::unique_ptr<Layer> linear(std::string name, const LinearOptions& options) const override {
    note(name, options.split, options.in, options.out, options.in / options.pixels, "inputs", "outputs");
    return LayerFactory::linear(std::move(name), options);
  }
  std::unique_ptr<Layer> conv2d(std::string name, const ConvOptions& options) const override {
    note(name, options.split, options.in, options.out, options.in, "input channels", "output channels");
    return LayerFactory::conv2d(std::move(name), options);
  }
  std::unique_ptr<Layer> attention(std::string name, std::int64_t heads, std::int64_t width,
                                   double dropout) const override {
    found_.heads.push_back({str(heads, " heads of ", name), heads});
    return LayerFactory::attention(std::move(name), heads, width, dropout);
  }
  std::unique_ptr<Layer> embedding(std::string name, const EmbeddingOptions& options) const override {
    found_.layers.push_back({name, Kind::embedding, options.width});
    found_.extents.push_back({str("vocabulary of ", options.vocabulary), options.vocabulary, false});
    return LayerFactory::embedding(std::move(name), options);
  }
  std::unique_ptr<Layer> lm_head(std::string name, std::int64_t width, std::int64_t vocabulary,
                                 std::string tied_to) const override {
    found_.layers.push_back({name, Kind::column, width});
    return LayerFactory::lm_head(std::move(name), width, vocabulary, std::move(tied_to));
  }
  std::unique_ptr<Layer> lm_loss(std::string name, std::int64_t vocabulary, std::int64_t classes) const override {
    found_.layers.push_back({name, Kind::loss, 4});
    return LayerFactory::lm_loss(std::move(name), vocabulary, classes);
  }
  bool divides_convolutions() const override { return spread_ != SpreadOver::samples; }

 private:
  void note(const std::string& name, Split split, std::int64_t in, std::int64_t out, std::int64_t divided_in,
            const char* inputs, const char* outputs) const {
    if (split == Split::column) {
      found_.layers.push_back({name, Kind::column, in});
      found_.extents.push_back({str(out, " ", outputs, " of ", name), out});
    } else if (split == Split::row) {
      found_.layers.push_back({name, Kind::row, out});
      found_.extents.push_back({str(divided_in, " ", inputs, " of ", name), divided_in});
    }
  }

  SpreadOver spread_;
  Division& found_;
};

std::string obstacle(const std::vector<Extent>& extents, int parts) {
  for (const Extent& extent : extents) {
    if (extent.must_divide && extent.count % parts != 0) return str("it does not divide the ", extent.what);
    if (extent.count < parts) return str("it is more than the ", extent.what);
  }
  return "";
}

/// Counts operations of whole tensors.
class Counter {
 public:
  Counter(CommCounts& counts, int parts) : counts_(counts), parts_(parts) {}
  void add(const char* operation, std::int64_t bytes) {
    counts_[operation].calls += 1;
    counts_[operation].bytes += ring_bytes(operation, parts_, bytes);
  }

 private:
  CommCounts& counts_;
  int parts_;
};

/// What a layer sends whose whole tensor has `bytes`; `wants_input_grad`: it is not the model's first.
void add_traffic(TensorTraffic& traffic, const Divided& layer, SpreadOver spread, int parts, std::int64_t bytes,
                 bool wants_input_grad) {
  Counter forward(traffic.forward, parts), backward(traffic.backward, parts);
  const bool spreads = spread != SpreadOver::none;
  switch (layer.kind) {
    case Kind::column:
      if (spreads) forward.add("all_gather", bytes);
      if (spreads) backward.add("all_gather", bytes);
      if (wants_input_grad) backward.add(spreads ? "reduce_scatter" : "all_reduce", bytes);
      break;
    case Kind::row:
    case Kind::embedding:
      forward.add(spreads ? "reduce_scatter" : "all_reduce", bytes);
      if (spreads) backward.add("all_gather", bytes);
      break;
    case Kind::loss:
      forward.add("all_gather", parts * bytes);
      break;
  }
}

}  // namespace

std::string obstacle_to_tensor_parallel(const ModelDescription& model, SpreadOver spread, int parts, int ranks) {
  if (parts == 1) return "";
  Division division;
  model.build(DivisionReader(spread, division));
  const bool is_text = model.sample_input.dtype == DType::int32;
  if (spread == SpreadOver::sequence && !is_text) return str(model.name, " has no sequences");
  if (spread == SpreadOver::samples && is_text) return str(model.name, " has no convolutions");
  if (division.layers.empty()) return str(model.name, " has no pair of layers to divide; nearest: 1");
  std::vector<Extent> extents = division.all_extents();
  if (spread == SpreadOver::sequence) {
    const std::int64_t length = model.sample_input.shape[0];
    extents.push_back({str(length, " tokens of a sequence"), length});
  }
  if (ranks > 0) extents.insert(extents.begin(), {str(ranks, " ranks"), ranks});
  const std::string problem = obstacle(extents, parts);
  if (problem.empty()) return "";
  std::int64_t most = extents.front().count;
  for (const Extent& extent : extents) most = std::min(most, extent.count);
  int below = std::min<int>(parts - 1, static_cast<int>(most)), above = parts + 1;
  while (below > 1 && !obstacle(extents, below).empty()) --below;
  while (above <= most && !obstacle(extents, above).empty()) ++above;
  return str(problem, "; nearest: ", below, above <= most ? str(" or ", above) : "");
}

TensorTraffic tensor_traffic(const ModelDescription& model, SpreadOver spread, int parts, int first, int last,
                             std::int64_t samples, DType dtype) {
  TensorTraffic traffic;
  if (parts == 1) return traffic;
  Division division;
  const LayerList layers = model.build(DivisionReader(spread, division));
  const std::vector<Shape> shapes =
      layer_input_shapes(layers, model.sample_input, spread == SpreadOver::samples ? parts * samples : samples);
  int index = 0;
  const auto belongs = [&](const Divided& divided) {
    const std::string& name = layers[static_cast<std::size_t>(index)]->name();
    return divided.name == name || divided.name.starts_with(name + ".");
  };
  for (const Divided& divided : division.layers) {
    while (!belongs(divided)) ++index;  // in the order of the model
    if (index < first || index >= last) continue;
    const Shape& x = shapes[static_cast<std::size_t>(index)];
    const std::int64_t rows = divided.kind == Kind::embedding ? x.elements() : x.elements() / x.back();
    const DType type = divided.kind == Kind::loss ? wide_dtype(dtype) : dtype;
    add_traffic(traffic, divided, spread, parts, rows * divided.width * size_of(type), index > 0);
  }
  return traffic;
}

}  // namespace pdl
