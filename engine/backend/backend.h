#pragma once
// The complete list of numeric operations, implemented once per backend (cpu/, cuda/) under the same file names.
//
// Rules for every operation
//   - Outputs come first. Outputs, saved values and workspace are given: nothing allocates. Shapes are checked first.
//   - Work is queued on the stream the backend was told (`set_stream`); on the CPU it is done on return.
//   - A weight gradient is added to its destination when `accumulate` is true, else it overwrites it. Data gradients
//     overwrite, unless the operation says otherwise.
//   - Tensors of one call have one element type, the compute type, with these exceptions, which have wide_dtype() of
//     it: gradients of weights (dw, dbias, dgamma, dbeta, dwte, dwpe), statistics (mean, rstd, stats) and losses.
//   - Statistics, losses and sums are fp32 at least; sums over many elements are formed in fp64 on the CPU.
//   - Data gradient and weight gradient are separate calls, so that communication can start between them. A bias gets
//     its gradient from the call that writes the gradient of the sum it is part of, or else from the weight's.
//   - With `deterministic` every operation gives the same bits on every call with the same inputs.

#include <cstdint>
#include <memory>
#include <string>

#include "engine/backend/operation_arguments.h"
#include "engine/device/device.h"
#include "engine/tensor/tensor.h"

namespace pdl {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;     ///< "cpu" or "cuda"
  virtual std::string library() const = 0;  ///< versions of the libraries below it
  virtual void set_stream(Stream& stream) = 0;

