#pragma once
// The backend of NVIDIA GPUs: cuBLASLt for matrix products, cuDNN for convolutions and attention, own kernels for the
// rest. It is the twin of the CPU backend: same files, same names, same numbers within rounding.
//
// Everything is queued on the stream that `set_stream` gave; nothing here waits for the device after the first step.
// Compute types are fp32 (with tf32 products when asked), bf16 and fp16; fp64 is the CPU's.
//
// Memory of libraries (GEMM workspace, partial sums) lies outside the arena, see CudaScratch. What depends on the batch
// is asked for through *_workspace_bytes and comes out of the arena.

#include <memory>
#include <string>

#include "engine/backend/backend.h"
#include "engine/device/cuda_device.h"

namespace pdl {

namespace cuda {
class Gemm;
struct Operands;
struct Product;
class CudnnGraphs;
class SdpaPlans;
class SegmentTables;
}  // namespace cuda

class CudaBackend final : public Backend {
 public:
  CudaBackend(Device& device, const BackendOptions& options);
  ~CudaBackend() override;

  std::string name() const override { return "cuda"; }
  std::string library() const override;
  void set_stream(Stream& stream) override { stream_ = native_stream(stream); }
  /// One line for each matrix product so far, with what was chosen for it: see cuda::Gemm::table.
  std::string product_table() const;

  // linear.cpp: cuBLASLt
  using Backend::linear_forward;
  void linear_forward(Tensor y, Tensor pre_activation, Tensor x, Tensor w, Tensor bias, Activation activation,
                      Tensor residual) override;
  using Backend::linear_backward_data;
  void linear_backward_data(Tensor dx, Tensor dbias, Tensor dy, Tensor w, Tensor pre_activation, Activation activation,
                            bool accumulate) override;
  void linear_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, bool accumulate) override;

  // conv.cpp: cuDNN
  void conv2d_forward(Tensor y, Tensor x, Tensor w, Tensor bias, Conv2dGeometry geometry, Activation activation,
                      Tensor workspace) override;
  void conv2d_backward_data(Tensor dx, Tensor dy, Tensor w, Conv2dGeometry geometry, Tensor workspace) override;
  void conv2d_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, Conv2dGeometry geometry, bool accumulate,
                              Tensor workspace) override;
  std::int64_t conv2d_workspace_bytes(const Shape& x, const Shape& w, Conv2dGeometry geometry, DType dtype) override;

  // pool.cu
  void max_pool_forward(Tensor y, Tensor argmax, Tensor x, std::int64_t kernel) override;
  using Backend::max_pool_backward;
  void max_pool_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor argmax, Tensor y, std::int64_t kernel,
                         bool accumulate) override;
  void adaptive_avg_pool_forward(Tensor y, Tensor x) override;
  void adaptive_avg_pool_backward(Tensor dx, Tensor dy) override;

  // elementwise.cu
  void activation_forward(Tensor y, Tensor x, Activation activation) override;
  using Backend::activation_backward;
  void activation_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor saved, Activation activation,
                           bool accumulate) override;
  void dropout(Tensor y, Tensor x, const DropoutKey& key) override;
  void residual_add(Tensor y, Tensor residual, Tensor x, const DropoutKey& key) override;

  // norm.cu
  void layernorm_forward(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor gamma, Tensor beta) override;
  void layernorm_backward(Tensor dx, Tensor dgamma, Tensor dbeta, Tensor dy, Tensor dresidual, Tensor x, Tensor gamma,
                          Tensor mean, Tensor rstd, bool accumulate) override;

  // attention.cpp: cuDNN, or products and attention_kernels.cu
  void attention_forward(Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key, std::int64_t first_head,
                         Tensor workspace) override;
  void attention_backward(Tensor dqkv, Tensor dy, Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key,
                          std::int64_t first_head, Tensor workspace) override;
  std::int64_t attention_workspace_bytes(const Shape& qkv, DType dtype) const override;

  // embedding.cu
  void embedding_forward(Tensor y, Tensor tokens, Tensor wte, Tensor wpe, std::int64_t first_token,
                         const DropoutKey& key) override;
  void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dy, Tensor tokens, std::int64_t first_token,
                          bool accumulate_wte, bool accumulate_wpe) override;

  // loss.cu
  void cross_entropy(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                     std::int64_t classes, double scale) override;
  void cross_entropy_shard(Tensor stats, Tensor logits, Tensor targets, std::int64_t first_class,
                           std::int64_t classes) override;
  void cross_entropy_join(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                          Tensor stats, std::int64_t first_class, std::int64_t classes, double scale) override;

  // range.cu
  void fill(Tensor x, double value) override;
  void copy(Tensor y, Tensor x) override;
  void copy_block(Tensor y, std::int64_t y_pitch, Tensor x, std::int64_t x_pitch, std::int64_t rows,
                  std::int64_t columns) override;
  void add(Tensor y, Tensor x, double scale) override;
  void scale(Tensor x, double factor) override;
  void accumulate_sum(Tensor total, Tensor x) override;
  void sum_of_squares(Tensor totals, Tensor x, const UpdateSegment* segments, std::int64_t count) override;

  // optim.cu
  void sgd_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor momentum,
                  const UpdateSegment* segments, std::int64_t count, const SgdScalars& scalars) override;
  void adam_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor first_moment, Tensor second_moment,
                   const UpdateSegment* segments, std::int64_t count, const AdamScalars& scalars) override;
  void lamb_direction(Tensor direction, Tensor norms, Tensor values, Tensor grads, Tensor first_moment,
                      Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                      const AdamScalars& scalars) override;
  void lamb_apply(Tensor values, Tensor from, Tensor rounded, Tensor direction, Tensor norms,
                  const UpdateSegment* segments, std::int64_t count, double lr) override;

 private:
  /// Whether a product with an epilogue takes less time than the plain one and a pass of its own over so many bytes.
  bool fusing_pays(const cuda::Product& fused, const cuda::Operands& fused_operands, const cuda::Product& plain,
                   const cuda::Operands& plain_operands, std::int64_t pass_bytes);

  Device& device_;
  BackendOptions options_;
  cudaStream_t stream_ = nullptr;
  CudaScratch scratch_;                            ///< partial sums of reductions, one kernel after another
  std::unique_ptr<cuda::Gemm> gemm_;               ///< cublaslt.h
  std::unique_ptr<cuda::CudnnGraphs> cudnn_;       ///< cudnn_graph.h
  std::unique_ptr<cuda::SdpaPlans> sdpa_;          ///< sdpa.h
  std::unique_ptr<cuda::SegmentTables> segments_;  ///< segment_tables.h
};

}  // namespace pdl
