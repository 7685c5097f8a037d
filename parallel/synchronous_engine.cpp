#include "parallel/synchronous_engine.h"

#include <array>
#include <cmath>
#include <cstring>

#include "parallel/comm/world.h"

namespace pdl {
namespace {

constexpr int kTextBytes = 256;
constexpr const char* kLossAdvice = "; a smaller learning rate, warm-up or clipping may help";
constexpr const char* kScaleAdvice =
    "; a smaller training.loss_scale, a smaller learning rate or a type with a wider range may help";

/// What the ranks agree on after each step, summed over ranks.
struct Agreement {
  double loss_sum, correct, ranks_asked_to_stop;
};
constexpr std::int64_t kAgreementBytes = sizeof(Agreement);

class SynchronousEngine final : public Engine {
 public:
  SynchronousEngine(const EngineContext& context, std::unique_ptr<StepMethod> method)
      : context_(context),
        method_(std::move(method)),
        schedule_(make_schedule(context)),
        scaler_(context.training.loss_scale, context.training.dtype) {}

  EngineDescription describe() const override { return method_->describe(); }

  Prediction predict() const override {
    Prediction prediction = method_->predict();
    prediction.memory[MemoryKind::communication] += kAgreementBytes + kTextBytes;
    if (context_.training
            .deterministic) {  // the group of all ranks and the control group have scratch for fixed-order sums
      prediction.memory[MemoryKind::communication] += 2 * deterministic_scratch_bytes(context_.world.size());
    }
    if (context_.world.size() > 1) {
      prediction.comm_per_step["control.all_reduce"] = {
          1, ring_bytes("all_reduce", context_.world.size(), kAgreementBytes)};
    }
    return prediction;
  }

  void prepare() override {
    // A group of its own keeps these few bytes apart from the training traffic in every count.
    control_ = context_.world.split(0, context_.world.rank(), kControlAxis);
    memory_ = context_.device.allocate(kAgreementBytes + kTextBytes, MemoryKind::communication);
    method_->prepare();
  }

  PassResult run_epoch(const EpochPlan& plan, Observer& observer) override {
    PassResult result;
    HeldModel& model = method_->model();
    model.begin_training(plan);
    for (std::int64_t step = 0; step < plan.steps() && !result.stopped; ++step) {
      const auto samples = static_cast<std::int64_t>(plan.step_ids(step).size());
      const StepOrder order = {.update = updates_,
                               .global_samples = samples,
                               .lr = schedule_.at(updates_),
                               .loss_scale = scaler_.scale(),
                               .skips_overflow = scaler_.active()};
      StepReport report{
          .step = step, .steps = plan.steps(), .samples = samples, .lr = order.lr, .loss_scale = order.loss_scale};
      observer.step_begin();
      model.clear_metrics();
      const StepOutcome outcome = method_->train_step(order, observer);
      report.grad_norm = outcome.grad_norm;
      report.skipped = outcome.skipped;
      if (scaler_.active()) scaler_.step_done(outcome.skipped);
      if (outcome.skipped) {
        ++result.skipped_steps;
      } else {
        ++updates_;
      }
      observer.phase(Phase::communication);
      const Agreement agreed = agree(context_.stop_requested && context_.stop_requested());
      report.loss = add(result, agreed, samples);
      observer.phase(Phase::other);
      observer.step_end(report);
      if (!std::isfinite(agreed.loss_sum)) {
        fail_nonfinite("the loss stopped being finite", kLossAdvice, plan.epoch(), step);
      }
      if (scaler_.exhausted()) fail_nonfinite(exhaustion(), kScaleAdvice, plan.epoch(), step);
    }
    method_->finish_epoch();
    return result;
  }

  PassResult evaluate(const EpochPlan& plan) override {
    PassResult result;
    HeldModel& model = method_->model();
    model.begin_evaluation(plan);
    model.clear_metrics();
    for (std::int64_t step = 0; step < plan.steps(); ++step) model.evaluate_step();
    add(result, agree(false), plan.samples());
    result.steps = plan.steps();
    return result;
  }

  void explain_pipeline(const EpochPlan& plan, PipelineRecord& record) override {
    method_->model().explain_pipeline(plan, record);
  }