  // --- matrix products: x [M, I], w [O, I], bias [O], y [M, O]
  /// y = activation(x w^T + bias). `bias` may be undefined. For gelu_tanh, `pre_activation` [M, O] receives x w^T +
  /// bias when defined; relu needs none, as y itself tells where it was cut. Without activation `residual` [M, O] may
  /// be defined: y = residual + (x w^T + bias). y overlaps nothing else.
  virtual void linear_forward(Tensor y, Tensor pre_activation, Tensor x, Tensor w, Tensor bias, Activation activation,
                              Tensor residual) = 0;
  void linear_forward(Tensor y, Tensor pre_activation, Tensor x, Tensor w, Tensor bias, Activation activation) {
    linear_forward(y, pre_activation, x, w, bias, activation, Tensor());
  }
  /// dx = dy w. When x was activation(pre_activation), made by the operation before, and `activation` is not none, dx
  /// is the gradient of that pre-activation [M, I] instead: (dy w) * activation'(pre_activation). Then dbias [I], the
  /// gradient of the bias in the pre-activation, (+)= column sums of dx when it is defined.
  virtual void linear_backward_data(Tensor dx, Tensor dbias, Tensor dy, Tensor w, Tensor pre_activation,
                                    Activation activation, bool accumulate) = 0;
  void linear_backward_data(Tensor dx, Tensor dy, Tensor w) {
    linear_backward_data(dx, Tensor(), dy, w, Tensor(), Activation::none, false);
  }
  /// dw (+)= dy^T x; dbias (+)= column sums of dy when dbias is defined.
  virtual void linear_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, bool accumulate) = 0;

  // --- convolutions: x [N, H, W, C], w [K, R, S, C], bias [K], y [N, H', W', K]
  /// Each takes `workspace` (uint8) of at least conv2d_workspace_bytes.
  virtual void conv2d_forward(Tensor y, Tensor x, Tensor w, Tensor bias, Conv2dGeometry geometry, Activation activation,
                              Tensor workspace) = 0;
  virtual void conv2d_backward_data(Tensor dx, Tensor dy, Tensor w, Conv2dGeometry geometry, Tensor workspace) = 0;
  virtual void conv2d_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, Conv2dGeometry geometry,
                                      bool accumulate, Tensor workspace) = 0;
  /// The largest workspace of the three, for x [N, H, W, C] and w [K, R, S, C].
  virtual std::int64_t conv2d_workspace_bytes(const Shape& x, const Shape& w, Conv2dGeometry geometry, DType dtype) = 0;

  // --- pooling: x [N, H, W, C], y [N, H/k, W/k, C], kernel = stride = k, rest dropped
  /// `argmax` [uint8, shape of y]: position r * k + s of the first maximum in its window.
  virtual void max_pool_forward(Tensor y, Tensor argmax, Tensor x, std::int64_t kernel) = 0;
  /// Writes every element of dx. When `y`, the maxima themselves, is defined, x was relu(pre_activation) and dx is the
  /// gradient of that: none passes a maximum that is not above 0. dbias [C], when defined, (+)= column sums of dx.
  virtual void max_pool_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor argmax, Tensor y, std::int64_t kernel,
                                 bool accumulate) = 0;
  void max_pool_backward(Tensor dx, Tensor dy, Tensor argmax, std::int64_t kernel) {
    max_pool_backward(dx, Tensor(), dy, argmax, Tensor(), kernel, false);
  }
  /// Adaptive average pooling to [N, P, Q, C] with PyTorch's window bounds.
  virtual void adaptive_avg_pool_forward(Tensor y, Tensor x) = 0;
  virtual void adaptive_avg_pool_backward(Tensor dx, Tensor dy) = 0;

  // --- element by element
  /// y = activation(x); y may be x. For what a backward pass computes again.
  virtual void activation_forward(Tensor y, Tensor x, Activation activation) = 0;
  /// dx = dy * activation'(saved), saved = pre-activation for gelu_tanh, y for relu. dx may be dy. dbias [C], the
  /// gradient of the bias ahead of the activation, (+)= column sums of dx in rows of C when it is defined.
  virtual void activation_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor saved, Activation activation,
                                   bool accumulate) = 0;
  void activation_backward(Tensor dx, Tensor dy, Tensor saved, Activation activation) {
    activation_backward(dx, Tensor(), dy, saved, activation, false);
  }
  /// y = mask(key) * x / (1 - rate); y may be x. Its own backward, with dy in place of x.
  virtual void dropout(Tensor y, Tensor x, const DropoutKey& key) = 0;
  /// y = residual + dropout(x); y may be residual or x.
  virtual void residual_add(Tensor y, Tensor residual, Tensor x, const DropoutKey& key) = 0;

  // --- layer norm over the last axis: x [M, C], gamma beta [C], mean rstd [M]; 1e-5 is added to the variance
  virtual void layernorm_forward(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor gamma, Tensor beta) = 0;
  /// dx = gradient (+ dresidual when defined: the gradient that reaches x past the norm; dx may be dresidual or dy);
  /// dgamma, dbeta (+)=.
  virtual void layernorm_backward(Tensor dx, Tensor dgamma, Tensor dbeta, Tensor dy, Tensor dresidual, Tensor x,
                                  Tensor gamma, Tensor mean, Tensor rstd, bool accumulate) = 0;

  // --- causal self-attention: qkv [B, T, A, 3, D], y [B, T, A, D]
  /// y = dropout(softmax(q k^T / sqrt(D), causal)) v per head. `stats` [B, A, T] receives log-sum-exp of each row.
  /// Dropout elements of a sample are (head, query, key) of the unsharded [A, T, T], from `first_head` on for a shard.
  virtual void attention_forward(Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key, std::int64_t first_head,
                                 Tensor workspace) = 0;
  virtual void attention_backward(Tensor dqkv, Tensor dy, Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key,
                                  std::int64_t first_head, Tensor workspace) = 0;
  /// Bytes of `workspace` that the two need for a qkv of this shape.
  virtual std::int64_t attention_workspace_bytes(const Shape& qkv, DType dtype) const = 0;

  // --- embedding: tokens int32 [B, T], wte [V, C], wpe [T_max, C], y [B, T, C]
  /// y = dropout(wte[token] + wpe[t]). Tokens outside [first_token, first_token + V) give wte's part as 0 (vocabulary
  /// shards); `wpe` may be undefined.
  virtual void embedding_forward(Tensor y, Tensor tokens, Tensor wte, Tensor wpe, std::int64_t first_token,
                                 const DropoutKey& key) = 0;
  /// dwte[token] (+)= dy, dwpe[t] (+)= sum over b of dy; either may be undefined. dy has been through `dropout`.
  virtual void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dy, Tensor tokens, std::int64_t first_token,
                                  bool accumulate_wte, bool accumulate_wpe) = 0;

  // --- loss: logits [M, V], targets int32 [M]; target -1 is ignored
  /// row_loss [M] = -log softmax(logits)[target]; row_correct [M] = 1 where the first maximum is the target, else 0.
  /// Only the first `classes` columns are classes: those behind them, the padding of a vocabulary, count as minus
  /// infinity. `dlogits`, when defined, receives scale * (softmax - onehot), 0 in ignored rows and padding; may be
  /// logits.
  virtual void cross_entropy(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                             std::int64_t classes, double scale) = 0;
  /// Where classes are divided over ranks: these logits are those of classes [first_class, first_class + classes).
  /// stats [M, 4] = {largest logit, or minus infinity when there is none; sum of exp(logit - largest); the target's
  /// logit, or minus infinity when another shard has it; the class of the first largest, or -1}. Wide, as losses are.
  virtual void cross_entropy_shard(Tensor stats, Tensor logits, Tensor targets, std::int64_t first_class,
                                   std::int64_t classes) = 0;
  /// Then, from the stats [S, M, 4] of all shards in the order of their classes: losses and marks as cross_entropy
  /// gives them, the same bits for every shard, and this shard's dlogits. A target that no shard has: infinite loss.
  virtual void cross_entropy_join(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                                  Tensor stats, std::int64_t first_class, std::int64_t classes, double scale) = 0;

  // --- flat ranges
  virtual void fill(Tensor x, double value) = 0;
  virtual void copy(Tensor y, Tensor x) = 0;  ///< same elements; converts between dtypes
  /// y[r * y_pitch + c] = x[r * x_pitch + c] for r < rows, c < columns: a block of columns of one matrix takes the
  /// place of a block of another. The tensors begin where their blocks do, have one type and share no element.
  virtual void copy_block(Tensor y, std::int64_t y_pitch, Tensor x, std::int64_t x_pitch, std::int64_t rows,
                          std::int64_t columns) = 0;
  virtual void add(Tensor y, Tensor x, double scale) = 0;  ///< y += scale * x
  virtual void scale(Tensor x, double factor) = 0;
  virtual void accumulate_sum(Tensor total, Tensor x) = 0;  ///< total fp64 [1] += sum of x, in a fixed order
  /// totals fp64 [segments] = sum of squares of each segment of x, in an order that its length alone decides.
  virtual void sum_of_squares(Tensor totals, Tensor x, const UpdateSegment* segments, std::int64_t count) = 0;

  // --- optimizer updates over the segments of flat ranges; every range has the same length
  // All ranges are fp32 or fp64; `rounded`, when defined, is fp16 or bf16 and receives the new values. The weights
  // before the update are `from`, which is `values` itself or a range of which no element is among them.
  virtual void sgd_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor momentum,
                          const UpdateSegment* segments, std::int64_t count, const SgdScalars& scalars) = 0;
  void sgd_update(Tensor values, Tensor rounded, Tensor grads, Tensor momentum, const UpdateSegment* segments,
                  std::int64_t count, const SgdScalars& scalars) {
    sgd_update(values, values, rounded, grads, momentum, segments, count, scalars);
  }
  virtual void adam_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor first_moment,
                           Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                           const AdamScalars& scalars) = 0;
  void adam_update(Tensor values, Tensor rounded, Tensor grads, Tensor first_moment, Tensor second_moment,
                   const UpdateSegment* segments, std::int64_t count, const AdamScalars& scalars) {
    adam_update(values, values, rounded, grads, first_moment, second_moment, segments, count, scalars);
  }
  /// LAMB, first half: moments as in Adam, then `direction` = m^ / (sqrt(v^) + eps) + decay * w (may be grads), and
  /// norms fp64 [segments, 2] = squared norms of w and of the direction, to be summed over shards before lamb_apply.
  virtual void lamb_direction(Tensor direction, Tensor norms, Tensor values, Tensor grads, Tensor first_moment,
                              Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                              const AdamScalars& scalars) = 0;
  /// LAMB, second half: w -= lr * ratio * direction, ratio = |w| / |direction|, 1 where either is 0.
  virtual void lamb_apply(Tensor values, Tensor from, Tensor rounded, Tensor direction, Tensor norms,
                          const UpdateSegment* segments, std::int64_t count, double lr) = 0;
  void lamb_apply(Tensor values, Tensor rounded, Tensor direction, Tensor norms, const UpdateSegment* segments,
                  std::int64_t count, double lr) {
    lamb_apply(values, values, rounded, direction, norms, segments, count, lr);
  }
};

/// Throws when the blocks of a copy_block overlap themselves or leave their tensors, or types differ.
void check_block(const Tensor& y, std::int64_t y_pitch, const Tensor& x, std::int64_t x_pitch, std::int64_t rows,
                 std::int64_t columns);

struct BackendOptions {
  bool deterministic = false;
  bool tf32 = false;  ///< fp32 matrix products and convolutions may round their inputs to 10 bits of mantissa
  int sm_margin = 0;  ///< multiprocessors of a GPU that matrix products leave to communication
};

/// The backend of a device. Throws ConfigError(unsupported) when the build lacks it.
std::unique_ptr<Backend> make_backend(Device& device, const BackendOptions& options);

}  // namespace pdl
