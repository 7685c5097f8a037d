#pragma once
// Convolutions in fp32 as matrix products over pairs of pixels (see conv_geometry.h). A pixel is a row of channels, and
// the kernel of gemm.h takes rows from anywhere: so nothing is copied, and nothing is multiplied by the zeros of the
// padding, which at 2 x 2 pixels would be more than half of the work. Only where pixels have few channels are the
// patches under the kernel copied first, to have rows worth multiplying.

#include "engine/backend/cpu/conv_geometry.h"
#include "engine/backend/cpu/gemm.h"

namespace pdl::conv_products {

/// Floats of packed weights that forward or backward_data need at `packed`, whichever needs more.
std::int64_t packed_floats(const ConvExtents& e);

/// y = relu(x * w + bias), or without relu or bias (null).
void forward(const ConvExtents& e, float* y, const float* x, const float* w, const float* bias, bool relu,
             float* packed, GemmScratch& scratch);
void backward_data(const ConvExtents& e, float* dx, const float* dy, const float* w, float* packed,
                   GemmScratch& scratch);
void backward_weight(const ConvExtents& e, float* dw, const float* dy, const float* x, bool accumulate,
                     GemmScratch& scratch);

}  // namespace pdl::conv_products
