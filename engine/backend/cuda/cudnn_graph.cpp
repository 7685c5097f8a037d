#include "engine/backend/cuda/cudnn_graph.h"

#include <algorithm>
#include <limits>

#include "engine/device/cuda_device.h"

namespace pdl::cuda {
namespace {

// A point in a stream whose time can be read.
class TimedEvent {
 public:
  TimedEvent() { PDL_CUDA(cudaEventCreate(&event_)); }
  ~TimedEvent() { cudaEventDestroy(event_); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

CudnnDescriptor engine_of(const CudnnDescriptor& config) {
  CudnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.raw();
  std::int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(config.raw(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                       &count, &raw),
              "engine of a configuration");
  return engine;
}

std::vector<cudnnBackendNumericalNote_t> numerical_notes(const CudnnDescriptor& engine) {
  std::int64_t count = 0;
  std::vector<cudnnBackendNumericalNote_t> notes(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
  check_cudnn(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                       static_cast<std::int64_t>(notes.size()), &count, notes.data()),
              "numerical notes of an engine");
  notes.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, CUDNN_NUMERICAL_NOTE_TYPE_COUNT)));
  return notes;
}

bool allowed(const CudnnPlan& plan, const PlanRules& rules) {
  if (rules.deterministic && plan.has(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) return false;
  if (plan.has(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION)) return false;
  if (!rules.exact) return true;
  for (const auto note :
       {CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS, CUDNN_NUMERICAL_NOTE_FFT,
        CUDNN_NUMERICAL_NOTE_WINOGRAD, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6,
        CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13}) {
    if (plan.has(note)) return false;
  }
  return true;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  PDL_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void check_cudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::array<char, 1024> details = {};
  cudnnGetLastErrorString(details.data(), details.size());
  throw Error(str("cuDNN: ", what, ": ", cudnnGetErrorString(status), ". ", details.data()));
}

cudnnDataType_t cudnn_type(DType dtype) {
  switch (dtype) {
    case DType::fp32:
      return CUDNN_DATA_FLOAT;
    case DType::bf16:
      return CUDNN_DATA_BFLOAT16;
    case DType::fp16:
      return CUDNN_DATA_HALF;
    default:
      throw Error(str("the GPU computes in fp32, bf16 and fp16, not in ", name_of(dtype)));
  }
}

// -------------------------------------------------------------------------------------------------------- descriptors
CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  check_cudnn(cudnnBackendCreateDescriptor(type, &raw_), "cudnnBackendCreateDescriptor");
}

CudnnDescriptor::~CudnnDescriptor() {
  if (raw_ != nullptr) cudnnBackendDestroyDescriptor(raw_);
}

void CudnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                          const void* values) {
  const cudnnStatus_t status = cudnnBackendSetAttribute(raw_, name, type, count, values);
  if (status != CUDNN_STATUS_SUCCESS) check_cudnn(status, str("attribute ", static_cast<int>(name)).c_str());
}

std::optional<std::int64_t> CudnnDescriptor::get(cudnnBackendAttributeName_t name) const {
  std::int64_t value = 0, count = 0;
  const cudnnStatus_t status = cudnnBackendGetAttribute(raw_, name, CUDNN_TYPE_INT64, 1, &count, &value);
  if (status != CUDNN_STATUS_SUCCESS || count != 1) return std::nullopt;
  return value;
}

void CudnnDescriptor::finalize() { check_cudnn(cudnnBackendFinalize(raw_), "cudnnBackendFinalize"); }

// ------------------------------------------------------------------------------------------------------------- graphs
Extents4 packed_strides(const Extents4& extents) {
  return {extents[1] * extents[2] * extents[3], extents[2] * extents[3], extents[3], 1};
}

Extents4 nhwc_strides(const Extents4& extents) {
  return {extents[1] * extents[2] * extents[3], 1, extents[3] * extents[1], extents[1]};
}

void CudnnGraph::add_tensor(TensorId id, cudnnDataType_t type, const Extents4& extents, const Extents4& strides,
                            bool in_memory, bool by_value) {
  CudnnDescriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const bool is_virtual = !in_memory;
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, type);
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, extents);
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, strides);
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16);
  tensor.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
  if (by_value) tensor.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
  tensor.finalize();
  PDL_CHECK(tensors_.emplace(id, std::move(tensor)).second, "tensor ", id, " twice");
}

