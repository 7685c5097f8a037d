#include "engine/backend/cuda/sdpa.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pdl::cuda {
namespace {

// Tensors of the graphs.
constexpr TensorId kQ = 1, kK = 2, kV = 3, kY = 4, kStats = 5, kDy = 6, kDq = 7, kDk = 8, kDv = 9, kRowSums = 10,
                   kDqSums = 11;

constexpr std::int64_t kAlignment = 256;

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The first aligned byte.
char* aligned(void* pointer) {
  const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer) % kAlignment);
  return static_cast<char*>(pointer) + (kAlignment - past) % kAlignment;
}

// Extents and strides of what an attention reads and writes.
struct Layout {
  explicit Layout(const Shape& qkv) : b(qkv[0]), t(qkv[1]), a(qkv[2]), d(qkv[4]) {
    PDL_CHECK(qkv.rank() == 5 && qkv[3] == 3, "qkv ", qkv.to_string());
  }

  Extents4 rows() const { return {b, a, t, d}; }
  Extents4 columns() const { return {b, a, d, t}; }  // of a transposed matrix
  Extents4 scores() const { return {b, a, t, t}; }
  Extents4 per_row() const { return {b, a, t, 1}; }
  Extents4 packed_rows() const { return {t * a * 3 * d, 3 * d, a * 3 * d, 1}; }  // of one third of qkv
  Extents4 packed_columns() const { return {t * a * 3 * d, 3 * d, 1, a * 3 * d}; }
  Extents4 y_rows() const { return {t * a * d, d, a * d, 1}; }
  Extents4 transposed_scores() const { return {a * t * t, t * t, 1, t}; }

  std::int64_t row_sum_bytes() const { return aligned(b * a * t * size_of(DType::fp32)); }
  std::int64_t dq_sum_bytes() const { return aligned(b * a * t * d * size_of(DType::fp32)); }

  std::int64_t b, t, a, d;
};

// Where one of q, k, v of the first head and token lies.
const void* third(const void* qkv, std::int64_t which, std::int64_t d, DType dtype) {
  return static_cast<const char*>(qkv) + which * d * size_of(dtype);
}

// What takes the place of a score that is masked.
float masked_score() {
  return cudnnGetVersion() >= 91000 ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::lowest();
}

// The scores where the key is not behind the query, else minus infinity.
TensorId add_causal_mask(CudnnGraph& graph, TensorId scores, const Layout& at) {
  const Extents4 strides = packed_strides(at.scores());
  const TensorId row = graph.between(at.scores(), strides, CUDNN_DATA_INT32),
                 column = graph.between(at.scores(), strides, CUDNN_DATA_INT32),
                 visible = graph.between(at.scores(), strides, CUDNN_DATA_BOOLEAN),
                 masked = graph.between(at.scores(), strides);
  graph.index(row, scores, 2);
  graph.index(column, scores, 3);
  graph.pointwise(CUDNN_POINTWISE_CMP_GE, visible, row, column, 0, CUDNN_DATA_BOOLEAN);
  graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, masked, scores, graph.scalar(masked_score()), visible);
  return masked;
}

// A new value of `extents`, made by one operation.
TensorId apply(CudnnGraph& graph, const Extents4& extents, cudnnPointwiseMode_t mode, TensorId x, TensorId b = 0) {
  const TensorId y = graph.between(extents, packed_strides(extents));
  graph.pointwise(mode, y, x, b);
  return y;
}

TensorId product(CudnnGraph& graph, const Layout& at, TensorId a, TensorId b) {
  const TensorId c = graph.between(at.scores(), packed_strides(at.scores()));
  graph.matmul(c, a, b);
  return c;
}

// Scores or their gradient in the tensors' own type and transposed, as the left side of a product.
TensorId transposed(CudnnGraph& graph, const Layout& at, TensorId scores, cudnnDataType_t type) {
  const TensorId result = graph.between(at.scores(), at.transposed_scores(), type);
  graph.reshape(result, scores);
  return result;
}

float softmax_scale(const Layout& at) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(at.d))); }

}  // namespace

