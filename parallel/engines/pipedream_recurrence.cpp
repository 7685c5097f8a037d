// pipedream-recurrence: what PipeDream computes, on one rank, one mini-batch after the other. The reference of the
// pipedream engine, which must have the same bits; no engine for users.
//
//   history[s] = [initial weights of stage s]
//   for each mini-batch t, from 0 in each epoch (drain=epoch) or in the first one only (drain=never):
//     x = samples of t
//     for each stage s:             x = forward(s, history[s][version(s, t)], x)
//     g = gradient of the loss
//     for each stage s, backwards:  g, dw = backward(s, history[s][version(s, t)], g);  sum[s] += dw
//       after the last t of a round of s, k = t / r[s]:
//         history[s].append(OPTIMIZER(history[s][k], sum[s] / samples, lr[s](k)));  sum[s] = 0
//
//   W[s] = (R - 1 - sum of r[i], i < s) / r[s];  r[s] replicas of stage s, R = sum of all
//   version(s, t):  stash  max(0, t / r[s] - W[s])        vertical_sync  max(0, t - W[0])
//                   2bw    max(0, batch of t - 1)          flush          batch of t
//                   none   forward as stash, backward t / r[s]
//   A parameter of stage 0 that the last stage shares has stage 0's version there, and one sum of both gradients.
//   Where t begins anew, so does the count of versions: the newest weights are version 0.
//
// Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, sections 3.2 and
// 3.3; "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1, for 2bw.
// Here t counts micro-batches where a mini-batch has several (2bw, flush); a round is then a mini-batch.
//
// Knobs: those of the pipedream engine, written out.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "parallel/engines/pipedream.h"
#include "parallel/pipeline/pipeline_executor.h"
#include "parallel/pipeline/stage_feeder.h"
#include "parallel/pipeline/unit_plan.h"

namespace pdl {
namespace {

/// Layers [first, last) with all their versions, their optimizer and the gradient of the round.
struct RecurrenceStage {
  StagePart part;
  Slot slot = {};
  std::vector<Buffer> history = {};  ///< version v in history[v % size]
  std::unique_ptr<Optimizer> optimizer = nullptr;
  Buffer sum = {}, norms = {};
  std::vector<char> touched = {};
  std::int64_t rounds = 0;  ///< over the whole run
  std::int64_t newest = 0;  ///< version
  int tied = -1;            ///< parameter of the last stage that stage 0 owns

  Tensor weights(std::int64_t version) const {
    const Buffer& buffer = history[static_cast<std::size_t>(version) % history.size()];
    return buffer.tensor(part.store.dtype(), Shape{part.store.elements()});
  }
};

class PipedreamRecurrence final : public Engine {
 public:
  PipedreamRecurrence(const EngineContext& context, const PipedreamKnobs& knobs);

  EngineDescription describe() const override {
    return {.name = "pipedream-recurrence", .knobs = {}, .differences = {}};
  }
  Prediction predict() const override { return {}; }
  void prepare() override;
  PassResult run_epoch(const EpochPlan& plan, Observer& observer) override;
  PassResult evaluate(const EpochPlan& plan) override;
  void visit_parameters(const ParameterVisitor& visit) override;
  std::vector<StateTensor> state() override { return {}; }
  TrainingPosition position() const override { return {.updates = steps_done_, .loss_scale = {}}; }
  void set_position(const TrainingPosition&) override {}

