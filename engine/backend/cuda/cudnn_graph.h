#pragma once
// cuDNN's graph API, thinly wrapped. A graph of operations is described (CudnnGraph); cuDNN names the engines that can
// run it; those that keep our rules become plans (CudnnPlans); the plan that runs is the quickest of them, measured on
// the first call, or the first of them when results must not depend on a measurement (CudnnGraphs).
//
// Tensors have four extents, in cuDNN's order: N, C, H, W for images, whatever their layout; B, A, rows, columns for
// attention. The layout is in the strides.

#include <cuda_runtime_api.h>
#include <cudnn_graph.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/backend/backend.h"

namespace pdl::cuda {

/// Throws Error with cuDNN's own explanation when `status` is not success. `what` is the call.
void check_cudnn(cudnnStatus_t status, const char* what);

cudnnDataType_t cudnn_type(DType dtype);

/// Owns one descriptor of the backend API.
class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);
  CudnnDescriptor(CudnnDescriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~CudnnDescriptor();

  cudnnBackendDescriptor_t raw() const { return raw_; }
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count, const void* values);
  void set(cudnnBackendAttributeName_t name, std::int64_t value) { set(name, CUDNN_TYPE_INT64, 1, &value); }
  void set(cudnnBackendAttributeName_t name, cudnnDataType_t value) { set(name, CUDNN_TYPE_DATA_TYPE, 1, &value); }
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.raw_);
  }
  template <std::size_t kCount>
  void set(cudnnBackendAttributeName_t name, const std::array<std::int64_t, kCount>& values) {
    set(name, CUDNN_TYPE_INT64, static_cast<std::int64_t>(kCount), values.data());
  }
  /// The value of an attribute of one int64; nothing when cuDNN does not tell.
  std::optional<std::int64_t> get(cudnnBackendAttributeName_t name) const;
  void finalize();
  bool try_finalize() { return cudnnBackendFinalize(raw_) == CUDNN_STATUS_SUCCESS; }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};

/// Names a tensor of a graph. The caller numbers those that lie in memory, from 1; the graph numbers the others.
using TensorId = std::int64_t;
using Extents4 = std::array<std::int64_t, 4>;

/// Row-major strides.
Extents4 packed_strides(const Extents4& extents);
/// Strides of [N, C, H, W] that lies as [N, H, W, C].
Extents4 nhwc_strides(const Extents4& extents);

/// Operations on tensors, in the order in which they are added. Outputs come first.
class CudnnGraph {
 public:
  /// A tensor in memory, aligned to 16 bytes.
  void tensor(TensorId id, cudnnDataType_t type, const Extents4& extents, const Extents4& strides);
  /// A constant.
  TensorId scalar(float value);
  /// A value between operations, which need never be in memory.
  TensorId between(const Extents4& extents, const Extents4& strides, cudnnDataType_t type = CUDNN_DATA_FLOAT);

  void convolution_forward(TensorId y, TensorId x, TensorId w, Conv2dGeometry geometry);
  void convolution_backward_data(TensorId dx, TensorId dy, TensorId w, Conv2dGeometry geometry);
  void convolution_backward_weight(TensorId dw, TensorId dy, TensorId x, Conv2dGeometry geometry);
  /// y = mode(x, b, t); operands that the mode does not have are 0.
  void pointwise(cudnnPointwiseMode_t mode, TensorId y, TensorId x, TensorId b = 0, TensorId t = 0,
                 cudnnDataType_t computed_in = CUDNN_DATA_FLOAT);
  /// y, int32: the index along `axis` at every element of x.
  void index(TensorId y, TensorId x, std::int64_t axis);
  /// c = a b over the last two extents.
  void matmul(TensorId c, TensorId a, TensorId b);
  /// Over the extents that y has 1 of.
  void reduce(cudnnReduceTensorOp_t op, TensorId y, TensorId x);
  void reshape(TensorId y, TensorId x);

 private:
  friend class CudnnGraphs;

