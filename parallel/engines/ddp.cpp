// ddp: distributed data parallelism with bucketed, overlapped all-reduce.
//
//   start:  rank 0's parameter shapes are compared and its weights broadcast
//   for each step, on every rank:
//     for each micro-batch of this rank's part of the global batch:
//       forward; backward, adding to the gradients
//       during the last backward, when a gradient is final:
//         put it into its bucket; launch the bucket's all-reduce (sum) once the bucket and all before it are complete
//     wait for all buckets, in order
//     norm, clip, update; no update where a scaled gradient overflowed
//                                          (equal sums everywhere: replicas stay equal without communication)
//   after the first step: rebuild the buckets in the order in which gradients arrived
//
// Paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
// Upstream: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp.
//
// Same as upstream
//   - bucket assignment, limits (1 MiB, then bucket_cap_mb), order, one rebuild, rank 0's plan for all
//   - launches strictly in bucket order; one wait for everything after the backward pass
//   - gradients reduced once per step however many micro-batches (no_sync on all but the last)
//   - start-up check of the shapes, then broadcast of the weights in chunks of 250 MiB
// Differs from upstream
//   - losses are divided by the predictions of the global batch and gradients are summed, never averaged over ranks:
//   exact for a
//     ragged last batch, where upstream weights the samples of smaller parts more
//   - parameters without a gradient do not occur in these models; find_unused_parameters costs what it costs upstream
//   (a bitmap
//     all-reduce per step, no rebuild) and changes nothing else
//   - broadcast_buffers is missing: the models here have no buffers
//   - one rank alone makes no bucket copies: it has nothing to send
//
// Knobs (upstream name = default)
//   bucket_cap_mb=25  first_bucket_mb=1  gradient_as_bucket_view=false  find_unused_parameters=false static_graph=false
//   small_bucket=first (upstream: environment variable DDP_SET_LAST_BUCKET_CAP)

#include <algorithm>

#include "parallel/sync/bucketed_all_reduce.h"
#include "parallel/sync/replica.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/sync/startup.h"
#include "parallel/synchronous_engine.h"

namespace pdl {
namespace {

struct DdpKnobs {
  double bucket_cap_mb = 25.0;
  double first_bucket_mb = 1.0;
  bool gradient_as_bucket_view = false;
  bool find_unused_parameters = false;
  bool static_graph = false;
  std::string small_bucket = "first";
};

DdpKnobs read_knobs(const ConfigReader& reader) {
  DdpKnobs knobs;
  knobs.bucket_cap_mb = reader.get("bucket_cap_mb", knobs.bucket_cap_mb, "bucket limit in MiB", {1e-6, 1e6});
  knobs.first_bucket_mb =
      reader.get("first_bucket_mb", knobs.first_bucket_mb, "limit of the small bucket in MiB", {1e-6, 1e6});
  knobs.gradient_as_bucket_view =
      reader.get("gradient_as_bucket_view", knobs.gradient_as_bucket_view,
                 "reduce gradients in place instead of in bucket copies: saves one gradient's memory");
  knobs.find_unused_parameters = reader.get("find_unused_parameters", knobs.find_unused_parameters,
                                            "agree on used parameters every step, as upstream; rules out the rebuild");
  knobs.static_graph = reader.get("static_graph", knobs.static_graph,
                                  "delay the first step's reductions to the end of its backward pass");
  knobs.small_bucket =
      reader.choice("small_bucket", knobs.small_bucket, {"first", "last"},
                    "which bucket is the small one after the rebuild: the first or the last to be reduced");
  return knobs;
}

BucketOptions bucket_options(const DdpKnobs& knobs, int ranks) {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  const bool order_is_stable = !knobs.find_unused_parameters || knobs.static_graph;
  return {.first_limit_bytes = static_cast<std::int64_t>(knobs.first_bucket_mb * kMebibyte),
          .limit_bytes = static_cast<std::int64_t>(knobs.bucket_cap_mb * kMebibyte),
          .small_bucket_first = knobs.small_bucket == "first",
          .in_place = knobs.gradient_as_bucket_view || ranks == 1,  // one rank has nothing to send: no copies
          .single_bucket_at_first = order_is_stable,
          .rebuild = order_is_stable,
          .wait_for_end_at_first = knobs.static_graph};
}

class Ddp final : public StepMethod {
 public:
  Ddp(const EngineContext& context, const DdpKnobs& knobs)
      : context_(context),
        knobs_(knobs),
        replica_(context, {context.world.rank(), context.world.size()}, LayerFactory()),
        reducer_(replica_.store(), context.world, bucket_options(knobs, context.world.size()),
                 size_of(wide_dtype(context.training.dtype))),
        update_(context) {}

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    reducer_.begin();
    // One rank has nothing to reduce, and passes without a listener can be replayed.
    replica_.accumulate(order, context_.world.size() > 1 ? &reducer_ : nullptr, observer);
    observer.phase(Phase::communication);
    reducer_.finish();
    if (knobs_.find_unused_parameters) agree_on_used_parameters();
    observer.phase(Phase::optimizer);
    return update_.apply(replica_, order);
  }

  void prepare() override {
    replica_.prepare();
    update_.prepare(replica_);
    reducer_.prepare(context_.device, context_.backend);
    used_ = context_.device.allocate(used_bytes(), MemoryKind::communication);
    check_equal_shapes(replica_.store(), context_.world, context_.device);
    broadcast_weights(replica_.store(), context_.world, context_.device);
    replica_.store().round_master(context_.backend);
  }

