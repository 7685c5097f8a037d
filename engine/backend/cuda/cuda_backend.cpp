#include "engine/backend/cuda/cuda_backend.h"

#include <cublasLt.h>
#include <cudnn.h>

#include "engine/backend/cuda/cublaslt.h"
#include "engine/backend/cuda/cudnn_graph.h"
#include "engine/backend/cuda/sdpa.h"
#include "engine/backend/cuda/segment_tables.h"

namespace pdl {
namespace {

/// Multiprocessors that matrix products may count on; 0: all.
int products_sm_target(int sm_margin) {
  if (sm_margin == 0) return 0;
  int device = 0, count = 0;
  PDL_CUDA(cudaGetDevice(&device));
  PDL_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (sm_margin >= count) {
    throw ConfigError(str("/nccl/gemm_sm_margin: ", sm_margin, " multiprocessors are to stay free of matrix products, ",
                          "but this GPU has ", count, "; at most ", count - 1));
  }
  return count - sm_margin;
}

}  // namespace

CudaBackend::CudaBackend(Device& device, const BackendOptions& options)
    : device_(device),
      options_(options),
      stream_(native_stream(device.compute_stream())),
      scratch_(device),
      gemm_(std::make_unique<cuda::Gemm>(device, options, products_sm_target(options.sm_margin))),
      cudnn_(std::make_unique<cuda::CudnnGraphs>(options)),
      sdpa_(std::make_unique<cuda::SdpaPlans>(options)),
      segments_(std::make_unique<cuda::SegmentTables>(device)) {}

CudaBackend::~CudaBackend() = default;

std::string CudaBackend::library() const {
  int runtime = 0;
  PDL_CUDA(cudaRuntimeGetVersion(&runtime));
  const std::size_t cublas = cublasLtGetVersion(), cudnn = cudnnGetVersion();
  return str("CUDA ", runtime / 1000, ".", runtime % 1000 / 10, ", cuBLASLt ", cublas / 10000, ".", cublas / 100 % 100,
             ".", cublas % 100, ", cuDNN ", cudnn / 10000, ".", cudnn / 100 % 100, ".", cudnn % 100);
}

std::string CudaBackend::product_table() const { return gemm_->table(); }

std::unique_ptr<Backend> make_cuda_backend(Device& device, const BackendOptions& options) {
  return std::make_unique<CudaBackend>(device, options);
}

}  // namespace pdl
