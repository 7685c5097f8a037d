// Convolutions: cuDNN's graphs (conv_graphs.h) with what they need around them. Bias gradients are column sums of our
// own.
//
//   - Images of bf16 or fp16 with fewer than 8 channels are widened to 8 in the workspace. cuDNN would do the same in
//     its own workspace with every engine that is worth running.
//   - Parameters lie end to end in their store, so they may begin anywhere; cuDNN wants them aligned. Those that are
//   not
//     are copied into the workspace.
//   - The weight gradient of bf16 and fp16 comes out in that type, as no engine writes fp32, and is then added to its
//     fp32 destination; so is any that is added to what is there. So no graph ever reads what it writes, and engines
//     can be compared on the very tensors of the first call.

#include <algorithm>

#include "engine/backend/cuda/column_sums.h"
#include "engine/backend/cuda/conv_graphs.h"
#include "engine/backend/cuda/conv_kernels.h"
#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/linear_kernels.h"

namespace pdl {
namespace {

using cuda::ConvSizes, cuda::CudnnGraphs, cuda::CudnnPlans, cuda::PlanRules;
using cuda::kConvBias, cuda::kConvW, cuda::kConvX, cuda::kConvY;

constexpr std::int64_t kAlignment = 256;

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// The workspace of one call, given out from its start; what is left is the engine's.
class Room {
 public:
  explicit Room(const Tensor& workspace) {
    if (!workspace.defined()) return;
    const auto start = reinterpret_cast<std::uintptr_t>(workspace.raw());
    const auto skipped = static_cast<std::int64_t>((kAlignment - start % kAlignment) % kAlignment);
    at_ = static_cast<char*>(workspace.raw()) + skipped;
    left_ = std::max<std::int64_t>(workspace.bytes() - skipped, 0);
  }
  void* take(std::int64_t bytes) {
    PDL_CHECK(aligned(bytes) <= left_, "workspace lacks ", aligned(bytes) - left_, " bytes");
    void* const taken = at_;
    at_ += aligned(bytes);
    left_ -= aligned(bytes);
    return taken;
  }
  void* rest() const { return at_; }
  std::int64_t left() const { return left_; }

 private:
  char* at_ = nullptr;
  std::int64_t left_ = 0;
};

// One convolution as cuDNN is asked for it.
struct Conv {
  Conv(const ConvSizes& asked, DType type, const BackendOptions& options)
      : sizes(asked), dtype(type), exact(type == DType::fp32 && !options.tf32) {
    PDL_CHECK(type == DType::fp32 || is_half(type), "the GPU computes in fp32, bf16 and fp16, not in ", name_of(type));
  }

  bool widens() const { return is_half(dtype) && sizes.c < cuda::kWideChannels; }
  /// As it reads its image.
  ConvSizes wide() const { return widens() ? sizes.with_channels(cuda::kWideChannels, sizes.k) : sizes; }
  std::int64_t image_bytes() const {
    return widens() ? sizes.input_pixels() * cuda::kWideChannels * size_of(dtype) : 0;
  }
  std::int64_t weight_bytes(const ConvSizes& s) const { return s.k * s.taps() * s.c * size_of(dtype); }
  std::int64_t bias_bytes() const { return sizes.k * size_of(dtype); }

  CudnnGraphs::Key key(std::int64_t operation) const {
    return {operation,
            static_cast<std::int64_t>(dtype),
            sizes.n,
            sizes.h,
            sizes.w,
            sizes.c,
            sizes.k,
            sizes.geometry.kernel,
            sizes.geometry.stride,
            sizes.geometry.padding,
            sizes.geometry.padded_rows()};
  }
  PlanRules rules(std::int64_t workspace_bytes) const {
    PlanRules rules;
    rules.exact = exact;
    rules.workspace_limit = std::min(rules.workspace_limit, workspace_bytes);
    return rules;
  }

