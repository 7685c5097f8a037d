#include "engine/backend/cuda/cublaslt.h"

#include <algorithm>
#include <cstdio>
#include <limits>

namespace pdl::cuda {
namespace {

constexpr std::int64_t kWorkspaceBytes = std::int64_t{64} << 20;
constexpr std::int64_t kAlignment = 16;  // what the fast kernels ask of pointers and pitches
constexpr int kProposals = 24;
// Below this a product takes about as long as its launch, whatever the algorithm.
constexpr double kWorthTiming = 1e8;

void check_status(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const bool memory = status == CUBLAS_STATUS_ALLOC_FAILED;
  throw Error(str("cuBLASLt: ", what, ": ", cublasLtGetStatusName(status)),
              memory ? ExitCode::out_of_memory : ExitCode::internal);
}
#define PDL_CUBLAS(call) check_status((call), #call)

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::fp32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::fp16:
      return CUDA_R_16F;
    default:
      PDL_CHECK(false, "the GPU multiplies in fp32, bf16 and fp16, not in ", name_of(dtype));
  }
  return CUDA_R_32F;
}

struct EpilogueTraits {
  cublasLtEpilogue_t value;
  const char* name;
  bool bias, aux;
};
EpilogueTraits traits_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::none:
      break;
    case Epilogue::bias:
      return {CUBLASLT_EPILOGUE_BIAS, "bias", true, false};
    case Epilogue::gelu:
      return {CUBLASLT_EPILOGUE_GELU, "gelu", false, false};
    case Epilogue::gelu_bias:
      return {CUBLASLT_EPILOGUE_GELU_BIAS, "gelu_bias", true, false};
    case Epilogue::gelu_aux:
      return {CUBLASLT_EPILOGUE_GELU_AUX, "gelu_aux", false, true};
    case Epilogue::gelu_aux_bias:
      return {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, "gelu_aux_bias", true, true};
    case Epilogue::dgelu:
      return {CUBLASLT_EPILOGUE_DGELU, "dgelu", false, true};
    case Epilogue::bgrad:  // of the library's second matrix, which is our first
      return {CUBLASLT_EPILOGUE_BGRADB, "bgrad", true, false};
  }
  return {CUBLASLT_EPILOGUE_DEFAULT, "none", false, false};
}

// Largest power of two up to kAlignment that the address is a multiple of.
std::int64_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  std::int64_t alignment = kAlignment;
  while (address % static_cast<std::uintptr_t>(alignment) != 0) alignment /= 2;
  return alignment;
}
bool aligned(const void* pointer) { return alignment_of(pointer) == kAlignment; }

struct Matrix {
  std::int64_t rows, columns, pitch;  // as it lies
};
Matrix matrix_a(const Product& p) { return p.transpose_a ? Matrix{p.k, p.m, p.a_pitch} : Matrix{p.m, p.k, p.a_pitch}; }
Matrix matrix_b(const Product& p) { return p.transpose_b ? Matrix{p.n, p.k, p.b_pitch} : Matrix{p.k, p.n, p.b_pitch}; }
Matrix matrix_d(const Product& p) { return {p.m, p.n, p.d_pitch}; }

// The product with every pitch said.
Product explicit_pitches(Product p) {
  if (p.a_pitch == 0) p.a_pitch = matrix_a(p).columns;
  if (p.b_pitch == 0) p.b_pitch = matrix_b(p).columns;
  if (p.d_pitch == 0) p.d_pitch = matrix_d(p).columns;
  return p;
}

std::int64_t extent_bytes(const Matrix& x, DType dtype) { return x.rows * x.pitch * size_of(dtype); }

void copy_matrix(void* to, std::int64_t to_pitch, const void* from, const Matrix& x, std::int64_t from_pitch,
                 DType dtype, cudaStream_t stream) {
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * size_of(dtype)); };
  PDL_CUDA(cudaMemcpy2DAsync(to, bytes(to_pitch), from, bytes(from_pitch), bytes(x.columns),
                             static_cast<std::size_t>(x.rows), cudaMemcpyDeviceToDevice, stream));
}

void set_attribute(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute, const auto& value) {
  PDL_CUBLAS(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value));
}
void set_attribute(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute,
                   const auto& value) {
  PDL_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
}

