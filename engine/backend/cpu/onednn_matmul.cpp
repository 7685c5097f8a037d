#include <omp.h>
#include <dnnl.hpp>

#include <map>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "engine/backend/cpu/onednn_library.h"

namespace pdl {
namespace {

enum class Product { forward, backward_data, backward_weight };
using Dims = dnnl::memory::dims;
using Desc = dnnl::memory::desc;
using Tag = dnnl::memory::format_tag;

// c [rows, columns] (+)= a [rows, depth] b [depth, columns] (+ bias [columns]), as the library sees a product.
struct Operands {
  Desc a, b, bias, c;

  // Matrices stay as they lie: a transposed one is only described as such. Reordering w to a layout of the library's
  // own choice costs more than its products win.
  Operands(const Dims& a_dims, Tag a_tag, const Dims& b_dims, Tag b_tag, bool with_bias)
      : a(a_dims, dnnl::memory::data_type::f32, a_tag),
        b(b_dims, dnnl::memory::data_type::f32, b_tag),
        bias(with_bias ? Desc({1, b_dims[1]}, dnnl::memory::data_type::f32, Tag::ab) : Desc()),
        c({a_dims[0], b_dims[1]}, dnnl::memory::data_type::f32, Tag::ab) {}
};

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const Operands& of, bool with_bias, bool accumulate) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attr.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  if (with_bias) return {engine, of.a, of.b, of.bias, of.c, attr, true};
  return {engine, of.a, of.b, of.c, attr, true};
#else
  const dnnl::matmul::desc operation =
      with_bias ? dnnl::matmul::desc(of.a, of.b, of.bias, of.c) : dnnl::matmul::desc(of.a, of.b, of.c);
  return {operation, attr, engine, true};
#endif
}

// With so many outputs (a language model's head) the library's BLAS was measured to beat its matmul primitive by 6 to
// 20 % in y and dx. It knows no bias, so only a layer without one takes it. dw does not gain.
constexpr std::int64_t kOutputsForBlas = 4096;

struct Primitive {
  dnnl::matmul run;  // empty where the library has reference code only
  std::unordered_map<int, dnnl::memory> arguments;
};

const char* isa_name(dnnl::cpu_isa isa) {
  switch (isa) {
    case dnnl::cpu_isa::sse41:
      return "SSE4.1";
    case dnnl::cpu_isa::avx:
      return "AVX";
    case dnnl::cpu_isa::avx2:
      return "AVX2";
    case dnnl::cpu_isa::avx512_core:
      return "AVX-512";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "AVX-512 VNNI";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "AVX-512 BF16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "AVX-512 AMX";
    default:
      return "this processor's instructions";
  }
}

}  // namespace

struct OneDnnMatmul::Cache {
  using Key = std::tuple<Product, std::int64_t, std::int64_t, std::int64_t, bool, int>;

  // `flag`: with a bias, or accumulating.
  Primitive& find(Product product, std::int64_t rows, std::int64_t in, std::int64_t out, bool flag) {
    const auto [place, is_new] = primitives.try_emplace(Key{product, rows, in, out, flag, omp_get_max_threads()});
    if (is_new) make(place->second, product, operands(product, rows, in, out, flag), flag);
    return place->second;
  }

  static Operands operands(Product product, std::int64_t rows, std::int64_t in, std::int64_t out, bool flag) {
    switch (product) {
      case Product::forward:
        return {{rows, in}, Tag::ab, {in, out}, Tag::ba, flag};
      case Product::backward_data:
        return {{rows, out}, Tag::ab, {out, in}, Tag::ab, false};
      default:
        return {{out, rows}, Tag::ba, {rows, in}, Tag::ab, false};
    }
  }

  void make(Primitive& primitive, Product product, const Operands& of, bool flag) {
    const bool with_bias = product == Product::forward && flag;
    const auto described = describe(engine, of, with_bias, product == Product::backward_weight && flag);
    if (!described || std::string_view(described.impl_info_str()).find("ref") != std::string_view::npos) return;
    primitive.run = dnnl::matmul(described);
    const auto add = [&](int argument, const Desc& desc) {
      primitive.arguments.emplace(argument, dnnl::memory(desc, engine, nullptr));
    };
    add(DNNL_ARG_SRC, of.a);
    add(DNNL_ARG_WEIGHTS, of.b);
    add(DNNL_ARG_DST, of.c);
    if (with_bias) add(DNNL_ARG_BIAS, of.bias);
    const Desc wanted = described.scratchpad_desc();
    if (wanted.get_size() == 0) return;
    add(DNNL_ARG_SCRATCHPAD, wanted);
    if (wanted.get_size() <= scratchpad_bytes) return;
    scratchpad = dnnl::memory(wanted, engine);
    scratchpad_bytes = wanted.get_size();
  }

  bool run(Primitive& primitive, float* c, const float* a, const float* b, const float* bias) {
    if (!primitive.run) return false;
    const auto set = [&](int argument, const void* data) {
      primitive.arguments.at(argument).set_data_handle(const_cast<void*>(data));
    };
    set(DNNL_ARG_SRC, a);
    set(DNNL_ARG_WEIGHTS, b);
    set(DNNL_ARG_DST, c);
    if (bias != nullptr) set(DNNL_ARG_BIAS, bias);
    if (primitive.arguments.contains(DNNL_ARG_SCRATCHPAD)) set(DNNL_ARG_SCRATCHPAD, scratchpad.get_data_handle());
    primitive.run.execute(stream, primitive.arguments);
    stream.wait();
    return true;
  }

  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Key, Primitive> primitives;
  // One for all primitives, as one runs at a time. Like GemmScratch it is part of the code rather than of a model.
  dnnl::memory scratchpad;
  std::size_t scratchpad_bytes = 0;
};

OneDnnMatmul::OneDnnMatmul() : cache_(std::make_unique<Cache>()) {}
OneDnnMatmul::~OneDnnMatmul() = default;

bool OneDnnMatmul::forward(std::int64_t rows, std::int64_t in, std::int64_t out, float* y, const float* x,
                           const float* w, const float* bias) {
  if (out >= kOutputsForBlas && bias == nullptr) {
    return dnnl::sgemm('N', 'T', rows, out, in, 1.0f, x, in, w, in, 0.0f, y, out) == dnnl::status::success;
  }
  Primitive& primitive = cache_->find(Product::forward, rows, in, out, bias != nullptr);
  return cache_->run(primitive, y, x, w, bias);
}

bool OneDnnMatmul::backward_data(std::int64_t rows, std::int64_t in, std::int64_t out, float* dx, const float* dy,
                                 const float* w) {
  if (out >= kOutputsForBlas) {
    return dnnl::sgemm('N', 'N', rows, in, out, 1.0f, dy, out, w, in, 0.0f, dx, in) == dnnl::status::success;
  }
  return cache_->run(cache_->find(Product::backward_data, rows, in, out, false), dx, dy, w, nullptr);
}

bool OneDnnMatmul::backward_weight(std::int64_t rows, std::int64_t in, std::int64_t out, float* dw, const float* dy,
                                   const float* x, bool accumulate) {
  return cache_->run(cache_->find(Product::backward_weight, rows, in, out, accumulate), dw, dy, x, nullptr);
}

std::string onednn_name() {
  const dnnl_version_t* version = dnnl::version();
  return str("oneDNN ", version->major, ".", version->minor, ".", version->patch, ", ",
             isa_name(dnnl::get_effective_cpu_isa()));
}

}  // namespace pdl
