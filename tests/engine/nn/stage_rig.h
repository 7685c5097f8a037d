#pragma once
// Tiny models, deterministic batches, and a model cut into stages: what the tests of engine/nn run.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/device/device.h"
#include "engine/nn/layers/transformer_block.h"
#include "engine/nn/stage.h"

namespace pdl {

/// A model small enough for finite differences.
struct TinyModel {
  TensorSpec input;              ///< one sample, without N
  std::int64_t predictions = 1;  ///< losses per sample
  std::int64_t outputs = 0;      ///< vocabulary or classes
  std::function<LayerList(const LayerFactory&)> build;
};

/// Two blocks of two heads, width 8, 5 tokens of a vocabulary of 13, tied head; 7 positions, so that two are never
/// used.
TinyModel tiny_gpt(double dropout);
/// The same with `rows` in the token embedding, of which those behind the vocabulary are padding.
TinyModel tiny_gpt_variant(double dropout, Recompute recompute, std::int64_t rows = 13);
/// Three convolutions (one strided, one 5x5), both kinds of pool, two hidden layers with dropout.
TinyModel tiny_vgg(double dropout);
/// The layers that neither has: a linear layer with GELU, a linear layer without bias, a norm between them.
TinyModel tiny_mlp();

/// Samples of a model by id, with everything that a MicroBatch points to.
struct TestBatch {
  MicroBatch micro;
  std::vector<double> images;
  std::vector<float> narrow_images;
  std::vector<std::int32_t> tokens, targets;
  std::vector<std::int64_t> ids;
  std::vector<double> metrics = {0.0, 0.0};
  std::int64_t update = 3;

  double loss() const { return metrics[0] * micro.gradient_scale; }
};

/// The samples `ids`; each loss counts 1 / (predictions of `global_samples` samples).
std::unique_ptr<TestBatch> make_batch(const TinyModel& model, std::vector<std::int64_t> ids,
                                      std::int64_t global_samples, DType dtype = DType::fp64);

/// Gradients or values of every parameter by name, a tied one under its target's.
using ByName = std::map<std::string, std::vector<double>>;

/// A model cut before the layers `cuts`, all stages on one device, each with its own store, scratch and slots.
class Chain {
 public:
  struct Settings {
    std::vector<int> cuts = {};
    std::int64_t max_samples = 4;
    int slots = 1;
    std::vector<LayerRange> recomputed = {};  ///< within pieces
    DType dtype = DType::fp64;
  };
  struct Piece {
    std::unique_ptr<ParamStore> store;
    std::unique_ptr<Stage> stage;
    std::vector<Slot> slots;
    std::vector<char> touched;
  };

  Chain(const TinyModel& model, Settings settings);

  /// Forward through all stages; adds to the batch's metrics.
  void forward(int slot, TestBatch& batch, bool training = true);
  /// Backward through all stages. Gradients add up until clear().
  void backward(int slot, TestBatch& batch, GradientListener* listener = nullptr);
  /// The next backward starts gradients anew.
  void clear();
  /// Sets every parameter to numbers that are nothing special: biases and norms too.
  void scramble_values();

  ByName gradients() const { return read(false); }
  ByName values() const { return read(true); }

  Device& device() { return *device_; }
  Backend& backend() { return *backend_; }
  const LayerList& layers() const { return layers_; }
  std::vector<Piece>& pieces() { return pieces_; }

 private:
  ByName read(bool values) const;
  /// Hands the gradient of tied parameters to the stage that has the target, which adds its own part: as in one stage.
  void hand_over_tied(std::size_t from);
  Tensor input_of(std::size_t piece, int slot, const TestBatch& batch);

  std::unique_ptr<Device> device_;
  std::unique_ptr<Backend> backend_;
  LayerList layers_;
  std::vector<Piece> pieces_;
  std::vector<std::vector<Tensor>> outputs_;  ///< [slot][piece] of the last forward
};

/// |a - b| / |b| over all numbers of the worst parameter.
double worst_relative_difference(const ByName& a, const ByName& b);

}  // namespace pdl