void CudnnGraph::tensor(TensorId id, cudnnDataType_t type, const Extents4& extents, const Extents4& strides) {
  add_tensor(id, type, extents, strides, true, false);
}

TensorId CudnnGraph::scalar(float value) {
  add_tensor(++next_, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, true, true);
  scalars_.emplace_back(next_, value);
  return next_;
}

TensorId CudnnGraph::between(const Extents4& extents, const Extents4& strides, cudnnDataType_t type) {
  add_tensor(++next_, type, extents, strides, false, false);
  return next_;
}

const CudnnDescriptor& CudnnGraph::of(TensorId id) const {
  const auto found = tensors_.find(id);
  PDL_CHECK(found != tensors_.end(), "no tensor ", id);
  return found->second;
}

CudnnDescriptor& CudnnGraph::operation(cudnnBackendDescriptorType_t type) { return operations_.emplace_back(type); }

CudnnDescriptor CudnnGraph::convolution(Conv2dGeometry geometry) {
  using Two = std::array<std::int64_t, 2>;
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  CudnnDescriptor convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  convolution.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, 2);
  convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, Two{1, 1});
  convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, Two{geometry.stride, geometry.stride});
  convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, Two{geometry.padded_rows(), geometry.padding});
  convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, Two{geometry.padded_rows(), geometry.padding});
  convolution.finalize();
  return convolution;
}

void CudnnGraph::convolution_forward(TensorId y, TensorId x, TensorId w, Conv2dGeometry geometry) {
  const float one = 1.0f, zero = 0.0f;
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, details_.emplace_back(convolution(geometry)));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, of(y));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, of(x));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, of(w));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT, 1, &one);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT, 1, &zero);
  op.finalize();
}

void CudnnGraph::convolution_backward_data(TensorId dx, TensorId dy, TensorId w, Conv2dGeometry geometry) {
  const float one = 1.0f, zero = 0.0f;
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, details_.emplace_back(convolution(geometry)));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, of(dx));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, of(dy));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, of(w));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_TYPE_FLOAT, 1, &one);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, CUDNN_TYPE_FLOAT, 1, &zero);
  op.finalize();
}

void CudnnGraph::convolution_backward_weight(TensorId dw, TensorId dy, TensorId x, Conv2dGeometry geometry) {
  const float one = 1.0f, zero = 0.0f;
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, details_.emplace_back(convolution(geometry)));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, of(dw));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, of(dy));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, of(x));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_TYPE_FLOAT, 1, &one);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, CUDNN_TYPE_FLOAT, 1, &zero);
  op.finalize();
}

void CudnnGraph::pointwise(cudnnPointwiseMode_t mode, TensorId y, TensorId x, TensorId b, TensorId t,
                           cudnnDataType_t computed_in) {
  CudnnDescriptor& detail = details_.emplace_back(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  detail.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  detail.set(CUDNN_ATTR_POINTWISE_MATH_PREC, computed_in);
  if (mode == CUDNN_POINTWISE_RELU_FWD) {  // a training that has diverged must show it
    const cudnnNanPropagation_t nan = CUDNN_PROPAGATE_NAN;
    detail.set(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, 1, &nan);
  }
  detail.finalize();
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, detail);
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, of(x));
  if (b != 0) op.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, of(b));
  if (t != 0) op.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, of(t));
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, of(y));
  op.finalize();
}

void CudnnGraph::index(TensorId y, TensorId x, std::int64_t axis) {
  const cudnnPointwiseMode_t mode = CUDNN_POINTWISE_GEN_INDEX;
  CudnnDescriptor& detail = details_.emplace_back(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  detail.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  detail.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_FLOAT);
  detail.set(CUDNN_ATTR_POINTWISE_AXIS, axis);
  detail.finalize();
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, detail);
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, of(x));
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, of(y));
  op.finalize();
}

