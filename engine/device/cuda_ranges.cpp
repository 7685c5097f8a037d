// NVTX ranges. Its headers are all there is to it: they look for a profiler when first called, and find none but under
// one.

#include "engine/device/cuda_profiling.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace pdl {
namespace {

class NvtxRanges final : public RangeListener {
 public:
  NvtxRanges() : domain_(nvtxDomainCreateA("pdlbench")) {}
  ~NvtxRanges() override { nvtxDomainDestroy(domain_); }
  NvtxRanges(const NvtxRanges&) = delete;
  NvtxRanges& operator=(const NvtxRanges&) = delete;

  void push(const std::string& name) override {
    nvtxEventAttributes_t attributes = {};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name.c_str();
    nvtxDomainRangePushEx(domain_, &attributes);
  }
  void pop() override { nvtxDomainRangePop(domain_); }

 private:
  nvtxDomainHandle_t domain_;
};

}  // namespace

std::unique_ptr<RangeListener> make_nvtx_ranges() { return std::make_unique<NvtxRanges>(); }

}  // namespace pdl

#else

namespace pdl {

std::unique_ptr<RangeListener> make_nvtx_ranges() { return nullptr; }

}  // namespace pdl

#endif