  // The plans of each operation. They are made for `workspace_bytes`, or for any sensible amount when that is asked
  // before there is a workspace.
  static constexpr std::int64_t kAnyBytes = std::int64_t{1} << 40;
  CudnnPlans& forward(CudnnGraphs& graphs, bool bias, bool relu, std::int64_t workspace_bytes) const {
    const auto describe = [&] { return cuda::conv_forward_graph(wide(), dtype, bias, relu); };
    return graphs.plans(key(bias ? (relu ? 2 : 1) : 0), describe, rules(workspace_bytes));
  }
  CudnnPlans& backward_data(CudnnGraphs& graphs, std::int64_t workspace_bytes) const {
    const auto describe = [&] { return cuda::conv_backward_data_graph(sizes, dtype); };
    return graphs.plans(key(3), describe, rules(workspace_bytes));
  }
  CudnnPlans& backward_weight(CudnnGraphs& graphs, std::int64_t workspace_bytes) const {
    const auto describe = [&] { return cuda::conv_backward_weight_graph(wide(), dtype); };
    return graphs.plans(key(4), describe, rules(workspace_bytes));
  }

  ConvSizes sizes;
  DType dtype;
  bool exact;
};

Conv checked(const Tensor& x, const Tensor& w, const Tensor& y, Conv2dGeometry geometry,
             const BackendOptions& options) {
  const ConvSizes sizes(x.shape(), w.shape(), geometry);
  PDL_CHECK(y.shape() == sizes.output_shape(), "y ", y.shape().to_string(), ", not ", sizes.output_shape().to_string());
  PDL_CHECK(x.dtype() == y.dtype(), "mixed element types");
  return {sizes, x.dtype(), options};
}

// x as the convolution reads it.
const void* image(const Conv& conv, const Tensor& x, Room& room, cudaStream_t stream) {
  if (!conv.widens()) return x.raw();
  void* const wide = room.take(conv.image_bytes());
  cuda::widen_channels(wide, x.raw(), conv.dtype, conv.sizes.input_pixels(), conv.sizes.c, stream);
  return wide;
}

// A parameter where cuDNN can read it.
const void* aligned_copy(const void* parameter, std::int64_t bytes, Room& room, cudaStream_t stream) {
  if (is_aligned(parameter)) return parameter;
  void* const copy = room.take(bytes);
  PDL_CUDA(cudaMemcpyAsync(copy, parameter, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
  return copy;
}

const void* wide_weights(const Conv& conv, const Tensor& w, Room& room, cudaStream_t stream) {
  if (!conv.widens()) return aligned_copy(w.raw(), conv.weight_bytes(conv.sizes), room, stream);
  void* const wide = room.take(conv.weight_bytes(conv.wide()));
  cuda::widen_channels(wide, w.raw(), conv.dtype, conv.sizes.k * conv.sizes.taps(), conv.sizes.c, stream);
  return wide;
}

}  // namespace

void CudaBackend::conv2d_forward(Tensor y, Tensor x, Tensor w, Tensor bias, Conv2dGeometry geometry,
                                 Activation activation, Tensor workspace) {
  const Conv conv = checked(x, w, y, geometry, options_);
  PDL_CHECK(w.dtype() == x.dtype() && (!bias.defined() || bias.dtype() == x.dtype()), "mixed element types");
  PDL_CHECK(!bias.defined() || bias.elements() == conv.sizes.k, "bias ", bias.shape().to_string());
  PDL_CHECK(activation != Activation::gelu_tanh, "convolutions end in relu or in nothing");
  if (y.elements() == 0) return;
  const bool relu = activation == Activation::relu;
  Room room(workspace);
  const void* const pixels = image(conv, x, room, stream_);
  const void* const weights = wide_weights(conv, w, room, stream_);
  if (bias.defined()) {
    const void* const shift = aligned_copy(bias.raw(), conv.bias_bytes(), room, stream_);
    CudnnPlans& fused = conv.forward(*cudnn_, true, relu, room.left());
    if (!fused.empty()) {
      cudnn_->execute(fused, {{kConvX, pixels}, {kConvW, weights}, {kConvBias, shift}, {kConvY, y.raw()}}, room.rest(),
                      room.left(), stream_);
      return;
    }
  }
  cudnn_->execute(conv.forward(*cudnn_, false, false, room.left()),
                  {{kConvX, pixels}, {kConvW, weights}, {kConvY, y.raw()}}, room.rest(), room.left(), stream_);
  if (bias.defined() || relu) {
    cuda::bias_activation(y.raw(), y.raw(), bias.raw(), conv.sizes.output_pixels(), conv.sizes.k, conv.dtype,
                          activation, stream_);
  }
}

void CudaBackend::conv2d_backward_data(Tensor dx, Tensor dy, Tensor w, Conv2dGeometry geometry, Tensor workspace) {
  const Conv conv = checked(dx, w, dy, geometry, options_);
  PDL_CHECK(w.dtype() == dx.dtype(), "mixed element types");
  if (dx.elements() == 0) return;
  Room room(workspace);
  const void* const weights = aligned_copy(w.raw(), conv.weight_bytes(conv.sizes), room, stream_);
  cudnn_->execute(conv.backward_data(*cudnn_, room.left()), {{kConvX, dx.raw()}, {kConvW, weights}, {kConvY, dy.raw()}},
                  room.rest(), room.left(), stream_);
}

void CudaBackend::conv2d_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, Conv2dGeometry geometry,
                                         bool accumulate, Tensor workspace) {
  const Conv conv = checked(x, dw, dy, geometry, options_);
  const ConvSizes &sizes = conv.sizes, wide = conv.wide();
  PDL_CHECK(dw.dtype() == DType::fp32 && (!dbias.defined() || dbias.dtype() == DType::fp32), "mixed element types");
  PDL_CHECK(!dbias.defined() || dbias.elements() == sizes.k, "dbias ", dbias.shape().to_string());
  if (x.elements() > 0) {
    Room room(workspace);
    const void* const pixels = image(conv, x, room, stream_);
    const bool direct = conv.dtype == DType::fp32 && !accumulate && is_aligned(dw.raw());
    void* const gradient = direct ? dw.raw() : room.take(conv.weight_bytes(wide));
    cudnn_->execute(conv.backward_weight(*cudnn_, room.left()),
                    {{kConvX, pixels}, {kConvW, gradient}, {kConvY, dy.raw()}}, room.rest(), room.left(), stream_);
    if (!direct) {
      cuda::add_weight_gradient(dw.data<float>(), gradient, conv.dtype, sizes.k * sizes.taps(), sizes.c, wide.c,
                                accumulate, stream_);
    }
  } else if (!accumulate) {
    PDL_CUDA(cudaMemsetAsync(dw.raw(), 0, static_cast<std::size_t>(dw.bytes()), stream_));
  }
  if (dbias.defined()) {
    cuda::column_sums(dbias.data<float>(), dy.raw(), conv.dtype, sizes.output_pixels(), sizes.k, accumulate, scratch_,
                      stream_);
  }
}

std::int64_t CudaBackend::conv2d_workspace_bytes(const Shape& x, const Shape& w, Conv2dGeometry geometry, DType dtype) {
  const Conv conv(ConvSizes(x, w, geometry), dtype, options_);
  if (x.elements() == 0) return 0;
  const std::int64_t image = aligned(conv.image_bytes()), wide_weights = aligned(conv.weight_bytes(conv.wide())),
                     weights = aligned(conv.weight_bytes(conv.sizes)), bias = aligned(conv.bias_bytes());
  const CudnnPlans* forward = &conv.forward(*cudnn_, true, true, Conv::kAnyBytes);
  if (forward->empty()) forward = &conv.forward(*cudnn_, false, false, Conv::kAnyBytes);
  return kAlignment +
         std::max({image + wide_weights + bias + forward->workspace_bytes(),
                   weights + conv.backward_data(*cudnn_, Conv::kAnyBytes).workspace_bytes(),
                   image + wide_weights + conv.backward_weight(*cudnn_, Conv::kAnyBytes).workspace_bytes()});
}

}  // namespace pdl