void CudnnGraph::matmul(TensorId c, TensorId a, TensorId b) {
  CudnnDescriptor& detail = details_.emplace_back(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  detail.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
  detail.finalize();
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, detail);
  op.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, of(a));
  op.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, of(b));
  op.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, of(c));
  op.finalize();
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t op_type, TensorId y, TensorId x) {
  CudnnDescriptor& detail = details_.emplace_back(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  detail.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op_type);
  detail.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  detail.finalize();
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, detail);
  op.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, of(x));
  op.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, of(y));
  op.finalize();
}

void CudnnGraph::reshape(TensorId y, TensorId x) {
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, of(x));
  op.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, of(y));
  op.finalize();
}

// -------------------------------------------------------------------------------------------------------------- plans
bool CudnnPlan::has(cudnnBackendNumericalNote_t note) const {
  return std::find(notes.begin(), notes.end(), note) != notes.end();
}

std::int64_t CudnnPlans::workspace_bytes() const {
  std::int64_t bytes = 0;
  for (const CudnnPlan& plan : plans_) bytes = std::max(bytes, plan.workspace_bytes);
  return bytes;
}

CudnnGraphs::CudnnGraphs(const BackendOptions& options, const std::string& device_json) : options_(options) {
  device_.emplace(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device_->set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
               static_cast<std::int64_t>(device_json.size()), device_json.data());
  device_->finalize();
}

CudnnGraphs::~CudnnGraphs() {
  plans_.clear();
  if (handle_ != nullptr) cudnnDestroy(handle_);
}

cudnnHandle_t CudnnGraphs::handle() {
  if (handle_ == nullptr) check_cudnn(cudnnCreate(&handle_), "cudnnCreate");
  return handle_;
}

std::vector<CudnnDescriptor> CudnnGraphs::engine_configs(const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode) {
  CudnnDescriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (device_) heuristics.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *device_);
  if (!heuristics.try_finalize()) return {};
  std::int64_t count = 0;
  const cudnnStatus_t status = cudnnBackendGetAttribute(heuristics.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                        CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr);
  if (status != CUDNN_STATUS_SUCCESS || count <= 0) return {};
  std::vector<CudnnDescriptor> configs;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; ++i)
    raw.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).raw());
  check_cudnn(cudnnBackendGetAttribute(heuristics.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                       count, &count, raw.data()),
              "engine configurations");
  configs.erase(configs.begin() + static_cast<std::ptrdiff_t>(count), configs.end());
  return configs;
}

std::optional<CudnnPlan> CudnnGraphs::make_plan(CudnnDescriptor config, const PlanRules& rules) {
  CudnnPlan made = {.config = std::move(config), .plan = CudnnDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)};
  const CudnnDescriptor engine = engine_of(made.config);
  made.notes = numerical_notes(engine);
  made.engine = engine.get(CUDNN_ATTR_ENGINE_GLOBAL_INDEX).value_or(-1);
  made.workspace_bytes = made.config.get(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE).value_or(0);
  if (!allowed(made, rules) || made.workspace_bytes > rules.workspace_limit) return std::nullopt;
  if (device_) return made;
  made.plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle_);
  made.plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, made.config);
  if (!made.plan.try_finalize()) return std::nullopt;
  const auto bytes = made.plan.get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
  if (!bytes || *bytes > rules.workspace_limit) return std::nullopt;
  made.workspace_bytes = *bytes;
  return made;
}

CudnnPlans CudnnGraphs::make_plans(CudnnGraph graph, const PlanRules& rules) {
  CudnnDescriptor operations(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const CudnnDescriptor& operation : graph.operations_) raw.push_back(operation.raw());
  operations.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<std::int64_t>(raw.size()),
                 raw.data());
  if (!device_) {
    const cudnnHandle_t here = handle();
    operations.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &here);
  }
  CudnnPlans made;
  made.scalars_ = std::move(graph.scalars_);
  if (!operations.try_finalize()) return made;
  for (const auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    for (CudnnDescriptor& config : engine_configs(operations, mode)) {
      if (made.plans_.size() == rules.candidates) break;
      if (auto plan = make_plan(std::move(config), rules)) made.plans_.push_back(std::move(*plan));
    }
    if (!made.plans_.empty()) break;
  }
  made.graph_.push_back(std::move(operations));
  return made;
}

