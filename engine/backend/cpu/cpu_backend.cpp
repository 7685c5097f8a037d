#include "engine/backend/cpu/cpu_backend.h"

#include "engine/backend/cpu/gemm.h"
#include "engine/backend/cpu/onednn_library.h"

namespace pdl {

// `deterministic` asks for nothing here: no operation of this backend depends on timing in the first place.
CpuBackend::CpuBackend(Device&, const BackendOptions&)
    : scratch_(std::make_unique<GemmScratch>()),
      onednn_matmul_(std::make_unique<OneDnnMatmul>()),
      onednn_conv_(std::make_unique<OneDnnConv>()) {}

CpuBackend::~CpuBackend() = default;

std::string CpuBackend::name() const { return "cpu"; }

std::string CpuBackend::library() const {
  std::string library;
#if PDL_WITH_ONEDNN
  library = onednn_name() + "; ";
#endif
  return library + str("own kernels, ", kVectorName, " vectors, ", kTileRows, "x", kTileColumns, " tiles");
}

void CpuBackend::set_stream(Stream&) {}

}  // namespace pdl
