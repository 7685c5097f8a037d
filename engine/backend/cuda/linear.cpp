// Linear layers. cuBLASLt multiplies and adds the bias and the residual; in bf16 and fp16 it also applies gelu (its own
// is the tanh form, which the tests of this operation check) where that is quicker than a pass of our own. What it
// leaves is such a pass: relu, because cuBLASLt's turns NaN into 0; gelu in fp32, because its tanh is an approximation
// for fewer digits.

#include "engine/backend/cuda/column_sums.h"
#include "engine/backend/cuda/cublaslt.h"
#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/linear_kernels.h"

namespace pdl {
namespace {

struct Extents {
  std::int64_t rows, in, out;  // M, I, O
};

// Of x [M, I], w [O, I] and y [M, O]; w's gradient has another type than the rest, which `w_dtype` says.
Extents checked_extents(const Tensor& x, const Tensor& w, const Tensor& y, DType w_dtype) {
  PDL_CHECK(x.shape().rank() == 2 && w.shape().rank() == 2, "x ", x.shape().to_string(), ", w ", w.shape().to_string());
  const Extents e = {x.shape()[0], x.shape()[1], w.shape()[0]};
  PDL_CHECK(w.shape()[1] == e.in, "x ", x.shape().to_string(), " meets w ", w.shape().to_string());
  PDL_CHECK(y.shape() == Shape({e.rows, e.out}), "y ", y.shape().to_string(), " for x ", x.shape().to_string());
  PDL_CHECK(w.dtype() == w_dtype && x.dtype() == y.dtype(), "mixed element types");
  return e;
}

cuda::Epilogue gelu_epilogue(bool with_bias, bool keeps_sums) {
  if (keeps_sums) return with_bias ? cuda::Epilogue::gelu_aux_bias : cuda::Epilogue::gelu_aux;
  return with_bias ? cuda::Epilogue::gelu_bias : cuda::Epilogue::gelu;
}

}  // namespace

void CudaBackend::linear_forward(Tensor y, Tensor pre_activation, Tensor x, Tensor w, Tensor bias,
                                 Activation activation, Tensor residual) {
  const DType dtype = x.dtype();
  const Extents e = checked_extents(x, w, y, dtype);
  PDL_CHECK(!bias.defined() || (bias.elements() == e.out && bias.dtype() == dtype), "bias ", bias.shape().to_string());
  PDL_CHECK(!pre_activation.defined() || (pre_activation.shape() == y.shape() && pre_activation.dtype() == dtype),
            "pre-activation ", pre_activation.shape().to_string());
  PDL_CHECK(!residual.defined() ||
                (residual.shape() == y.shape() && residual.dtype() == dtype && activation == Activation::none),
            "residual ", residual.shape().to_string(), " for y ", y.shape().to_string());
  if (y.elements() == 0) return;
  const bool keeps_sums = activation == Activation::gelu_tanh && pre_activation.defined();
  cuda::Product product = {.input = dtype, .output = dtype, .m = e.rows, .n = e.out, .k = e.in, .transpose_b = true};
  cuda::Operands operands = {.d = y.raw(), .a = x.raw(), .b = w.raw(), .bias = bias.raw()};

  if (residual.defined()) {
    product.beta = 1.0f;
    product.epilogue = bias.defined() ? cuda::Epilogue::bias : cuda::Epilogue::none;
    operands.c = residual.raw();
    if (gemm_->try_multiply(product, operands, stream_)) return;
    linear_forward(y, Tensor(), x, w, bias, activation);
    return residual_add(y, residual, y, DropoutKey());
  }
  void* const sums = keeps_sums ? pre_activation.raw() : y.raw();
  cuda::Operands plain = operands;
  plain.d = sums;
  product.epilogue = bias.defined() ? cuda::Epilogue::bias : cuda::Epilogue::none;
  if (activation == Activation::gelu_tanh && is_half(dtype)) {
    cuda::Product fused = product;
    fused.epilogue = gelu_epilogue(bias.defined(), keeps_sums);
    operands.aux = keeps_sums ? pre_activation.raw() : nullptr;
    if (fusing_pays(fused, operands, product, plain, 2 * y.bytes()) && gemm_->try_multiply(fused, operands, stream_)) {
      return;
    }
  }
  const bool biased = bias.defined() && gemm_->try_multiply(product, plain, stream_);
  if (!biased) {
    product.epilogue = cuda::Epilogue::none;
    gemm_->multiply(product, plain, stream_);
  }
  const void* const missing_bias = biased ? nullptr : bias.raw();
  if (activation != Activation::none || missing_bias != nullptr) {
    cuda::bias_activation(y.raw(), sums, missing_bias, e.rows, e.out, dtype, activation, stream_);
  }
}

void CudaBackend::linear_backward_data(Tensor dx, Tensor dbias, Tensor dy, Tensor w, Tensor pre_activation,
                                       Activation activation, bool accumulate) {
  const DType dtype = dx.dtype();
  const Extents e = checked_extents(dx, w, dy, dtype);
  const bool sums = dbias.defined();
  PDL_CHECK(!sums || (activation != Activation::none && dbias.elements() == e.in && dbias.dtype() == DType::fp32),
            "dbias ", dbias.shape().to_string(), " for dx ", dx.shape().to_string());
  const cuda::Product product = {.input = dtype, .output = dtype, .m = e.rows, .n = e.in, .k = e.out};
  const cuda::Operands operands = {.d = dx.raw(), .a = dy.raw(), .b = w.raw()};
  if (activation == Activation::gelu_tanh && is_half(dtype)) {
    PDL_CHECK(pre_activation.dtype() == dtype && pre_activation.elements() == dx.elements(), "pre-activation ",
              pre_activation.shape().to_string(), " for dx ", dx.shape().to_string());
    cuda::Product fused = product;
    fused.epilogue = cuda::Epilogue::dgelu;
    cuda::Operands with_aux = operands;
    with_aux.aux = pre_activation.raw();
    // The pass that is spared reads two matrices and writes one; but it forms the sums, too, which then read dx again.
    const std::int64_t pass_bytes = (sums ? 2 : 3) * dx.bytes();
    if (fusing_pays(fused, with_aux, product, operands, pass_bytes) && gemm_->try_multiply(fused, with_aux, stream_)) {
      if (sums) {
        cuda::column_sums(dbias.data<float>(), dx.raw(), dtype, e.rows, e.in, accumulate, scratch_, stream_);
      }
      return;
    }
  }
  gemm_->multiply(product, operands, stream_);
  if (activation != Activation::none) activation_backward(dx, dbias, dx, pre_activation, activation, accumulate);
}

void CudaBackend::linear_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, bool accumulate) {
  const Extents e = checked_extents(x, dw, dy, DType::fp32);
  PDL_CHECK(!dbias.defined() || (dbias.elements() == e.out && dbias.dtype() == DType::fp32), "dbias ",
            dbias.shape().to_string());
  const cuda::Product product = {.input = x.dtype(),
                                 .output = DType::fp32,
                                 .m = e.out,
                                 .n = e.in,
                                 .k = e.rows,
                                 .transpose_a = true,
                                 .beta = accumulate ? 1.0f : 0.0f};
  const cuda::Operands operands = {.d = dw.raw(), .a = dy.raw(), .b = x.raw()};
  if (dbias.defined() && !accumulate && is_half(x.dtype()) && !options_.deterministic) {
    cuda::Product fused = product;
    fused.epilogue = cuda::Epilogue::bgrad;
    cuda::Operands with_bias = operands;
    with_bias.bias = dbias.raw();
    if (fusing_pays(fused, with_bias, product, operands, dy.bytes()) &&
        gemm_->try_multiply(fused, with_bias, stream_)) {
      return;
    }
  }
  gemm_->multiply(product, operands, stream_);
  if (dbias.defined()) {
    cuda::column_sums(static_cast<float*>(dbias.raw()), dy.raw(), dy.dtype(), e.rows, e.out, accumulate, scratch_,
                      stream_);
  }
}

bool CudaBackend::fusing_pays(const cuda::Product& fused, const cuda::Operands& fused_operands,
                              const cuda::Product& plain, const cuda::Operands& plain_operands,
                              std::int64_t pass_bytes) {
  constexpr double kBytesPerUs = 3.4e6, kLaunchUs = 3.0;  // what our passes reach on an H200
  const double fused_us = gemm_->chosen_us(fused, fused_operands, stream_);
  const double plain_us = gemm_->chosen_us(plain, plain_operands, stream_);
  return fused_us < plain_us + static_cast<double>(pass_bytes) / kBytesPerUs + kLaunchUs;
}

}  // namespace pdl
