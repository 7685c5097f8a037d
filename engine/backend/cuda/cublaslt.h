#pragma once
// Matrix products through cuBLASLt: the only place that knows its descriptors, its order of columns and its algorithms.
//
// What is chosen for a product is kept by everything that the choice depends on. When a product is first seen, the
// library's proposals are timed on the device and the fastest is taken. With `deterministic` the first proposal is
// taken: which one is fastest may differ from run to run and from rank to rank, and other algorithms round differently.

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/device/cuda_device.h"

namespace pdl::cuda {

/// What happens to alpha op(a) op(b) + beta c on its way into d. `gelu` is the tanh form.
enum class Epilogue {
  none,
  bias,           ///< + bias [n]
  gelu,           ///< gelu(product)
  gelu_bias,      ///< gelu(product + bias)
  gelu_aux,       ///< gelu(product); aux [m, n] receives the product
  gelu_aux_bias,  ///< gelu(product + bias); aux [m, n] receives product + bias
  dgelu,          ///< product * gelu'(aux [m, n])
  bgrad,          ///< product; bias [m] receives the row sums of op(a)
};

/// d [m, n] = epilogue(alpha op(a) [m, k] op(b) [k, n] + beta c [m, n]), matrices row-major, sums in fp32, rounded
/// once.
struct Product {
  DType input = DType::fp32;   ///< of a and b
  DType output = DType::fp32;  ///< of c, d, bias and aux: the input type or fp32
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false;                            ///< a lies as [k, m]
  bool transpose_b = false;                            ///< b lies as [n, k]
  std::int64_t a_pitch = 0, b_pitch = 0, d_pitch = 0;  ///< elements from row to row as it lies; 0: rows without gaps
  std::int64_t batch = 1;                              ///< so many products, each stride elements behind the last
  std::int64_t a_stride = 0, b_stride = 0, d_stride = 0;
  float alpha = 1.0f, beta = 0.0f;
  Epilogue epilogue = Epilogue::none;  ///< other than none: batch 1; other than none and bias: beta 0
};

/// d overlaps nothing else.
struct Operands {
  void* d = nullptr;
  const void* c = nullptr;  ///< lies as d does, batch 1; null: what d holds
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  void* aux = nullptr;
};

/// One for each backend: its workspace serves one stream at a time.
class Gemm {
 public:
  /// `sm_target`: multiprocessors that algorithms are chosen and run for; 0: all.
  Gemm(Device& device, const BackendOptions& options, int sm_target = 0);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  /// Queues the product. False, with nothing queued, when cuBLASLt has no algorithm with this epilogue. A product
  /// without epilogue that has none throws. Pointers need the alignment of one element only: what is not aligned to 16
  /// bytes goes through scratch where that helps.
  bool try_multiply(const Product& product, const Operands& operands, cudaStream_t stream);
  void multiply(const Product& product, const Operands& operands, cudaStream_t stream);

  /// Microseconds that the product took when its algorithm was chosen; 0 when none was timed, infinite when there is
  /// none.
  double chosen_us(const Product& product, const Operands& operands, cudaStream_t stream);

  /// One line for each product seen so far: shape, types, epilogue, algorithm, its time when it was taken, and how
  /// often it was asked for since.
  std::string table() const;

 private:
  struct Plan;
  using Key = std::array<std::int64_t, 22>;

  /// Null when there is no algorithm.
  Plan* plan_for(const Product& product, const Operands& operands, cudaStream_t stream);
  std::unique_ptr<Plan> make_plan(const Product& product, const Operands& operands, cudaStream_t stream);
  std::vector<cublasLtMatmulAlgo_t> proposals(Plan& plan, const Operands& operands) const;
  void choose_fastest(Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& algorithms, Operands operands,
                      cudaStream_t stream);
  double microseconds(Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& operands, cudaStream_t stream);
  cublasStatus_t launch(Plan& plan, const cublasLtMatmulAlgo_t& algorithm, float alpha, float beta,
                        const Operands& operands, cudaStream_t stream);
  bool queue(const Product& product, const Operands& operands, cudaStream_t stream);
  bool queue_staged(const Product& product, const Operands& operands, bool widen, cudaStream_t stream);

  BackendOptions options_;
  int sm_target_;
  CudaScratch workspace_;  ///< of the library
  CudaScratch staging_;    ///< aligned copies of operands
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace pdl::cuda