CudnnGraph sdpa_forward_graph(const Shape& qkv, DType dtype) {
  const Layout at(qkv);
  const cudnnDataType_t type = cudnn_type(dtype);
  const Extents4 scores = at.scores(), rows = at.per_row();
  CudnnGraph graph;
  graph.tensor(kQ, type, at.rows(), at.packed_rows());
  graph.tensor(kK, type, at.columns(), at.packed_columns());
  graph.tensor(kV, type, at.rows(), at.packed_rows());
  graph.tensor(kY, type, at.rows(), at.y_rows());
  graph.tensor(kStats, CUDNN_DATA_FLOAT, rows, packed_strides(rows));

  TensorId s = product(graph, at, kQ, kK);
  s = apply(graph, scores, CUDNN_POINTWISE_MUL, s, graph.scalar(softmax_scale(at)));
  s = add_causal_mask(graph, s, at);
  const TensorId largest = graph.between(rows, packed_strides(rows)), sum = graph.between(rows, packed_strides(rows));
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, largest, s);
  s = apply(graph, scores, CUDNN_POINTWISE_SUB, s, largest);
  s = apply(graph, scores, CUDNN_POINTWISE_EXP, s);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, sum, s);
  graph.pointwise(CUDNN_POINTWISE_ADD, kStats, largest, apply(graph, rows, CUDNN_POINTWISE_LOG, sum));
  const TensorId p = graph.between(scores, packed_strides(scores), type);
  graph.pointwise(CUDNN_POINTWISE_DIV, p, s, sum);
  graph.matmul(kY, p, kV);
  return graph;
}

CudnnGraph sdpa_backward_graph(const Shape& qkv, DType dtype, bool deterministic) {
  const Layout at(qkv);
  const cudnnDataType_t type = cudnn_type(dtype);
  const Extents4 scores = at.scores(), rows = at.per_row();
  CudnnGraph graph;
  graph.tensor(kQ, type, at.rows(), at.packed_rows());
  graph.tensor(kK, type, at.columns(), at.packed_columns());
  graph.tensor(kV, type, at.columns(), at.packed_columns());
  for (const TensorId id : {kY, kDy}) graph.tensor(id, type, at.rows(), at.y_rows());
  for (const TensorId id : {kDq, kDk, kDv}) graph.tensor(id, type, at.rows(), at.packed_rows());
  for (const TensorId id : {kStats, kRowSums}) graph.tensor(id, CUDNN_DATA_FLOAT, rows, packed_strides(rows));
  const TensorId scale = graph.scalar(softmax_scale(at));

  // Row sums of dy y, which equal those of dP P.
  const TensorId sum = graph.between(rows, packed_strides(rows));
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, sum, apply(graph, at.rows(), CUDNN_POINTWISE_MUL, kDy, kY));
  graph.pointwise(CUDNN_POINTWISE_MUL, kRowSums, sum, graph.scalar(1.0f));

  // P again, dv = P^T dy.
  TensorId p = product(graph, at, kQ, kK);
  p = apply(graph, scores, CUDNN_POINTWISE_MUL, p, scale);
  p = apply(graph, scores, CUDNN_POINTWISE_SUB, p, kStats);
  p = add_causal_mask(graph, p, at);
  p = apply(graph, scores, CUDNN_POINTWISE_EXP, p);
  graph.matmul(kDv, transposed(graph, at, p, type), kDy);

  // dS = P (dP - row sums) scale, dk = dS^T q.
  TensorId ds = product(graph, at, kDy, kV);
  ds = apply(graph, scores, CUDNN_POINTWISE_SUB, ds, kRowSums);
  ds = apply(graph, scores, CUDNN_POINTWISE_MUL, ds, p);
  ds = apply(graph, scores, CUDNN_POINTWISE_MUL, ds, scale);
  graph.matmul(kDk, transposed(graph, at, ds, type), kQ);

  // dq = dS k.
  const TensorId k = graph.between(at.rows(), at.packed_rows());
  graph.reshape(k, kK);
  if (deterministic) {
    graph.matmul(kDq, ds, k);
  } else {
    graph.tensor(kDqSums, CUDNN_DATA_FLOAT, at.rows(), packed_strides(at.rows()));
    graph.matmul(kDqSums, ds, k);
    graph.pointwise(CUDNN_POINTWISE_IDENTITY, kDq, kDqSums);
  }
  return graph;
}