  void add_tensor(TensorId id, cudnnDataType_t type, const Extents4& extents, const Extents4& strides, bool in_memory,
                  bool by_value);
  const CudnnDescriptor& of(TensorId id) const;
  /// The new last operation.
  CudnnDescriptor& operation(cudnnBackendDescriptorType_t type);
  CudnnDescriptor convolution(Conv2dGeometry geometry);

  std::map<TensorId, CudnnDescriptor> tensors_;
  std::vector<CudnnDescriptor> details_;  ///< what the operations refer to
  std::vector<CudnnDescriptor> operations_;
  std::vector<std::pair<TensorId, float>> scalars_;
  TensorId next_ = 1000;
};

/// Which engines may run a graph. None may add up in less than fp32.
struct PlanRules {
  std::int64_t workspace_limit = std::int64_t{256} << 20;
  bool deterministic = false;  ///< the same bits from every run
  bool exact = false;          ///< arithmetic in the tensors' own type: no rounded inputs, no transformed products
  std::size_t candidates = 8;
};

struct CudnnPlan {
  CudnnDescriptor config, plan;
  std::int64_t workspace_bytes = 0, engine = 0;
  std::vector<cudnnBackendNumericalNote_t> notes = {};
  bool has(cudnnBackendNumericalNote_t note) const;
};

/// The engines for one graph, cuDNN's favourite first.
class CudnnPlans {
 public:
  bool empty() const { return plans_.empty(); }
  const std::vector<CudnnPlan>& all() const { return plans_; }
  /// Enough for each of them.
  std::int64_t workspace_bytes() const;

 private:
  friend class CudnnGraphs;
  std::vector<CudnnDescriptor> graph_;  ///< the plans may refer to it
  std::vector<std::pair<TensorId, float>> scalars_;
  std::vector<CudnnPlan> plans_;
  std::optional<std::size_t> chosen_;
};

/// Where a tensor of a graph lies.
struct Binding {
  TensorId tensor;
  const void* pointer;
};

/// A cuDNN handle for the current device, and the plans that were made with it.
class CudnnGraphs {
 public:
  using Key = std::vector<std::int64_t>;

  explicit CudnnGraphs(const BackendOptions& options) : options_(options) {}
  /// Plans without a GPU, for the one that `device_json` describes: cuDNN's own representation of a device. Such plans
  /// cannot run.
  CudnnGraphs(const BackendOptions& options, const std::string& device_json);
  ~CudnnGraphs();
  CudnnGraphs(const CudnnGraphs&) = delete;
  CudnnGraphs& operator=(const CudnnGraphs&) = delete;

  /// The plans under `key`, made when first asked for. Empty when no engine can run the graph within the rules;
  /// `rules.deterministic` is added to when the options ask for it.
  CudnnPlans& plans(const Key& key, const std::function<CudnnGraph()>& describe, PlanRules rules);

  /// Queues the graph. The first call measures the plans on the very tensors given, repeatedly, and waits for that: an
  /// output must not be an input. Throws when no plan fits in `workspace_bytes`.
  void execute(CudnnPlans& plans, const std::vector<Binding>& bindings, void* workspace, std::int64_t workspace_bytes,
               cudaStream_t stream);

 private:
  cudnnHandle_t handle();
  std::vector<CudnnDescriptor> engine_configs(const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode);
  std::optional<CudnnPlan> make_plan(CudnnDescriptor config, const PlanRules& rules);
  CudnnPlans make_plans(CudnnGraph graph, const PlanRules& rules);
  std::optional<float> milliseconds(const CudnnPlan& plan, const CudnnDescriptor& pack, cudaStream_t stream);
  std::vector<std::size_t> order(CudnnPlans& plans, const CudnnDescriptor& pack, std::int64_t workspace_bytes,
                                 cudaStream_t stream);

  BackendOptions options_;
  std::optional<CudnnDescriptor> device_;  ///< of a device that is not there
  cudnnHandle_t handle_ = nullptr;
  std::map<Key, CudnnPlans> plans_;
};

}  // namespace pdl::cuda