  void visit_parameters(const ParameterVisitor& visit) override { method_->model().visit_parameters(visit); }
  std::vector<StateTensor> state() override { return method_->state(); }
  TrainingPosition position() const override { return {.updates = updates_, .loss_scale = scaler_.state()}; }
  void set_position(const TrainingPosition& position) override {
    updates_ = position.updates;
    scaler_.restore(position.loss_scale);
    method_->restored();
  }

 private:
  static LrSchedule make_schedule(const EngineContext& context) {
    const TrainingOptions& training = context.training;
    const EpochPlan plan = EpochPlan(context.train_samples, training.global_batch, training.seed, 0, false,
                                     training.drop_last, context.max_steps_per_epoch);
    return LrSchedule(training.lr_schedule, training.optimizer.lr, plan.steps(), plan.steps() * training.epochs);
  }

  /// Sums metrics and stop flags over the ranks: afterwards every rank holds the same numbers and decides alike.
  Agreement agree(bool stop) {
    Stream& stream = context_.device.compute_stream();
    const Tensor sums = memory_.tensor(DType::fp64, Shape{3});
    const double flag = stop ? 1.0 : 0.0;
    context_.device.copy(sums.raw(), method_->model().metrics().raw(), 2 * size_of(DType::fp64), stream);
    context_.device.copy(sums.range(2, 1).raw(), &flag, sizeof flag, stream);
    control_->all_reduce(sums, ReduceOp::sum, stream).wait(stream);
    Agreement agreed{};
    context_.device.copy(&agreed, sums.raw(), kAgreementBytes, stream);
    stream.synchronize();
    return agreed;
  }

  /// Adds one step's agreed numbers to the pass; returns the step's mean loss.
  double add(PassResult& result, const Agreement& agreed, std::int64_t samples) const {
    const std::int64_t predictions = samples * context_.model.predictions_per_sample;
    result.loss_sum += agreed.loss_sum;
    result.correct += agreed.correct;
    result.predictions += predictions;
    result.steps += 1;
    result.stopped = agreed.ranks_asked_to_stop > 0.0;
    return agreed.loss_sum / static_cast<double>(predictions);
  }

  std::string exhaustion() const {
    return str("gradients were not finite in ", LossScaler::kMostSkipsAtMinimum,
               " steps in a row, and the loss scale, ", scaler_.scale(), ", cannot fall: training is given up");
  }

  /// Every rank knows that something is not finite; the lowest rank that sees why tells the others, and all throw the
  /// same words.
  [[noreturn]] void fail_nonfinite(const std::string& what, const char* advice, std::int64_t epoch, std::int64_t step) {
    Stream& stream = context_.device.compute_stream();
    const std::string where = method_->model().describe_nonfinite();
    const int nobody = context_.world.size();
    const Tensor first = memory_.tensor(DType::fp64, Shape{1});
    double mine = where.empty() ? nobody : context_.world.rank();
    context_.device.copy(first.raw(), &mine, sizeof mine, stream);
    control_->all_reduce(first, ReduceOp::min, stream).wait(stream);
    context_.device.copy(&mine, first.raw(), sizeof mine, stream);
    stream.synchronize();
    std::string text = str(what, " in epoch ", epoch, ", step ", step);
    const int teller = static_cast<int>(mine);
    if (teller < nobody) {
      std::array<char, kTextBytes> words{};
      std::strncpy(words.data(), where.c_str(), kTextBytes - 1);
      const Tensor shared = memory_.tensor(DType::uint8, Shape{kTextBytes}, kAgreementBytes);
      context_.device.copy(shared.raw(), words.data(), kTextBytes, stream);
      control_->broadcast(shared, teller, stream).wait(stream);
      context_.device.copy(words.data(), shared.raw(), kTextBytes, stream);
      stream.synchronize();
      text += str(": rank ", teller, ", ", words.data());
    }
    throw Error(text + advice, ExitCode::numeric);
  }

  const EngineContext& context_;
  std::unique_ptr<StepMethod> method_;
  LrSchedule schedule_;
  LossScaler scaler_;
  std::unique_ptr<Communicator> control_;
  Buffer memory_;
  std::int64_t updates_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_synchronous_engine(const EngineContext& context, std::unique_ptr<StepMethod> method) {
  return std::make_unique<SynchronousEngine>(context, std::move(method));
}

}  // namespace pdl
