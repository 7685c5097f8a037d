#pragma once
// Runs a rank's list of a schedule: passes over its stages, messages to its neighbours, and what the engine does
// between.
//
// Messages are non-blocking. Receives are posted one ahead of the one that is waited for, straight into the memory in
// which the stage reads them. What is sent is copied into one of a few send buffers, so that the next pass need not
// wait until the other side has it. Activations and gradients have a communicator each: their orders are independent.
//
// Which memory a micro-batch gets follows from its place in the list, so the same step uses the same memory each time.

#include <climits>
#include <memory>
#include <vector>

#include "engine/nn/stage.h"
#include "engine/record/observer.h"
#include "parallel/comm/communicator.h"
#include "parallel/pipeline/message_boxes.h"
#include "parallel/pipeline/schedule_memory.h"

namespace pdl {

/// One virtual stage on this rank, with its parameters.
struct StagePart {
  StagePart(const LayerList& layers, int first, int last, const ModelDescription& model, std::int64_t max_samples,
            DType dtype, Backend& backend, const std::vector<LayerRange>& recomputed = {})
      : store(make_param_store(layers, first, last)),
        stage(layers, first, last, model.sample_input, max_samples, dtype, backend, recomputed) {}

  ParamStore store;
  Stage stage;
};

/// What a schedule leaves to its engine.
class PipelineHost {
 public:
  virtual ~PipelineHost() = default;
  /// A micro-batch on its first pass here; valid until it is released. All of MicroBatch is set.
  virtual MicroBatch load(int micro_batch) = 0;
  /// Its size, known before it is loaded.
  virtual std::int64_t samples(int micro_batch) const = 0;
  virtual void release(int micro_batch) = 0;
  /// The weights of a part after `version` updates.
  virtual Tensor values(int chunk, int version) = 0;
  /// Hears of the gradients of the last backward pass over a chunk's weights; null: nobody does.
  virtual GradientListener* listener(int) { return nullptr; }
  virtual void reduce(int version) = 0;
  /// From then on gradients add up anew.
  virtual void update(int version) = 0;
  /// Micro-batches from this one on are left out, with all that belongs to them. May fall during a run, on all ranks to
  /// the same number, as long as no rank has yet posted or done anything for them.
  virtual int limit() const { return INT_MAX; }
  /// Called between actions: lets the host's own messages move.
  virtual void progress() {}
};

/// How large what an executor holds must be.
struct ExecutorSize {
  RankNeeds needs;
  int send_buffers = 2;
  std::int64_t max_samples = 0;       ///< of a micro-batch
  std::int64_t gathered_samples = 0;  ///< of a step, when the loss is computed over gathered outputs
};

class PipelineExecutor {
 public:
  /// `parts` are the rank's virtual stages in order, and behind them, when the loss is gathered, the loss. They outlive
  /// the executor. Plans only.
  PipelineExecutor(std::vector<StagePart*> parts, const ExecutorSize& size, Device& device, Backend& backend);

  /// Bytes that `prepare` takes.
  MemoryByKind predicted_memory() const;
  void prepare(std::unique_ptr<Communicator> activations, std::unique_ptr<Communicator> gradients);

  /// Runs `rank`'s list. Whole when it returns: every message sent has left its buffer.
  void run(const Schedule& schedule, int rank, PipelineHost& host, Observer& observer, bool training);

  /// How often each pass ran since the start, for tests: recomputations are forwards too.
  struct PassCounts {
    std::int64_t forwards = 0, recomputations = 0, backwards = 0;
  };
  const PassCounts& counts() const { return counts_; }

 private:
  /// A micro-batch on its way through one virtual stage.
  struct Passage {
    MicroBatch batch;
    Tensor x, y, dx, dy;
    int slot = -1;
  };
  /// A list that is being run.
  struct Run {
    const Schedule& schedule;
    int rank = 0;
    PipelineHost& host;
    Observer& observer;
    bool training = true;
    std::vector<Passage> passages = {};       ///< by micro-batch, then chunk
    std::vector<std::size_t> last_pass = {};  ///< by micro-batch: place in the list
    std::vector<int> saves = {};              ///< by chunk: passes that took a slot so far
    std::vector<int> last_backward = {};      ///< by chunk: micro-batch
    std::size_t first_backward_place = 0, last_forward_place = 0;
    std::int64_t gathered = 0;  ///< samples whose outputs are gathered so far
    int limit = INT_MAX;        ///< as the host last said
  };
  /// Slots of a part.
  struct Room {
    std::vector<Slot> slots;
    std::vector<char> taken;
  };

  std::vector<Inbox::Pool> input_pools() const;
  std::int64_t largest_output() const;  ///< in bytes, of what is sent on
  std::int64_t largest_input() const;   ///< likewise, of what is received
  std::int64_t gathered_bytes() const;
  void begin(Run& run);
  void cut_short(Run& run);
  void act(Run& run, const Action& action);
  void forward(Run& run, const Action& action);
  void recompute(Run& run, const Action& action);
  void loss(Run& run, const Action& action);
  void backward(Run& run, const Action& action);
  void pass_forward(Run& run, const Action& action, const Tensor& metrics);
  Passage& passage(Run& run, const Action& action) const;
  StagePart& part(const Action& action) { return *parts_[static_cast<std::size_t>(action.chunk)]; }
  int tag_of(const Action& action) const;

  std::vector<StagePart*> parts_;
  ExecutorSize size_;
  Device& device_;
  Backend& backend_;
  std::vector<Room> rooms_;                 ///< by part
  std::vector<std::vector<char>> touched_;  ///< by part: parameters that hold a part of the sum
  Buffer gathered_, discarded_;             ///< outputs of a whole step; metrics of recomputations
  std::unique_ptr<Communicator> activations_, gradients_;
  Inbox inputs_, output_gradients_;
  Outbox outputs_, input_gradients_;
  PassCounts counts_;
};

}  // namespace pdl