CudnnPlans& CudnnGraphs::plans(const Key& key, const std::function<CudnnGraph()>& describe, PlanRules rules) {
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  rules.deterministic = rules.deterministic || options_.deterministic;
  return plans_.emplace(key, make_plans(describe(), rules)).first->second;
}

// ---------------------------------------------------------------------------------------------------------- execution
// Of one run; nothing when the plan does not run after all.
std::optional<float> CudnnGraphs::milliseconds(const CudnnPlan& plan, const CudnnDescriptor& pack,
                                               cudaStream_t stream) {
  constexpr int kRuns = 3;
  const TimedEvent start, end;
  if (cudnnBackendExecute(handle_, plan.plan.raw(), pack.raw()) != CUDNN_STATUS_SUCCESS) return std::nullopt;
  PDL_CUDA(cudaEventRecord(start.get(), stream));
  for (int run = 0; run < kRuns; ++run) {
    if (cudnnBackendExecute(handle_, plan.plan.raw(), pack.raw()) != CUDNN_STATUS_SUCCESS) return std::nullopt;
  }
  PDL_CUDA(cudaEventRecord(end.get(), stream));
  PDL_CUDA(cudaEventSynchronize(end.get()));
  float elapsed = 0.0f;
  PDL_CUDA(cudaEventElapsedTime(&elapsed, start.get(), end.get()));
  return elapsed / kRuns;
}

// The plans that may run, the preferred one first: all that fit, or the quickest alone once that is known.
std::vector<std::size_t> CudnnGraphs::order(CudnnPlans& plans, const CudnnDescriptor& pack,
                                            std::int64_t workspace_bytes, cudaStream_t stream) {
  const auto fits = [&](std::size_t i) { return plans.plans_[i].workspace_bytes <= workspace_bytes; };
  if (plans.chosen_ && fits(*plans.chosen_)) return {*plans.chosen_};
  std::vector<std::size_t> candidates;
  for (std::size_t i = 0; i < plans.plans_.size(); ++i) {
    if (fits(i)) candidates.push_back(i);
  }
  PDL_CHECK(!candidates.empty(), "no engine of cuDNN for this operation works in ", workspace_bytes, " bytes");
  if (plans.chosen_ || options_.deterministic || candidates.size() == 1 || is_capturing(stream)) return candidates;
  float best = std::numeric_limits<float>::infinity();
  for (const std::size_t i : candidates) {
    const std::optional<float> time = milliseconds(plans.plans_[i], pack, stream);
    if (!time || *time >= best) continue;
    best = *time;
    plans.chosen_ = i;
  }
  PDL_CHECK(plans.chosen_, "none of cuDNN's engines for this operation ran");
  return {*plans.chosen_};
}

void CudnnGraphs::execute(CudnnPlans& plans, const std::vector<Binding>& bindings, void* workspace,
                          std::int64_t workspace_bytes, cudaStream_t stream) {
  std::vector<TensorId> ids;
  std::vector<const void*> pointers;
  for (const Binding& binding : bindings) {
    PDL_CHECK(reinterpret_cast<std::uintptr_t>(binding.pointer) % 16 == 0, "tensor ", binding.tensor,
              " of a cuDNN graph is not aligned to 16 bytes");
    ids.push_back(binding.tensor);
    pointers.push_back(binding.pointer);
  }
  for (const auto& [id, value] : plans.scalars_) {
    ids.push_back(id);
    pointers.push_back(&value);
  }
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, static_cast<std::int64_t>(ids.size()), ids.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, static_cast<std::int64_t>(pointers.size()),
           pointers.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
  pack.finalize();
  check_cudnn(cudnnSetStream(handle(), stream), "cudnnSetStream");
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  for (const std::size_t i : order(plans, pack, workspace_bytes, stream)) {
    status = cudnnBackendExecute(handle_, plans.plans_[i].plan.raw(), pack.raw());
    if (status == CUDNN_STATUS_SUCCESS) return;
  }
  check_cudnn(status, "cudnnBackendExecute");
}

}  // namespace pdl::cuda