std::int64_t SdpaPlans::promised_bytes(const Shape& qkv, DType dtype) const {
  constexpr std::int64_t kUnlimited = std::int64_t{1} << 40;
  const auto found = promised_.find({qkv[1], qkv[2], qkv[4], static_cast<std::int64_t>(dtype)});
  if (found == promised_.end()) return kUnlimited;
  const auto larger = found->second.lower_bound(qkv[0]);
  return larger == found->second.end() ? kUnlimited : larger->second;
}

CudnnPlans& SdpaPlans::forward_plans(const Shape& qkv, DType dtype) {
  PlanRules rules;
  rules.candidates = 4;
  rules.workspace_limit = promised_bytes(qkv, dtype) - kAlignment;
  return graphs_.plans(
      {0, static_cast<std::int64_t>(dtype), qkv[0], qkv[1], qkv[2], qkv[4]},
      [&] { return sdpa_forward_graph(qkv, dtype); }, rules);
}

CudnnPlans& SdpaPlans::backward_plans(const Shape& qkv, DType dtype) {
  const Layout at(qkv);
  PlanRules rules;
  rules.candidates = 4;
  rules.workspace_limit =
      promised_bytes(qkv, dtype) - kAlignment - at.row_sum_bytes() - (options_.deterministic ? 0 : at.dq_sum_bytes());
  return graphs_.plans(
      {1, static_cast<std::int64_t>(dtype), qkv[0], qkv[1], qkv[2], qkv[4]},
      [&] { return sdpa_backward_graph(qkv, dtype, options_.deterministic); }, rules);
}

bool SdpaPlans::supported(const Shape& qkv, DType dtype) {
  if (!is_half(dtype) || qkv.rank() != 5 || qkv.elements() == 0) return false;
  if (qkv[1] < 2 || qkv[4] % 8 != 0 || qkv[4] > 128) return false;
  return !forward_plans(qkv, dtype).empty() && !backward_plans(qkv, dtype).empty();
}

std::int64_t SdpaPlans::workspace_bytes(const Shape& qkv, DType dtype) {
  const Layout at(qkv);
  const std::int64_t backward = at.row_sum_bytes() + (options_.deterministic ? 0 : at.dq_sum_bytes()) +
                                backward_plans(qkv, dtype).workspace_bytes();
  const std::int64_t bytes = kAlignment + std::max(forward_plans(qkv, dtype).workspace_bytes(), backward);
  promised_[{qkv[1], qkv[2], qkv[4], static_cast<std::int64_t>(dtype)}][qkv[0]] = bytes;
  return bytes;
}

void SdpaPlans::forward(void* y, float* stats, const void* qkv, const Shape& shape, DType dtype, void* workspace,
                        cudaStream_t stream) {
  CudnnPlans& plans = forward_plans(shape, dtype);
  const std::int64_t d = shape[4];
  graphs_.execute(plans,
                  {{kQ, third(qkv, 0, d, dtype)},
                   {kK, third(qkv, 1, d, dtype)},
                   {kV, third(qkv, 2, d, dtype)},
                   {kY, y},
                   {kStats, stats}},
                  aligned(workspace), plans.workspace_bytes(), stream);
}

void SdpaPlans::backward(void* dqkv, const void* dy, const void* y, const float* stats, const void* qkv,
                         const Shape& shape, DType dtype, void* workspace, cudaStream_t stream) {
  const Layout at(shape);
  CudnnPlans& plans = backward_plans(shape, dtype);
  char* const row_sums = aligned(workspace);
  char* const dq_sums = row_sums + at.row_sum_bytes();
  char* const rest = options_.deterministic ? dq_sums : dq_sums + at.dq_sum_bytes();
  std::vector<Binding> bindings = {{kQ, third(qkv, 0, at.d, dtype)},
                                   {kK, third(qkv, 1, at.d, dtype)},
                                   {kV, third(qkv, 2, at.d, dtype)},
                                   {kY, y},
                                   {kDy, dy},
                                   {kStats, stats},
                                   {kDq, third(dqkv, 0, at.d, dtype)},
                                   {kDk, third(dqkv, 1, at.d, dtype)},
                                   {kDv, third(dqkv, 2, at.d, dtype)},
                                   {kRowSums, row_sums}};
  if (!options_.deterministic) bindings.push_back({kDqSums, dq_sums});
  graphs_.execute(plans, bindings, rest, plans.workspace_bytes(), stream);
}

}  // namespace pdl::cuda