 private:
  int stages() const { return knobs_.stages(); }
  int replicas(int s) const { return knobs_.replicas[static_cast<std::size_t>(s)]; }
  int round(int s) const { return knobs_.has_micro_batches() ? knobs_.micro_batches : replicas(s); }
  RecurrenceStage& stage(int s) { return *stages_[static_cast<std::size_t>(s)]; }
  int depth(int s) const;
  int lag(int s) const;
  std::int64_t version(int s, std::int64_t t) const;
  std::int64_t backward_version(int s, std::int64_t t) const { return is_naive() ? t / round(s) : version(s, t); }
  bool is_naive() const { return knobs_.mode == "none" || knobs_.mode == "published"; }
  double lr(int s, std::int64_t k) const;
  std::int64_t whole_round() const;
  MicroBatch load(std::int64_t step, int unit);
  void begin_anew();
  void forward_and_backward(const MicroBatch& batch, std::int64_t t);
  void add_gradient(int s, std::int64_t t);
  void update(int s, std::int64_t k);
  void share_tied(std::int64_t version);
  double take_loss(PassResult& result, std::int64_t predictions);

  const EngineContext& context_;
  PipedreamKnobs knobs_;
  LayerList layers_;
  std::vector<std::unique_ptr<RecurrenceStage>> stages_;
  int tied_owner_ = -1;  ///< parameter of stage 0 that the last stage shares
  LrSchedule lr_;
  std::unique_ptr<StageFeeder> training_, validation_;
  Buffer metrics_;
  UnitPlan units_;
  std::int64_t first_ = 0;  ///< t of this epoch's first unit
  std::int64_t steps_done_ = 0;
};

LrSchedule lr_schedule_of(const EngineContext& context) {
  const TrainingOptions& training = context.training;
  const EpochPlan plan(context.train_samples, training.global_batch, training.seed, 0, false, training.drop_last,
                       context.max_steps_per_epoch);
  return LrSchedule(training.lr_schedule, training.optimizer.lr, plan.steps(), plan.steps() * training.epochs);
}

PipedreamRecurrence::PipedreamRecurrence(const EngineContext& context, const PipedreamKnobs& knobs)
    : context_(context), knobs_(knobs), layers_(context.model.build(LayerFactory())), lr_(lr_schedule_of(context)) {
  const std::vector<int> begins = stage_begins(knobs.balance);
  const std::int64_t samples = cut_step(context.training.global_batch, knobs.units_per_step())[0].count;
  for (int s = 0; s < stages(); ++s) {
    const auto index = static_cast<std::size_t>(s);
    const int last = begins[index + 1] + (s + 1 == stages() ? 1 : 0);  // the loss is on the last stage
    stages_.push_back(std::make_unique<RecurrenceStage>(RecurrenceStage{
        .part =
            StagePart(layers_, begins[index], last, context.model, samples, context.training.dtype, context.backend),
        .optimizer = make_optimizer(context.training.optimizer)}));
  }
  for (std::size_t i = 0; i < stage(stages() - 1).part.store.params().size(); ++i) {
    const std::string& owner = stage(stages() - 1).part.store.params()[i].spec.tied_to;
    for (std::size_t j = 0; !owner.empty() && j < stage(0).part.store.params().size(); ++j) {
      if (stage(0).part.store.params()[j].spec.name != owner) continue;
      stage(stages() - 1).tied = static_cast<int>(i);
      tied_owner_ = static_cast<int>(j);
    }
  }
}

/// W[s]: mini-batches that a replica of the stage starts before the first comes back.
int PipedreamRecurrence::depth(int s) const {
  const auto begin = knobs_.replicas.begin();
  return (knobs_.ranks() - 1 - std::accumulate(begin, begin + s, 0)) / replicas(s);
}

/// Updates by which the weights that a mini-batch uses are behind in the end.
int PipedreamRecurrence::lag(int s) const {
  if (knobs_.mode == "flush") return 0;
  if (knobs_.mode == "2bw") return 1;
  return depth(knobs_.mode == "vertical_sync" ? 0 : s);
}

std::int64_t PipedreamRecurrence::version(int s, std::int64_t t) const {
  return std::max<std::int64_t>(0, t / round(s) - lag(s));
}

double PipedreamRecurrence::lr(int s, std::int64_t k) const {
  const double rate = lr_.at(steps_done_ + units_.step_of(static_cast<int>(k * round(s) - first_)));
  const double factor = knobs_.lr_staleness == "inverse" ? 1.0 / (1 + lag(s)) : 1.0;
  return rate * (static_cast<double>(replicas(s)) / replicas(0) * factor);
}

/// Samples of a round on a stage without replicas, when all are there.
std::int64_t PipedreamRecurrence::whole_round() const {
  const std::int64_t batch = context_.training.global_batch;
  return knobs_.has_micro_batches() ? batch : cut_step(batch, knobs_.units_per_step())[0].count;
}

void PipedreamRecurrence::prepare() {
  Device& device = context_.device;
  const DType dtype = context_.training.dtype;
  for (int s = 0; s < stages(); ++s) {
    RecurrenceStage& here = stage(s);
    ParamStore& store = here.part.store;
    const std::int64_t bytes = store.elements() * size_of(dtype);
    store.allocate(device, dtype);
    store.initialise(device, context_.training.seed);
    for (int i = 0; i < lag(s) + 2; ++i) here.history.push_back(device.allocate(bytes, MemoryKind::weight_versions));
    if (store.elements() > 0) context_.backend.copy(here.weights(0), store.values());
    here.optimizer->allocate(device, store.elements(), dtype,
                             store.segments(context_.training.optimizer.decay_biases_and_norms));
    here.part.stage.allocate(device);
    here.slot = here.part.stage.make_slot(device);
    here.sum = device.allocate(bytes, MemoryKind::gradients);
    here.norms = device.allocate(static_cast<std::int64_t>(store.params().size()) * 8, MemoryKind::workspace);
  }
  metrics_ = device.allocate(2 * size_of(DType::fp64), MemoryKind::workspace);
  const auto feeder = [&](const Dataset& data) {
    return std::make_unique<StageFeeder>(context_, data, StageNeeds{true, true}, context_.training.global_batch,
                                         knobs_.units_per_step(), 1);
  };
  training_ = feeder(*context_.data.train);
  validation_ = feeder(*context_.data.validation);
}

MicroBatch PipedreamRecurrence::load(std::int64_t step, int unit) {
  StageFeeder& feeder = step < 0 ? *validation_ : *training_;
  if (unit > 0) feeder.release(unit - 1, context_.device.compute_stream());
  MicroBatch batch = feeder.next(context_.device.compute_stream(), step < 0 ? 0 : steps_done_ + step);
  batch.metrics = metrics_.tensor(DType::fp64, Shape{2});
  batch.seed = context_.training.seed;
  batch.gradient_scale = 1.0 / static_cast<double>(whole_round() * context_.model.predictions_per_sample);
  return batch;
}

PassResult PipedreamRecurrence::run_epoch(const EpochPlan& plan, Observer& observer) {
  int multiple = knobs_.has_micro_batches() ? knobs_.micro_batches : 1;
  for (const int count : knobs_.replicas) multiple = std::lcm(multiple, count);
  units_ = UnitPlan(plan, knobs_.units_per_step(), multiple);
  std::vector<std::span<const std::int64_t>> ids;
  for (int t = 0; t < units_.units(); ++t) ids.push_back(units_.ids(t));
  training_->begin(std::move(ids));
  if (knobs_.drain == "epoch") begin_anew();
  PassResult result;
  for (int t = 0; t < units_.units(); ++t) {
    const std::int64_t step = units_.step_of(t);
    if (t == units_.begin_of(step)) observer.step_begin();
    forward_and_backward(load(step, t), first_ + t);
    if (t + 1 != units_.end_of(step)) continue;
    const std::int64_t samples = units_.samples(units_.begin_of(step), t + 1);
    const double loss = take_loss(result, samples * context_.model.predictions_per_sample);
    observer.step_end(
        {.step = step, .steps = units_.steps(), .samples = samples, .loss = loss, .lr = lr_.at(steps_done_ + step)});
    if (!std::isfinite(loss)) throw Error(str("the loss stopped being finite in step ", step), ExitCode::numeric);
  }
  steps_done_ += units_.steps();
  first_ += units_.units();
  return result;
}

/// After a drained epoch all versions but the newest are past.
void PipedreamRecurrence::begin_anew() {
  for (const auto& here : stages_) {
    if (here->part.store.elements() > 0) {
      context_.backend.copy(here->part.store.values(), here->weights(here->newest));
      context_.backend.copy(here->weights(0), here->part.store.values());
    }
    here->newest = 0;
  }
  first_ = 0;
}

void PipedreamRecurrence::forward_and_backward(const MicroBatch& batch, std::int64_t t) {
  if (tied_owner_ >= 0) share_tied(version(0, t));
  std::vector<Tensor> inputs;
  Tensor x = batch.input;
  for (int s = 0; s < stages(); ++s) {
    RecurrenceStage& here = stage(s);
    inputs.push_back(x);
    x = here.part.stage.forward(here.part.store, here.weights(version(s, t)), here.slot, batch, x, true);
  }
  Tensor gradient;
  for (int s = stages() - 1; s >= 0; --s) {
    RecurrenceStage& here = stage(s);
    const ParamStore& store = here.part.store;
    const bool adds_up = knobs_.has_micro_batches() && t % round(s) != 0;  // layers add micro-batches up
    if (!adds_up) here.touched.assign(store.params().size(), 0);
    gradient = here.part.stage.backward(store, here.weights(backward_version(s, t)), store.grads(), here.touched,
                                        here.slot, batch, inputs[static_cast<std::size_t>(s)], gradient, nullptr);
    if (store.elements() > 0 && (!knobs_.has_micro_batches() || (t + 1) % round(s) == 0)) add_gradient(s, t);
    if ((t + 1) % round(s) == 0) update(s, t / round(s));
  }
}

/// sum[s] += the gradient of t, replica by replica; that of micro-batches together is the round's.
void PipedreamRecurrence::add_gradient(int s, std::int64_t t) {
  RecurrenceStage& here = stage(s);
  const Tensor gradient = here.part.store.grads(), sum = here.sum.tensor(gradient.dtype(), gradient.shape());
  if (s == 0 && tied_owner_ >= 0) {
    const RecurrenceStage& last = stage(stages() - 1);
    context_.backend.add(here.part.store.view(gradient, tied_owner_),
                         last.part.store.view(last.part.store.grads(), last.tied), 1.0);
  }
  if (knobs_.has_micro_batches() || t % round(s) == 0) {
    context_.backend.copy(sum, gradient);
  } else {
    context_.backend.add(sum, gradient, 1.0);
  }
}

/// history[s].append(OPTIMIZER(history[s].back(), sum / samples)). What the last stage shares is updated by stage 0.
void PipedreamRecurrence::update(int s, std::int64_t k) {
  RecurrenceStage& here = stage(s);
  const ParamStore& store = here.part.store;
  if (store.elements() > 0) {
    const int begin = static_cast<int>(k * round(s) - first_);  // unit of this epoch
    const double divisor =
        static_cast<double>(units_.samples(begin, begin + round(s))) / static_cast<double>(whole_round());
    const Tensor sum = here.sum.tensor(store.grads().dtype(), store.grads().shape());
    const auto count = static_cast<std::int64_t>(store.params().size());
    GradientScaling scaling{.factor = 1.0 / divisor};
    if (context_.training.optimizer.clip_grad_norm > 0.0) {
      const Tensor squares = here.norms.tensor(DType::fp64, Shape{count});
      context_.backend.sum_of_squares(squares, sum, store.segments(true).data(), count);
      double total = 0.0;
      for (std::int64_t i = 0; i < count; ++i) total += i == here.tied ? 0.0 : squares.data<double>()[i];
      scaling = gradient_scaling(total, divisor, context_.training.optimizer.clip_grad_norm);
    }
    context_.backend.copy(here.weights(k + 1), here.weights(k));
    const auto step = [&](std::int64_t first, std::int64_t segments) {
      if (segments == 0) return;
      here.optimizer->step(context_.backend, {.values = here.weights(k + 1),
                                              .grads = sum,
                                              .lr = lr(s, k),
                                              .grad_scale = scaling.factor,
                                              .update = here.rounds + 1,
                                              .first_segment = first,
                                              .segment_count = segments});
    };
    step(0, here.tied < 0 ? count : here.tied);
    if (here.tied >= 0) step(here.tied + 1, count - here.tied - 1);
  }
  ++here.rounds;
  here.newest = k + 1;
}

/// Puts stage 0's weights of a version into every version that the last stage may use next.
void PipedreamRecurrence::share_tied(std::int64_t version) {
  const RecurrenceStage &first = stage(0), &last = stage(stages() - 1);
  const Tensor owned = first.part.store.view(first.weights(version), tied_owner_);
  for (std::size_t v = 0; v < last.history.size(); ++v) {
    context_.backend.copy(last.part.store.view(last.weights(static_cast<std::int64_t>(v)), last.tied), owned);
  }
}

/// Adds the sums since the last call to the result; returns the mean loss.
double PipedreamRecurrence::take_loss(PassResult& result, std::int64_t predictions) {
  const Tensor sums = metrics_.tensor(DType::fp64, Shape{2});
  const double loss = sums.data<double>()[0];
  result.loss_sum += loss;
  result.correct += sums.data<double>()[1];
  result.predictions += predictions;
  result.steps += 1;
  context_.backend.fill(sums, 0.0);
  return loss / static_cast<double>(predictions);
}

PassResult PipedreamRecurrence::evaluate(const EpochPlan& plan) {
  const UnitPlan units(plan, knobs_.units_per_step(), 1);
  std::vector<std::span<const std::int64_t>> ids;
  for (int t = 0; t < units.units(); ++t) ids.push_back(units.ids(t));
  validation_->begin(std::move(ids));
  if (tied_owner_ >= 0) share_tied(stage(0).newest);
  for (int t = 0; t < units.units(); ++t) {
    const MicroBatch batch = load(-1, t);
    Tensor x = batch.input;
    for (const auto& here : stages_) {
      x = here->part.stage.forward(here->part.store, here->weights(here->newest), here->slot, batch, x, false);
    }
  }
  PassResult result;
  take_loss(result, plan.samples() * context_.model.predictions_per_sample);
  result.steps = plan.steps();
  return result;
}

void PipedreamRecurrence::visit_parameters(const ParameterVisitor& visit) {
  for (const auto& here : stages_) {
    for (std::size_t i = 0; i < here->part.store.params().size(); ++i) {
      const Param& param = here->part.store.params()[i];
      if (static_cast<int>(i) == here->tied) continue;
      visit(param.spec, param.id, here->part.store.view(here->weights(here->newest), static_cast<int>(i)));
    }
  }
}

std::unique_ptr<Engine> make_recurrence(const EngineContext& context, const ConfigReader& reader) {
  return std::make_unique<PipedreamRecurrence>(context, read_pipedream_knobs(reader));
}

}  // namespace

EngineDefinition pipedream_recurrence_definition() {
  return {.name = "pipedream-recurrence",
          .summary = "what the pipedream engine computes, on one rank, mini-batch by mini-batch: its reference",
          .paper = "Narayanan et al., PipeDream, SOSP 2019",
          .reference = "pipedream-recurrence",
          .make = make_recurrence,
          .document = [](const ConfigReader& reader) { read_pipedream_knobs(reader); },
          .data_parallel_size = [](int, const ConfigReader&) { return 1; },
          .takes_data_store = false,
          .synchronous = false};
}

}  // namespace pdl
