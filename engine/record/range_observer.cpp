#include "engine/record/range_observer.h"

#include "engine/base/error.h"

namespace pdl {

void RangeObserver::open_step() { ranges_->push(str("step ", ended_steps_)); }

void RangeObserver::close_phase() {
  if (in_phase_) ranges_->pop();
  in_phase_ = false;
}

void RangeObserver::step_begin() {
  if (ranges_ == nullptr) return;
  if (begun_steps_++ == ended_steps_) open_step();
}

void RangeObserver::phase(Phase phase) {
  if (ranges_ == nullptr) return;
  close_phase();
  ranges_->push(kPhaseNames[static_cast<int>(phase)]);
  in_phase_ = true;
}

void RangeObserver::task_begin(const Task& task) {
  if (ranges_ == nullptr) return;
  close_phase();
  ranges_->push(str(kTaskNames[static_cast<int>(task.kind)], " ", task.number));
  ++open_tasks_;
}

void RangeObserver::task_end() {
  if (ranges_ == nullptr || open_tasks_ == 0) return;
  close_phase();
  ranges_->pop();
  --open_tasks_;
}

void RangeObserver::step_end(const StepReport&) {
  if (ranges_ == nullptr) return;
  close_phase();
  for (; open_tasks_ > 0; --open_tasks_) ranges_->pop();  // ranges are a stack: what goes on is cut off here
  ranges_->pop();
  ++ended_steps_;
  if (begun_steps_ > ended_steps_) open_step();
}

}  // namespace pdl