// A row-major matrix is what cuBLASLt, which counts column by column, calls its transpose.
void init_layout(cublasLtMatrixLayoutOpaque_t& layout, const Matrix& x, DType dtype, std::int64_t batch,
                 std::int64_t stride) {
  PDL_CUBLAS(cublasLtMatrixLayoutInit(&layout, cuda_type(dtype), static_cast<std::uint64_t>(x.columns),
                                      static_cast<std::uint64_t>(x.rows), x.pitch));
  if (batch == 1) return;
  const auto count = static_cast<std::int32_t>(batch);
  PDL_CUBLAS(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
  PDL_CUBLAS(
      cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
}

// Device memory for the duration of a measurement; null when there is none.
class Borrowed {
 public:
  explicit Borrowed(std::int64_t bytes) {
    if (bytes > 0 && cudaMalloc(&data_, static_cast<std::size_t>(bytes)) != cudaSuccess) {
      cudaGetLastError();  // there are other ways: nothing failed
      data_ = nullptr;
    }
  }
  ~Borrowed() { cudaFree(data_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

class Stopwatch {
 public:
  Stopwatch() {
    PDL_CUDA(cudaEventCreate(&start_));
    PDL_CUDA(cudaEventCreate(&stop_));
  }
  ~Stopwatch() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  void start(cudaStream_t stream) { PDL_CUDA(cudaEventRecord(start_, stream)); }
  double stop(cudaStream_t stream) {
    float milliseconds = 0.0f;
    PDL_CUDA(cudaEventRecord(stop_, stream));
    PDL_CUDA(cudaEventSynchronize(stop_));
    PDL_CUDA(cudaEventElapsedTime(&milliseconds, start_, stop_));
    return 1e3 * milliseconds;
  }

 private:
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  PDL_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

std::uint32_t setting(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  std::uint32_t value = 0;
  std::size_t written = 0;
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
  return value;
}

void check_product(const Product& p, const Operands& o) {
  const EpilogueTraits traits = traits_of(p.epilogue);
  PDL_CHECK(p.output == p.input || p.output == DType::fp32, name_of(p.input), " into ", name_of(p.output));
  const bool adds = p.beta != 0.0f;
  PDL_CHECK(p.epilogue == Epilogue::none || (p.batch == 1 && (!adds || p.epilogue == Epilogue::bias)), "epilogue ",
            traits.name, " with batch ", p.batch, " and beta ", p.beta);
  PDL_CHECK(o.c == nullptr || (adds && p.batch == 1 && p.k > 0), "c with beta ", p.beta, ", batch ", p.batch, ", k ",
            p.k);
  PDL_CHECK((!traits.bias || o.bias != nullptr) && (!traits.aux || o.aux != nullptr), "epilogue ", traits.name,
            " lacks its operand");
}

// The library's demands on aux; and what bgrad writes would have to be copied back out of scratch.
bool may_have_epilogue(const Product& p, const Operands& o) {
  if (traits_of(p.epilogue).aux && (!aligned(o.aux) || p.n % 8 != 0)) return false;
  return p.epilogue != Epilogue::bgrad || aligned(o.bias);
}

// A sum over nothing.
void write_empty_sums(const Product& p, const Operands& o, cudaStream_t stream) {
  PDL_CHECK(p.epilogue == Epilogue::none, "a sum over nothing with an epilogue");
  if (p.beta == 1.0f) return;
  PDL_CHECK(p.beta == 0.0f, "a sum over nothing with beta ", p.beta);
  const auto size = static_cast<std::size_t>(size_of(p.output));
  for (std::int64_t i = 0; i < p.batch; ++i) {
    PDL_CUDA(cudaMemset2DAsync(static_cast<char*>(o.d) + i * p.d_stride * size_of(p.output),
                               static_cast<std::size_t>(p.d_pitch) * size, 0, static_cast<std::size_t>(p.n) * size,
                               static_cast<std::size_t>(p.m), stream));
  }
}

// Product number `i` of a batch.
Operands operands_of(const Product& p, Operands o, std::int64_t i) {
  o.d = static_cast<char*>(o.d) + i * p.d_stride * size_of(p.output);
  o.a = static_cast<const char*>(o.a) + i * p.a_stride * size_of(p.input);
  o.b = static_cast<const char*>(o.b) + i * p.b_stride * size_of(p.input);
  return o;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- choosing
// a, b and d are named as in Product: to cuBLASLt, which sees all matrices transposed, d^T = b^T a^T has b first.
struct Gemm::Plan {
  Product product;
  bool usable = false;
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, d{};
  cublasLtMatmulAlgo_t algorithm{};
  std::size_t candidates = 0;
  double us = 0.0;  // 0: not timed
  std::int64_t uses = 0;
};

Gemm::Gemm(Device& device, const BackendOptions& options, int sm_target)
    : options_(options), sm_target_(sm_target), workspace_(device), staging_(device) {
  PDL_CUBLAS(cublasLtCreate(&handle_));
}

Gemm::~Gemm() { cublasLtDestroy(handle_); }

Gemm::Plan* Gemm::plan_for(const Product& p, const Operands& o, cudaStream_t stream) {
  // The library asks for the alignment of bias and aux by their pointers.
  const Key key = {static_cast<std::int64_t>(p.input),
                   static_cast<std::int64_t>(p.output),
                   p.m,
                   p.n,
                   p.k,
                   p.transpose_a,
                   p.transpose_b,
                   p.a_pitch,
                   p.b_pitch,
                   p.d_pitch,
                   p.batch,
                   p.a_stride,
                   p.b_stride,
                   p.d_stride,
                   p.beta != 0.0f,
                   static_cast<std::int64_t>(p.epilogue),
                   alignment_of(o.d),
                   o.c == nullptr ? 0 : alignment_of(o.c),
                   alignment_of(o.a),
                   alignment_of(o.b),
                   alignment_of(o.bias),
                   alignment_of(o.aux)};
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(key, make_plan(p, o, stream)).first;
  return found->second->usable ? found->second.get() : nullptr;
}

std::unique_ptr<Gemm::Plan> Gemm::make_plan(const Product& p, const Operands& o, cudaStream_t stream) {
  auto plan = std::make_unique<Plan>();
  plan->product = p;
  const bool tf32 = p.input == DType::fp32 && options_.tf32;
  PDL_CUBLAS(
      cublasLtMatmulDescInit(&plan->operation, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sm_target_);
  const EpilogueTraits traits = traits_of(p.epilogue);
  set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, traits.value);
  if (traits.bias) {
    set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
    set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(p.output));
  }
  if (traits.aux) {
    set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o.aux);
    set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n);
  }
  init_layout(plan->a, matrix_a(p), p.input, p.batch, p.a_stride);
  init_layout(plan->b, matrix_b(p), p.input, p.batch, p.b_stride);
  init_layout(plan->d, matrix_d(p), p.output, p.batch, p.d_stride);

  const std::vector<cublasLtMatmulAlgo_t> algorithms = proposals(*plan, o);
  plan->candidates = algorithms.size();
  if (algorithms.empty()) return plan;
  plan->usable = true;
  plan->algorithm = algorithms.front();
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k * p.batch);
  if (!options_.deterministic && flops >= kWorthTiming && !capturing(stream)) {
    choose_fastest(*plan, algorithms, o, stream);
  }
  return plan;
}

std::vector<cublasLtMatmulAlgo_t> Gemm::proposals(Plan& plan, const Operands& o) const {
  cublasLtMatmulPreferenceOpaque_t preference{};
  PDL_CUBLAS(cublasLtMatmulPreferenceInit(&preference));
  set_attribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspaceBytes));
  const auto alignment = [](const void* pointer) { return static_cast<std::uint32_t>(alignment_of(pointer)); };
  set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(o.b));
  set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(o.a));
  set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(o.c == nullptr ? o.d : o.c));
  set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(o.d));
  // Parts of a sum may meet in fp32 only: in the output type they would be rounded on the way.
  std::uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (!options_.deterministic && plan.product.output == DType::fp32) schemes |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
  set_attribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);

  std::array<cublasLtMatmulHeuristicResult_t, kProposals> results{};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle_, &plan.operation, &plan.b, &plan.a, &plan.d, &plan.d, &preference, kProposals, results.data(), &count);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return algorithms;
  check_status(status, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<std::size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(result.algo);
  }
  return algorithms;
}

