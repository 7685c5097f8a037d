#pragma once
// Causal self-attention as cuDNN runs it: scaled products, mask, softmax and the product with V in one kernel that
// never writes the [T, T] scores. It knows no dropout; attention.cpp has its own way for that.
//
// The packed layouts of backend.h are described to cuDNN as strides, so nothing is copied: in qkv [B, T, A, 3, D] a
// head's q, k and v lie D elements apart, and a token's heads 3 D.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>

#include "engine/backend/cuda/cudnn_graph.h"

namespace pdl::cuda {

/// y = softmax(q k^T / sqrt(D), causal) v, and the statistics of its rows.
CudnnGraph sdpa_forward_graph(const Shape& qkv, DType dtype);
/// dqkv from dy, y, the statistics and qkv. The deterministic one adds up the parts of dq in a fixed order, for which
/// the engine writes [T, T] per head.
CudnnGraph sdpa_backward_graph(const Shape& qkv, DType dtype, bool deterministic);

/// Plans of one backend, made when a shape is first seen (seconds: cuDNN compiles these kernels) and kept.
class SdpaPlans {
 public:
  explicit SdpaPlans(const BackendOptions& options) : options_(options), graphs_(options) {}
  /// Plans for a GPU that is not there, see CudnnGraphs.
  SdpaPlans(const BackendOptions& options, const std::string& device_json)
      : options_(options), graphs_(options, device_json) {}

  /// Whether cuDNN serves qkv [B, T, A, 3, D]: bf16 or fp16, D a multiple of 8 and at most 128, and an engine for both
  /// directions on this device. The first call with a shape plans it.
  bool supported(const Shape& qkv, DType dtype);

  /// Bytes that both directions work in. A smaller batch of the same T, A and D never needs more than a larger one that
  /// was asked for before.
  std::int64_t workspace_bytes(const Shape& qkv, DType dtype);

  /// y [B, T, A, D]; stats fp32 [B, A, T] = log of the sum of exp of a row's scaled scores. `shape` is that of qkv.
  void forward(void* y, float* stats, const void* qkv, const Shape& shape, DType dtype, void* workspace,
               cudaStream_t stream);

  /// dqkv, laid out as qkv, must overlap nothing that is read. As in forward, the first call with a shape measures the
  /// engines, unless results must be deterministic: it repeats itself and waits for the device.
  void backward(void* dqkv, const void* dy, const void* y, const float* stats, const void* qkv, const Shape& shape,
                DType dtype, void* workspace, cudaStream_t stream);

 private:
  CudnnPlans& forward_plans(const Shape& qkv, DType dtype);
  CudnnPlans& backward_plans(const Shape& qkv, DType dtype);
  /// What was promised for a batch at least as large.
  std::int64_t promised_bytes(const Shape& qkv, DType dtype) const;

  BackendOptions options_;
  CudnnGraphs graphs_;
  std::map<CudnnGraphs::Key, std::map<std::int64_t, std::int64_t>> promised_;  ///< bytes by B, by T, A, D and type
};

}  // namespace pdl::cuda
