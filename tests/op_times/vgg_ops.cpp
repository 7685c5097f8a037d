// VGG-16's convolutions, and the passes between them that memory bounds.

#include <vector>

#include "tests/op_times/bench.h"

namespace pdl::op_times {
namespace {

constexpr DType kType = DType::bf16, kWide = DType::fp32;

struct Convolution {
  const char* name;  ///< of every layer with this shape
  std::int64_t extent, in, out;
};
// The 13 layers, those of one shape together.
const Convolution kConvolutions[] = {
    {"conv1_1", 224, 3, 64},    {"conv1_2", 224, 64, 64},      {"conv2_1", 112, 64, 128},
    {"conv2_2", 112, 128, 128}, {"conv3_1", 56, 128, 256},     {"conv3_2,3_3", 56, 256, 256},
    {"conv4_1", 28, 256, 512},  {"conv4_2,4_3", 28, 512, 512}, {"conv5_1,5_2,5_3", 14, 512, 512}};

void measure_convolution(Bench& bench, const std::string& name, const Convolution& of, std::int64_t images) {
  if (!bench.wants(name)) return;
  const Conv2dGeometry geometry;
  const Shape x_shape = {images, of.extent, of.extent, of.in}, y_shape = {images, of.extent, of.extent, of.out};
  const Shape w_shape = {of.out, geometry.kernel, geometry.kernel, of.in};
  const double flops = 2.0 * static_cast<double>(y_shape.elements()) * static_cast<double>(w_shape.elements() / of.out);
  const int copies = Bench::copies_of(2.0 * static_cast<double>(x_shape.elements() + y_shape.elements()));
  const Copies x(bench, copies, kType, x_shape), y(bench, copies, kType, y_shape);
  const Copies w(bench, copies, kType, w_shape), bias(bench, copies, kType, {of.out}),
      dw(bench, copies, kWide, w_shape);
  Backend& on = bench.backend();
  const std::int64_t bytes = on.conv2d_workspace_bytes(x_shape, w_shape, geometry, kType);
  const Buffer room = bench.device().allocate(bytes, MemoryKind::workspace);
  const Tensor workspace = room.tensor(DType::uint8, {bytes});
  const auto time = [&](const char* pass, const std::function<void(int)>& call) {
    bench.measure(name + "." + pass, x_shape.to_string() + " " + w_shape.to_string(), {.flops = flops}, call);
  };
  // The weight's gradient comes first: after the forward pass y is half zeros, which cost less power.
  time("weight", [&](int i) { on.conv2d_backward_weight(dw[i], Tensor(), y[i], x[i], geometry, false, workspace); });
  if (of.in > 3) time("data", [&](int i) { on.conv2d_backward_data(x[i], y[i], w[i], geometry, workspace); });
  const Copies image(bench, of.in > 3 ? copies : 0, kType, x_shape);  // x is a gradient by now
  time("forward+relu", [&](int i) {
    on.conv2d_forward(y[i], of.in > 3 ? image[i] : x[i], w[i], bias[i], geometry, Activation::relu, workspace);
  });
}

}  // namespace

void measure_convolutions(Bench& bench) {
  for (const std::int64_t images : {256, 64}) {
    for (const Convolution& of : kConvolutions) {
      measure_convolution(bench, str("conv.n", images, ".", of.name), of, images);
    }
  }
}

void measure_vgg_passes(Bench& bench) {
  if (!bench.wants("pass.vgg")) return;
  constexpr std::int64_t kImages = 256, kChannels = 64;
  const Shape image = {kImages, 224, 224, kChannels}, pooled = {kImages, 112, 112, kChannels};
  const auto elements = static_cast<double>(image.elements()), windows = static_cast<double>(pooled.elements());
  const Copies x(bench, 1, kType, image), dx(bench, 1, kType, image), y(bench, 1, kType, pooled);
  const Copies dy(bench, 1, kType, pooled), argmax(bench, 1, DType::uint8, pooled), dbias(bench, 1, kWide, {kChannels});
  Backend& on = bench.backend();
  const auto time = [&](const char* pass, const Shape& shape, double bytes, const std::function<void(int)>& call) {
    bench.measure(std::string("pass.vgg.") + pass, shape.to_string(), {.bytes = bytes}, call);
  };
  time("relu_backward+dbias", image, 6.0 * elements,
       [&](int i) { on.activation_backward(dx[i], dbias[i], dx[i], x[i], Activation::relu, false); });
  time("bias_sums", image, 2.0 * elements,
       [&](int i) { on.activation_backward(dx[i], dbias[i], dx[i], Tensor(), Activation::none, false); });
  time("max_pool_forward", image, 2.0 * elements + 3.0 * windows,
       [&](int i) { on.max_pool_forward(y[i], argmax[i], x[i], 2); });
  time("max_pool_backward", image, 2.0 * elements + 3.0 * windows,
       [&](int i) { on.max_pool_backward(dx[i], dy[i], argmax[i], 2); });
  time("max_pool_backward+relu+dbias", image, 2.0 * elements + 5.0 * windows,
       [&](int i) { on.max_pool_backward(dx[i], dbias[i], dy[i], argmax[i], y[i], 2, false); });
}

}  // namespace pdl::op_times