  EngineDescription describe() const override {
    EngineDescription description;
    description.name = "ddp";
    description.replicated_state = true;
    description.dp = context_.world.size();
    description.micro_batches = replica_.micro_batches_per_step();
    description.knobs = {{"bucket_cap_mb", str(knobs_.bucket_cap_mb)},
                         {"first_bucket_mb", str(knobs_.first_bucket_mb)},
                         {"gradient_as_bucket_view", knobs_.gradient_as_bucket_view ? "true" : "false"},
                         {"find_unused_parameters", knobs_.find_unused_parameters ? "true" : "false"},
                         {"static_graph", knobs_.static_graph ? "true" : "false"},
                         {"small_bucket", knobs_.small_bucket}};
    description.differences = {"gradients are summed and losses divided by the global count: exact for ragged batches"};
    return description;
  }

  Prediction predict() const override;

  HeldModel& model() override { return replica_; }
  std::vector<StateTensor> state() override { return update_.state(replica_); }
  void restored() override { update_.restored(replica_); }

 private:
  std::int64_t used_bytes() const {
    return knobs_.find_unused_parameters
               ? static_cast<std::int64_t>(replica_.store().params().size()) * size_of(DType::int32)
               : 0;
  }
  /// Every parameter of these models is used on every rank that has samples; the exchange is what upstream pays to know
  /// it.
  void agree_on_used_parameters() {
    Stream& stream = context_.device.compute_stream();
    const Tensor used = used_.tensor(DType::int32, Shape{static_cast<std::int64_t>(replica_.store().params().size())});
    const std::vector<std::int32_t> mine(replica_.store().params().size(), 1);
    context_.device.copy(used.raw(), mine.data(), used.bytes(), stream);
    context_.world.all_reduce(used, ReduceOp::sum, stream).wait(stream);
  }

  const EngineContext& context_;
  DdpKnobs knobs_;
  Replica replica_;
  BucketedAllReduce reducer_;
  ReplicatedUpdate update_;
  Buffer used_;
};

/// The bucket table, and what a step after the first costs in memory and bytes.
Prediction Ddp::predict() const {
  const int ranks = context_.world.size();
  const std::int64_t element_bytes = size_of(wide_dtype(context_.training.dtype));
  const std::vector<Bucket>& buckets = reducer_.steady_buckets();
  Prediction prediction;
  prediction.memory = replica_.predicted_memory();
  prediction.memory[MemoryKind::optimizer] += update_.predicted_bytes(replica_);
  prediction.memory[MemoryKind::communication] = reducer_.predicted_bytes() + used_bytes();

  PlanTable table{.title = "all-reduce buckets, in launch order",
                  .columns = {"bucket", "parameters", "MiB", "first", "last"},
                  .rows = {}};
  CommCount count;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const std::int64_t bytes = buckets[b].elements * element_bytes;
    const auto name = [&](int param) { return replica_.store().params()[static_cast<std::size_t>(param)].spec.name; };
    table.rows.push_back({str(b), str(buckets[b].params.size()), mebibytes(bytes), name(buckets[b].params.front()),
                          name(buckets[b].params.back())});
    count.calls += 1;
    count.bytes += ring_bytes("all_reduce", ranks, bytes);
  }
  if (knobs_.find_unused_parameters) {
    count.calls += 1;
    count.bytes += ring_bytes("all_reduce", ranks, used_bytes());
  }
  prediction.tables.push_back(std::move(table));
  if (ranks > 1) prediction.comm_per_step["world.all_reduce"] = count;

  const std::int64_t total = replica_.store().elements() * element_bytes;
  if (buckets.size() == 1 && total > (1 << 20)) {
    prediction.warnings.push_back("one bucket holds every gradient: nothing is reduced while the backward pass runs");
  }
  const std::int64_t tail = buckets.back().elements * element_bytes;
  if (ranks > 1 && buckets.size() > 1 && 10 * tail > total) {
    prediction.warnings.push_back(
        str("the last bucket (", mebibytes(tail), " MiB, ", 100 * tail / total,
            " % of all bytes) is complete only when the backward pass ends: it cannot overlap"));
  }
  return prediction;
}

std::unique_ptr<Engine> make_ddp(const EngineContext& context, const ConfigReader& reader) {
  return make_synchronous_engine(context, std::make_unique<Ddp>(context, read_knobs(reader)));
}

}  // namespace

EngineDefinition ddp_definition() {
  return {.name = "ddp",
          .summary = "replicas on every rank, gradients summed in overlapped buckets",
          .paper = "Li et al., PyTorch Distributed, VLDB 2020",
          .reference = "serial",
          .make = make_ddp,
          .document = [](const ConfigReader& reader) { read_knobs(reader); },
          .data_parallel_size = [](int ranks, const ConfigReader&) { return ranks; },
          .variants = {{"small buckets", {"bucket_cap_mb=0.01", "first_bucket_mb=0.001"}},
                       {"buckets in place", {"gradient_as_bucket_view=true", "bucket_cap_mb=0.01"}},
                       {"static graph", {"static_graph=true", "find_unused_parameters=true", "small_bucket=last"}}}};
}

}  // namespace pdl
