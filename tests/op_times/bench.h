#pragma once
// What gpu_op_times is made of: tensors of random numbers, and the clock that runs an operation and writes down a row.
//
// An operation gets its operands in several copies, a different one on each call, so that together they do not fit into
// the GPU's cache: in a training step, too, most operands come from memory. Calls follow each other without gaps; the
// time of one is a series' divided by its length, and of several series the median counts.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend/cuda/cuda_backend.h"
#include "engine/device/device.h"

namespace pdl::op_times {

/// The peaks that shares refer to, of one H200.
inline constexpr double kPeakTflops = 989.4;   ///< dense bf16: 132 multiprocessors x 4096 operations x 1.83 GHz
inline constexpr double kStreamTbPerS = 4.25;  ///< reads plus writes, measured

/// What one call does at least: floating-point operations, or bytes read and written.
struct Work {
  double flops = 0.0, bytes = 0.0;
};

/// One line of the table.
struct Row {
  std::string name, shape;
  Work work;
  double us = 0.0, us_min = 0.0, us_max = 0.0;  ///< median, fastest and slowest series
  /// TFLOP/s, or TB/s of an operation that counts bytes.
  double rate() const { return (work.flops > 0.0 ? work.flops : work.bytes) / us * 1e-6; }
  bool counts_flops() const { return work.flops > 0.0; }
};

class Bench {
 public:
  /// Measures what begins with `only`, all when it is empty.
  Bench(Device& device, CudaBackend& backend, std::string only);

  Device& device() { return device_; }
  CudaBackend& backend() { return backend_; }
  const std::vector<Row>& rows() const { return rows_; }
  /// Whether anything below this part of a name is to be measured.
  bool wants(const std::string& prefix) const;

  /// Of `bytes` each, so many copies of an operation's operands do not fit into the cache.
  static int copies_of(double bytes);
  /// Runs `call(i)`, i = 0, 1, ..., and adds a row, when the name is wanted. The first call, in which libraries choose
  /// their algorithms, does not count.
  void measure(const std::string& name, const std::string& shape, Work work, const std::function<void(int)>& call);

  /// Memory with random numbers between -1 and 1 in fp32, bf16 or fp16; zeros for other types.
  Buffer random(DType dtype, std::int64_t elements);

 private:
  /// Seconds of one of `calls` calls in a row, from call number `first` on.
  double series(const std::function<void(int)>& call, int first, int calls);

  Device& device_;
  CudaBackend& backend_;
  std::string only_;
  std::unique_ptr<Stopwatch> watch_;
  Buffer numbers_;  ///< the random numbers that tensors repeat
  std::vector<Row> rows_;
};

/// The copies of one operand. Call i takes copy i modulo their number.
class Copies {
 public:
  Copies(Bench& bench, int count, DType dtype, const Shape& shape);
  Tensor operator[](int call) const;

 private:
  std::vector<Buffer> buffers_;
  DType dtype_;
  Shape shape_;
};

// The parts of the table.
void measure_square_products(Bench& bench);
void measure_gpt2_products(Bench& bench);
void measure_attention(Bench& bench);
void measure_convolutions(Bench& bench);
void measure_vgg_passes(Bench& bench);
void measure_gpt2_passes(Bench& bench);
void measure_updates(Bench& bench);

}  // namespace pdl::op_times