// The operands themselves serve: what is read stays as it is, and what one run writes the next one writes again. Where
// d is read too, it is somewhere else.
void Gemm::choose_fastest(Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& algorithms, Operands o,
                          cudaStream_t stream) {
  const Product& p = plan.product;
  const std::int64_t d_bytes = extent_bytes(matrix_d(p), p.output) + (p.batch - 1) * p.d_stride * size_of(p.output);
  const bool reads_d = p.beta != 0.0f && o.c == nullptr;
  const Borrowed elsewhere(reads_d ? d_bytes : 0);
  if (reads_d) {
    if (elsewhere.get() == nullptr) return;
    PDL_CUDA(cudaMemsetAsync(elsewhere.get(), 0, static_cast<std::size_t>(d_bytes), stream));
    o.d = elsewhere.get();
  }
  plan.us = std::numeric_limits<double>::infinity();
  for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
    const double us = microseconds(plan, algorithm, o, stream);
    if (us >= plan.us) continue;
    plan.us = us;
    plan.algorithm = algorithm;
  }
  plan.usable = plan.us < std::numeric_limits<double>::infinity();
}

// Of one run, in the faster of two series; infinite when the algorithm does not run.
double Gemm::microseconds(Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& o, cudaStream_t stream) {
  const Product& p = plan.product;
  Stopwatch watch;
  if (launch(plan, algorithm, p.alpha, p.beta, o, stream) != CUBLAS_STATUS_SUCCESS) {
    return std::numeric_limits<double>::infinity();
  }
  const auto series = [&](int runs) {
    watch.start(stream);
    for (int i = 0; i < runs; ++i) PDL_CUBLAS(launch(plan, algorithm, p.alpha, p.beta, o, stream));
    return watch.stop(stream) / runs;
  };
  const double guess = series(1);
  const int runs = std::clamp(static_cast<int>(400.0 / std::max(guess, 1.0)), 2, 20);
  return std::min(series(runs), series(runs));
}

