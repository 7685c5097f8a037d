#pragma once
// oneDNN, for fp32 matrix products and convolutions: the only files that call it are onednn_*.cpp, and they compile
// against its versions 2 (operation descriptors) and 3 (none). A build without the library gets stand-ins that serve
// nothing, so that callers read the same in both.
//
// Primitives are generated code. Each is made when its shape is first planned or used, and kept: a training step after
// the first makes none. They are made for the number of threads at that moment, which is therefore part of the shape:
// with more threads a primitive would leave its scratchpad.
//
// Where the library has only reference code (its name for loops without any optimization), it does not serve, and the
// caller uses its own kernel. That is settled once for each shape, when its primitives are made.

#include <cstdint>
#include <memory>
#include <string>

#include "engine/backend/cpu/conv_geometry.h"

namespace pdl {

#if PDL_WITH_ONEDNN

/// Version and instruction set in use, as "oneDNN 2.6.3, AVX-512 BF16".
std::string onednn_name();

/// x [rows, in], w [out, in], y [rows, out], all dense. Each returns false, and has done nothing, where it does not
/// serve.
class OneDnnMatmul {
 public:
  OneDnnMatmul();
  ~OneDnnMatmul();
  /// y = x w^T + bias; `bias` may be null.
  bool forward(std::int64_t rows, std::int64_t in, std::int64_t out, float* y, const float* x, const float* w,
               const float* bias);
  /// dx = dy w.
  bool backward_data(std::int64_t rows, std::int64_t in, std::int64_t out, float* dx, const float* dy, const float* w);
  /// dw (+)= dy^T x.
  bool backward_weight(std::int64_t rows, std::int64_t in, std::int64_t out, float* dw, const float* dy, const float* x,
                       bool accumulate);

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

/// Which operations of one convolution the library serves, and the workspace of those that it does.
struct OneDnnConvPlan {
  bool forward = false, backward_data = false, backward_weight = false;
  std::int64_t workspace_bytes = 0;
};

/// Call only what the plan of these extents serves, with its workspace, aligned to 64 bytes.
class OneDnnConv {
 public:
  OneDnnConv();
  ~OneDnnConv();
  const OneDnnConvPlan& plan(const ConvExtents& e);
  /// y = x * w + bias; `bias` may be null.
  void forward(const ConvExtents& e, float* y, const float* x, const float* w, const float* bias, void* workspace);
  void backward_data(const ConvExtents& e, float* dx, const float* dy, const float* w, void* workspace);
  void backward_weight(const ConvExtents& e, float* dw, const float* dy, const float* x, bool accumulate,
                       void* workspace);

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

#else

class OneDnnMatmul {
 public:
  bool forward(std::int64_t, std::int64_t, std::int64_t, float*, const float*, const float*, const float*) {
    return false;
  }
  bool backward_data(std::int64_t, std::int64_t, std::int64_t, float*, const float*, const float*) { return false; }
  bool backward_weight(std::int64_t, std::int64_t, std::int64_t, float*, const float*, const float*, bool) {
    return false;
  }
};

struct OneDnnConvPlan {
  bool forward = false, backward_data = false, backward_weight = false;
  std::int64_t workspace_bytes = 0;
};

class OneDnnConv {
 public:
  OneDnnConvPlan plan(const ConvExtents&) { return {}; }
  void forward(const ConvExtents&, float*, const float*, const float*, const float*, void*) {}
  void backward_data(const ConvExtents&, float*, const float*, const float*, void*) {}
  void backward_weight(const ConvExtents&, float*, const float*, const float*, bool, void*) {}
};

#endif

}  // namespace pdl
