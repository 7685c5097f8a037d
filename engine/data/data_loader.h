#pragma once
// Fetches samples by global id on loader threads, ahead of use. What is asked for is a queue of id lists; what comes
// back is the same queue of host batches, in order. All memory is taken in the constructor.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "engine/data/dataset.h"

namespace pdl {

/// A batch in host memory.
struct HostBatch {
  Tensor input;       ///< images [N, H, W, C] in DataLoaderOptions::image_dtype, or tokens int32 [N, T]
  Tensor target;      ///< int32 [N] for images, [N, T] for tokens
  Tensor sample_ids;  ///< int64 [N]
  std::int64_t size = 0;
};

struct DataLoaderOptions {
  int threads = 1;                  ///< 0: read on the calling thread, inside `next`
  int prefetch = 2;                 ///< batches read ahead
  DType image_dtype = DType::fp32;  ///< fp32 or fp64; a data set's fp32 pixels are converted
};

/// Gives `bytes` of host memory that live as long as the pointer: for devices that copy faster from memory of their own
/// kind.
using HostAllocator = std::function<std::shared_ptr<void>(std::int64_t bytes)>;

/// One reader of one split. `push` and `next` come from one thread. Destroying it with batches outstanding is fine: at
/// most the sample that each thread is just reading is waited for.
class DataLoader {
 public:
  /// `dataset` outlives the loader. Batches hold at most `max_batch` samples; their inputs lie where `allocate` says,
  /// on the heap without one.
  DataLoader(const Dataset& dataset, DataLoaderOptions options, std::int64_t max_batch,
             const HostAllocator& allocate = {});
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Asks for a batch, which may be empty; at most `capacity()` may be outstanding.
  void push(std::span<const std::int64_t> ids);
  /// The oldest batch asked for; waits for it. Valid until the next call of `next`. Rethrows what reading threw, for
  /// the earliest sample of the batch that failed; that batch is then gone and the following one can be asked for.
  const HostBatch& next();
  /// Batches that may be outstanding: `prefetch`, at least 1.
  int capacity() const;
  /// Batches pushed and not yet returned.
  int outstanding() const;
  const Dataset& dataset() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pdl