// ----------------------------------------------------------------------------------------------------------- queueing
cublasStatus_t Gemm::launch(Plan& plan, const cublasLtMatmulAlgo_t& algorithm, float alpha, float beta,
                            const Operands& o, cudaStream_t stream) {
  const EpilogueTraits traits = traits_of(plan.product.epilogue);
  if (traits.bias) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
  if (traits.aux) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o.aux);
  const void* const c = o.c == nullptr ? o.d : o.c;
  return cublasLtMatmul(handle_, &plan.operation, &alpha, o.b, &plan.b, o.a, &plan.a, &beta, c, &plan.d, o.d, &plan.d,
                        &algorithm, workspace_.get(kWorkspaceBytes), static_cast<std::size_t>(kWorkspaceBytes), stream);
}

bool Gemm::queue(const Product& p, const Operands& o, cudaStream_t stream) {
  Plan* const plan = plan_for(p, o, stream);
  if (plan == nullptr) return false;
  ++plan->uses;
  check_status(launch(*plan, plan->algorithm, p.alpha, p.beta, o, stream), "cublasLtMatmul");
  return true;
}

// Unaligned matrices and the bias are copied into scratch, d back out of it; c is copied to where d comes to lie.
// `widen` also gives rows of any length a pitch that is aligned.
bool Gemm::queue_staged(const Product& product, const Operands& operands, bool widen, cudaStream_t stream) {
  Product p = product;
  Operands o = operands;
  const auto widened = [&](std::int64_t pitch, DType dtype) {
    const std::int64_t multiple = kAlignment / size_of(dtype);
    return widen ? (pitch + multiple - 1) / multiple * multiple : pitch;
  };
  const Matrix a = matrix_a(p), b = matrix_b(p), d = matrix_d(p);
  p.a_pitch = widened(a.pitch, p.input);
  p.b_pitch = widened(b.pitch, p.input);
  p.d_pitch = widened(d.pitch, p.output);
  const bool stage_a = !aligned(o.a) || p.a_pitch != a.pitch, stage_b = !aligned(o.b) || p.b_pitch != b.pitch;
  const bool stage_d = !aligned(o.d) || p.d_pitch != d.pitch;
  const bool stage_bias = !aligned(o.bias);  // a null pointer is aligned

  std::int64_t bytes = 0;
  const auto place = [&](bool wanted, std::int64_t size) {
    const std::int64_t offset = bytes;
    if (wanted) bytes += (size + 255) / 256 * 256;
    return offset;
  };
  const std::int64_t at_a = place(stage_a, extent_bytes(matrix_a(p), p.input));
  const std::int64_t at_b = place(stage_b, extent_bytes(matrix_b(p), p.input));
  const std::int64_t at_d = place(stage_d, extent_bytes(matrix_d(p), p.output));
  const std::int64_t at_bias = place(stage_bias, p.n * size_of(p.output));
  if (bytes == 0 && operands.c == nullptr) return queue(p, o, stream);
  char* const staging = static_cast<char*>(staging_.get(bytes));
  if (stage_a) o.a = staging + at_a;
  if (stage_b) o.b = staging + at_b;
  if (stage_d) o.d = staging + at_d;
  if (stage_bias) o.bias = staging + at_bias;
  o.c = nullptr;
  if (plan_for(p, o, stream) == nullptr) return false;

  if (stage_a) copy_matrix(staging + at_a, p.a_pitch, operands.a, a, a.pitch, p.input, stream);
  if (stage_b) copy_matrix(staging + at_b, p.b_pitch, operands.b, b, b.pitch, p.input, stream);
  if (p.beta != 0.0f && (stage_d || operands.c != nullptr)) {
    copy_matrix(o.d, p.d_pitch, operands.c == nullptr ? operands.d : operands.c, d, d.pitch, p.output, stream);
  }
  if (stage_bias) {
    PDL_CUDA(cudaMemcpyAsync(staging + at_bias, operands.bias, static_cast<std::size_t>(p.n * size_of(p.output)),
                             cudaMemcpyDeviceToDevice, stream));
  }
  if (!queue(p, o, stream)) return false;
  if (stage_d) copy_matrix(operands.d, d.pitch, o.d, d, p.d_pitch, p.output, stream);
  return true;
}

