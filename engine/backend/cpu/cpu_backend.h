#pragma once
// The CPU backend: the readable twin of the CUDA one, and in fp64 the oracle.
//
// Most operations are one loop template over fp32 and fp64, in the file named below. Matrix products, convolutions and
// attention have two forms: plain loops in fp64, which must be obviously right, and fast code in fp32. For products and
// convolutions that is oneDNN (onednn_library.h), where the build has it and it is not clearly slower; for attention,
// and for all three without oneDNN, the kernel of gemm.h.
//
// Threads: OpenMP over independent rows or samples only, so that no sum depends on the number of threads. oneDNN makes
// no such promise: with another number of threads its fp32 results may round differently. With the same number they
// are the same on every call.

#include <memory>
#include <string>

#include "engine/backend/backend.h"

namespace pdl {

class GemmScratch;
class OneDnnConv;
class OneDnnMatmul;

class CpuBackend final : public Backend {
 public:
  CpuBackend(Device& device, const BackendOptions& options);
  ~CpuBackend() override;

  // linear.cpp
  using Backend::linear_forward;
  void linear_forward(Tensor y, Tensor pre_activation, Tensor x, Tensor w, Tensor bias, Activation activation,
                      Tensor residual) override;
  using Backend::linear_backward_data;
  void linear_backward_data(Tensor dx, Tensor dbias, Tensor dy, Tensor w, Tensor pre_activation, Activation activation,
                            bool accumulate) override;
  void linear_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, bool accumulate) override;

  // conv.cpp
  void conv2d_forward(Tensor y, Tensor x, Tensor w, Tensor bias, Conv2dGeometry geometry, Activation activation,
                      Tensor workspace) override;
  void conv2d_backward_data(Tensor dx, Tensor dy, Tensor w, Conv2dGeometry geometry, Tensor workspace) override;
  void conv2d_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, Conv2dGeometry geometry, bool accumulate,
                              Tensor workspace) override;
  std::int64_t conv2d_workspace_bytes(const Shape& x, const Shape& w, Conv2dGeometry geometry, DType dtype) override;

  // pool.cpp
  void max_pool_forward(Tensor y, Tensor argmax, Tensor x, std::int64_t kernel) override;
  using Backend::max_pool_backward;
  void max_pool_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor argmax, Tensor y, std::int64_t kernel,
                         bool accumulate) override;
  void adaptive_avg_pool_forward(Tensor y, Tensor x) override;
  void adaptive_avg_pool_backward(Tensor dx, Tensor dy) override;

  // elementwise.cpp
  void activation_forward(Tensor y, Tensor x, Activation activation) override;
  using Backend::activation_backward;
  void activation_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor saved, Activation activation,
                           bool accumulate) override;
  void dropout(Tensor y, Tensor x, const DropoutKey& key) override;
  void residual_add(Tensor y, Tensor residual, Tensor x, const DropoutKey& key) override;

  // norm.cpp
  void layernorm_forward(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor gamma, Tensor beta) override;
  void layernorm_backward(Tensor dx, Tensor dgamma, Tensor dbeta, Tensor dy, Tensor dresidual, Tensor x, Tensor gamma,
                          Tensor mean, Tensor rstd, bool accumulate) override;

  // attention.cpp
  void attention_forward(Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key, std::int64_t first_head,
                         Tensor workspace) override;
  void attention_backward(Tensor dqkv, Tensor dy, Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key,
                          std::int64_t first_head, Tensor workspace) override;
  std::int64_t attention_workspace_bytes(const Shape& qkv, DType dtype) const override;

  // embedding.cpp
  void embedding_forward(Tensor y, Tensor tokens, Tensor wte, Tensor wpe, std::int64_t first_token,
                         const DropoutKey& key) override;
  void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dy, Tensor tokens, std::int64_t first_token,
                          bool accumulate_wte, bool accumulate_wpe) override;

  // loss.cpp
  void cross_entropy(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                     std::int64_t classes, double scale) override;
  void cross_entropy_shard(Tensor stats, Tensor logits, Tensor targets, std::int64_t first_class,
                           std::int64_t classes) override;
  void cross_entropy_join(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                          Tensor stats, std::int64_t first_class, std::int64_t classes, double scale) override;

  // range.cpp
  void fill(Tensor x, double value) override;
  void copy(Tensor y, Tensor x) override;
  void copy_block(Tensor y, std::int64_t y_pitch, Tensor x, std::int64_t x_pitch, std::int64_t rows,
                  std::int64_t columns) override;
  void add(Tensor y, Tensor x, double scale) override;
  void scale(Tensor x, double factor) override;
  void accumulate_sum(Tensor total, Tensor x) override;
  void sum_of_squares(Tensor totals, Tensor x, const UpdateSegment* segments, std::int64_t count) override;

  // optim.cpp
  void sgd_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor momentum,
                  const UpdateSegment* segments, std::int64_t count, const SgdScalars& scalars) override;
  void adam_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor first_moment, Tensor second_moment,
                   const UpdateSegment* segments, std::int64_t count, const AdamScalars& scalars) override;
  void lamb_direction(Tensor direction, Tensor norms, Tensor values, Tensor grads, Tensor first_moment,
                      Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                      const AdamScalars& scalars) override;
  void lamb_apply(Tensor values, Tensor from, Tensor rounded, Tensor direction, Tensor norms,
                  const UpdateSegment* segments, std::int64_t count, double lr) override;

  // cpu_backend.cpp
  std::string name() const override;
  std::string library() const override;
  void set_stream(Stream& stream) override;

 private:
  std::unique_ptr<GemmScratch> scratch_;
  std::unique_ptr<OneDnnMatmul> onednn_matmul_;  // they serve nothing in a build without oneDNN
  std::unique_ptr<OneDnnConv> onednn_conv_;
};

}  // namespace pdl
