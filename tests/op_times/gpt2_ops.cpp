// GPT2-medium's matrix products and its attention, as the layers ask for them and, where those fuse more than the
// product into one call, plainly too. All operations in bf16, gradients of weights in fp32.

#include "tests/op_times/bench.h"

namespace pdl::op_times {
namespace {

constexpr std::int64_t kWidth = 1024, kHidden = 4 * kWidth, kPaddedVocabulary = 50304;
constexpr DType kType = DType::bf16, kWide = DType::fp32;

/// The operands of a linear layer from x [rows, in] to y [rows, out].
struct Linear {
  Linear(Bench& in_bench, const std::string& in_name, std::int64_t rows, std::int64_t in, std::int64_t out)
      : bench(in_bench),
        name(in_name),
        shape(Shape{rows, in, out}.to_string()),
        flops(2.0 * static_cast<double>(rows) * static_cast<double>(in) * static_cast<double>(out)),
        copies(Bench::copies_of(2.0 * static_cast<double>(rows * in + in * out + rows * out))),
        x(bench, copies, kType, {rows, in}),
        w(bench, copies, kType, {out, in}),
        bias(bench, copies, kType, {out}),
        y(bench, copies, kType, {rows, out}),
        dw(bench, copies, kWide, {out, in}) {}

  void time(const std::string& pass, const std::function<void(int)>& call) const {
    bench.measure(name + "." + pass, shape, {.flops = flops}, call);
  }
  /// The three passes with nothing fused but the bias. dy is y, and dx goes over x.
  void time_plain(bool with_bias) const {
    Backend& on = bench.backend();
    time("forward", [&](int i) {
      on.linear_forward(y[i], Tensor(), x[i], w[i], with_bias ? bias[i] : Tensor(), Activation::none);
    });
    time("data", [&](int i) { on.linear_backward_data(x[i], y[i], w[i]); });
    time("weight", [&](int i) { on.linear_backward_weight(dw[i], Tensor(), y[i], x[i], false); });
  }

  Bench& bench;
  std::string name, shape;
  double flops;
  int copies;
  Copies x, w, bias, y, dw;
};

// The projection out of attention and FC2 add to the residual stream; their gradients of the bias come with the
// weight's.
void time_with_residual(const Linear& layer, std::int64_t rows, std::int64_t out) {
  Backend& on = layer.bench.backend();
  const Copies residual(layer.bench, layer.copies, kType, {rows, out}), dbias(layer.bench, layer.copies, kWide, {out});
  layer.time("forward+residual", [&](int i) {
    on.linear_forward(layer.y[i], Tensor(), layer.x[i], layer.w[i], layer.bias[i], Activation::none, residual[i]);
  });
  layer.time("weight+dbias",
             [&](int i) { on.linear_backward_weight(layer.dw[i], dbias[i], layer.y[i], layer.x[i], false); });
}

void measure_block_products(Bench& bench, const std::string& tokens, std::int64_t rows) {
  const auto name = [&](const char* layer) { return tokens + "." + layer; };
  if (bench.wants(name("qkv"))) {
    const Linear qkv(bench, name("qkv"), rows, kWidth, 3 * kWidth);
    qkv.time_plain(true);
    const Copies dbias(bench, qkv.copies, kWide, {3 * kWidth});
    qkv.time("weight+dbias",
             [&](int i) { bench.backend().linear_backward_weight(qkv.dw[i], dbias[i], qkv.y[i], qkv.x[i], false); });
  }
  if (bench.wants(name("proj"))) {
    const Linear proj(bench, name("proj"), rows, kWidth, kWidth);
    proj.time_plain(true);
    time_with_residual(proj, rows, kWidth);
  }
  if (bench.wants(name("fc1"))) {
    const Linear fc1(bench, name("fc1"), rows, kWidth, kHidden);
    fc1.time_plain(true);
    const Copies pre_activation(bench, fc1.copies, kType, {rows, kHidden});
    fc1.time("forward+gelu", [&](int i) {
      bench.backend().linear_forward(fc1.y[i], pre_activation[i], fc1.x[i], fc1.w[i], fc1.bias[i],
                                     Activation::gelu_tanh);
    });
  }
  if (bench.wants(name("fc2"))) {
    const Linear fc2(bench, name("fc2"), rows, kHidden, kWidth);
    fc2.time_plain(true);
    time_with_residual(fc2, rows, kWidth);
    const Copies pre_activation(bench, fc2.copies, kType, {rows, kHidden}), dbias(bench, fc2.copies, kWide, {kHidden});
    fc2.time("data+gelu+dbias", [&](int i) {
      bench.backend().linear_backward_data(fc2.x[i], dbias[i], fc2.y[i], fc2.w[i], pre_activation[i],
                                           Activation::gelu_tanh, false);
    });
  }
  if (bench.wants(name("head"))) Linear(bench, name("head"), rows, kWidth, kPaddedVocabulary).time_plain(false);
}

// One pass over a batch of `samples` sequences, 16 heads of 64. Half of the scores are masked and do not count.
void measure_attention_at(Bench& bench, const std::string& name, std::int64_t samples, std::int64_t length) {
  if (!bench.wants(name)) return;
  constexpr std::int64_t kHeads = 16, kDepth = 64;
  const Shape packed = {samples, length, kHeads, 3, kDepth}, narrow = {samples, length, kHeads, kDepth};
  const double product = static_cast<double>(samples * kHeads * length * length) * kDepth;  // 2 B A T T D / 2
  const int copies = Bench::copies_of(2.0 * static_cast<double>(2 * packed.elements() + 2 * narrow.elements()));
  const Copies qkv(bench, copies, kType, packed), dqkv(bench, copies, kType, packed);
  const Copies y(bench, copies, kType, narrow), dy(bench, copies, kType, narrow);
  const Copies stats(bench, copies, kWide, {samples, kHeads, length});
  Backend& on = bench.backend();
  const std::int64_t bytes = on.attention_workspace_bytes(packed, kType);
  const Buffer room = bench.device().allocate(bytes, MemoryKind::workspace);
  const Tensor workspace = room.tensor(DType::uint8, {bytes});
  const auto forward = [&](int i) { on.attention_forward(y[i], stats[i], qkv[i], DropoutKey(), 0, workspace); };
  for (int i = 0; i < copies; ++i) forward(i);  // what backward starts from
  bench.measure(name + ".forward", packed.to_string(), {.flops = 2.0 * product}, forward);
  bench.measure(name + ".backward", packed.to_string(), {.flops = 5.0 * product}, [&](int i) {
    on.attention_backward(dqkv[i], dy[i], y[i], stats[i], qkv[i], DropoutKey(), 0, workspace);
  });
}

}  // namespace

void measure_square_products(Bench& bench) { Linear(bench, "gemm.square", 8192, 8192, 8192).time_plain(false); }

void measure_gpt2_products(Bench& bench) {
  measure_block_products(bench, "gemm.t16384", 16384);
  measure_block_products(bench, "gemm.t4096", 4096);
}

void measure_attention(Bench& bench) {
  measure_attention_at(bench, "attention.b16t1024", 16, 1024);
  measure_attention_at(bench, "attention.b32t128", 32, 128);
}

}  // namespace pdl::op_times