bool Gemm::try_multiply(const Product& product, const Operands& o, cudaStream_t stream) {
  const Product p = explicit_pitches(product);
  if (p.m == 0 || p.n == 0 || p.batch == 0) return true;
  check_product(p, o);
  if (p.k == 0) {
    write_empty_sums(p, o, stream);
    return true;
  }
  if (p.batch > 1) {
    if (queue(p, o, stream)) return true;
    Product single = p;
    single.batch = 1;
    single.a_stride = single.b_stride = single.d_stride = 0;
    for (std::int64_t i = 0; i < p.batch; ++i) multiply(single, operands_of(p, o, i), stream);
    return true;
  }
  if (!may_have_epilogue(p, o)) return false;
  // The kernels for unaligned operands cost more than a copy. d, which may be a large gradient, is copied when it must
  // be; or when results must be deterministic, as then they must not depend on where d lies.
  const bool as_it_is =
      aligned(o.a) && aligned(o.b) && aligned(o.c) && aligned(o.bias) && (aligned(o.d) || !options_.deterministic);
  if (as_it_is && queue(p, o, stream)) return true;
  if (queue_staged(p, o, false, stream) || queue_staged(p, o, true, stream)) return true;
  PDL_CHECK(p.epilogue != Epilogue::none, "cuBLASLt has no algorithm for ", name_of(p.input), " [", p.m, ", ", p.k,
            "] x [", p.k, ", ", p.n, "]");
  return false;
}

double Gemm::chosen_us(const Product& product, const Operands& o, cudaStream_t stream) {
  const Plan* const plan = may_have_epilogue(product, o) ? plan_for(explicit_pitches(product), o, stream) : nullptr;
  return plan == nullptr ? std::numeric_limits<double>::infinity() : plan->us;
}

void Gemm::multiply(const Product& product, const Operands& operands, cudaStream_t stream) {
  const bool queued = try_multiply(product, operands, stream);
  PDL_CHECK(queued, "cuBLASLt has no algorithm with epilogue ", traits_of(product.epilogue).name);
}

// ------------------------------------------------------------------------------------------------------------ records
std::string Gemm::table() const {
  std::string text =
      "      m       n       k  batch ab types       beta epilogue       algorithm tile stages split scheme of        "
      "us  "
      "TFLOP/s     uses\n";
  for (const auto& [key, plan] : plans_) {
    const Product& p = plan->product;
    const auto of = [&](cublasLtMatmulAlgoConfigAttributes_t attribute) { return setting(plan->algorithm, attribute); };
    const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k * p.batch);
    char line[256];
    std::snprintf(line, sizeof line,
                  "%7lld %7lld %7lld %6lld %c%c %-4s>%-4s   %4.1f %-14s %9u %4u %6u %5u %6u %2zu %9.1f %8.1f %8lld\n",
                  static_cast<long long>(p.m), static_cast<long long>(p.n), static_cast<long long>(p.k),
                  static_cast<long long>(p.batch), p.transpose_a ? 't' : 'n', p.transpose_b ? 't' : 'n',
                  std::string(name_of(p.input)).c_str(), std::string(name_of(p.output)).c_str(),
                  static_cast<double>(p.beta), traits_of(p.epilogue).name, of(CUBLASLT_ALGO_CONFIG_ID),
                  of(CUBLASLT_ALGO_CONFIG_TILE_ID), of(CUBLASLT_ALGO_CONFIG_STAGES_ID),
                  of(CUBLASLT_ALGO_CONFIG_SPLITK_NUM), of(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME), plan->candidates,
                  plan->us, plan->us > 0.0 ? flops / plan->us * 1e-6 : 0.0, static_cast<long long>(plan->uses));
    text += line;
  }
  return text;
}

}  // namespace pdl::cuda
