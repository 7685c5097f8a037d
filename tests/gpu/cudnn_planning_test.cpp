// Every graph that we give to cuDNN is accepted by it for an H200, on a machine without a GPU: cuDNN plans for a device
// that is described to it. It wants to see a driver library for attention; the toolkit's stub will do.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "engine/backend/cuda/conv_graphs.h"
#include "engine/backend/cuda/sdpa.h"
#include "tests/support/catch.h"

using namespace pdl;
using namespace pdl::cuda;

namespace {

constexpr const char* kH200 = R"({"cudaDeviceId":0,"deviceName":"NVIDIA H200","deviceVer":900,"driverVer":13000,
"isTccDriver":0,"l2CacheSize":62914560,"maxBlockSize":[1024,1024,64],"maxCtasPerSM":32,
"maxGridSize":[2147483647,65535,65535],"maxRegistersPerSM":65536,"maxSharedMemoryPerBlock":49152,
"maxSharedMemoryPerBlockOptin":232448,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"memClockRateKHz":3201000,
"multiProcessorCount":132,"pciDeviceId":0,"regsPerBlock":65536,"reservedSharedMemoryPerBlock":1024,
"smClockRateKHz":1980000,"supportCoopLaunch":1,"totalGlobalMem":150754820096,"warpSize":32})";

// Loads the driver's library, or the toolkit's stand-in under the same name. False when there is neither.
bool has_driver_library() {
  if (dlopen("libcuda.so.1", RTLD_NOW) != nullptr) return true;
  Dl_info runtime = {};
  if (dladdr(reinterpret_cast<const void*>(&cudaRuntimeGetVersion), &runtime) == 0) return false;
  const auto folder = std::filesystem::weakly_canonical(runtime.dli_fname).parent_path();
  for (const char* stub : {"stubs/libcuda.so", "../lib64/stubs/libcuda.so"}) {
    if (dlopen((folder / stub).c_str(), RTLD_NOW) != nullptr) return true;
  }
  return dlopen("/usr/local/cuda/lib64/stubs/libcuda.so", RTLD_NOW) != nullptr;
}

bool can_plan() {
  if (cudnnGetVersion() >= 90800 && has_driver_library()) return true;
  WARN("skipped: needs cuDNN 9.8 or newer and libcuda.so.1 or the toolkit's stub of it");
  return false;
}

struct Layer {
  Shape x, w;
  Conv2dGeometry geometry = {};
};
// VGG-16's, the first one widened as we run it.
const Layer kVgg[] = {{{256, 224, 224, 8}, {64, 3, 3, 8}},
                      {{256, 224, 224, 64}, {64, 3, 3, 64}},
                      {{256, 112, 112, 64}, {128, 3, 3, 64}},
                      {{256, 56, 56, 256}, {256, 3, 3, 256}},
                      {{256, 14, 14, 512}, {512, 3, 3, 512}}};
const Layer kOdd[] = {{{2, 5, 7, 3}, {5, 3, 3, 3}},
                      {{2, 2, 2, 33}, {70, 3, 3, 33}},
                      {{2, 9, 8, 5}, {9, 3, 3, 5}, {3, 2, 1}},
                      {{1, 7, 7, 20}, {4, 5, 5, 20}, {5, 3, 2}},
                      {{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 0}}};

// Calls check(plans) with the plans of each operation of a layer.
template <typename Check>
void for_each_operation(const Layer& layer, DType dtype, bool deterministic, Check check) {
  BackendOptions options;
  options.deterministic = deterministic;
  PlanRules rules;
  rules.exact = dtype == DType::fp32;
  CudnnGraphs graphs(options, kH200);
  const ConvSizes sizes(layer.x, layer.w, layer.geometry);
  check(graphs.plans(
      {0}, [&] { return conv_forward_graph(sizes, dtype, true, true); }, rules));
  check(graphs.plans(
      {1}, [&] { return conv_forward_graph(sizes, dtype, true, false); }, rules));
  check(graphs.plans(
      {2}, [&] { return conv_forward_graph(sizes, dtype, false, false); }, rules));
  check(graphs.plans(
      {3}, [&] { return conv_backward_data_graph(sizes, dtype); }, rules));
  check(graphs.plans(
      {4}, [&] { return conv_backward_weight_graph(sizes, dtype); }, rules));
}

}  // namespace

TEST_CASE("cuDNN runs VGG's convolutions on tensor cores within little memory") {
  if (!can_plan()) return;
  for (const Layer& layer : kVgg) {
    for_each_operation(layer, DType::bf16, false, [&](const CudnnPlans& plans) {
      INFO(layer.x.to_string() << " " << layer.w.to_string());
      REQUIRE(plans.all().size() >= 4);
      CHECK(plans.workspace_bytes() <= std::int64_t{32} << 20);
      for (const CudnnPlan& plan : plans.all()) CHECK(plan.has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE));
    });
  }
}

TEST_CASE("cuDNN runs convolutions of every size, type and rule") {
  if (!can_plan()) return;
  for (const auto& layers :
       {std::vector<Layer>(std::begin(kVgg), std::end(kVgg)), std::vector<Layer>(std::begin(kOdd), std::end(kOdd))}) {
    for (const Layer& layer : layers) {
      for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
        for_each_operation(layer, dtype, true, [&](const CudnnPlans& plans) {
          INFO(name_of(dtype) << " " << layer.x.to_string() << " " << layer.w.to_string());
          CHECK_FALSE(plans.empty());
          for (const CudnnPlan& plan : plans.all()) {
            CHECK_FALSE(plan.has(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC));
            if (dtype == DType::fp32) CHECK_FALSE(plan.has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE));
          }
        });
      }
    }
  }
}

TEST_CASE("cuDNN runs causal attention on packed qkv") {
  if (!can_plan()) return;
  for (const bool deterministic : {false, true}) {
    BackendOptions options;
    options.deterministic = deterministic;
    SdpaPlans plans(options, kH200);
    for (const Shape& qkv : {Shape{16, 1024, 16, 3, 64}, Shape{32, 128, 16, 3, 64}, Shape{2, 33, 3, 3, 8},
                             Shape{3, 100, 5, 3, 128}, Shape{2, 65, 2, 3, 24}}) {
      for (const DType dtype : {DType::bf16, DType::fp16}) {
        INFO(qkv.to_string() << " " << name_of(dtype) << (deterministic ? " deterministic" : ""));
        CHECK(plans.supported(qkv, dtype));
        const std::int64_t bytes = plans.workspace_bytes(qkv, dtype);
        CHECK(bytes > 0);
        CHECK(plans.workspace_bytes(qkv.with_first(1), dtype) <= bytes);
      }
    }
    CHECK_FALSE(plans.supported({2, 32, 2, 3, 64}, DType::fp32));
    CHECK_FALSE(plans.supported({2, 32, 2, 3, 20}, DType::bf16));
    CHECK_FALSE(plans.supported({2, 32, 2, 3, 136}, DType::bf16));
  }
}
