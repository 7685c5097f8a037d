#include "parallel/comm/nccl_handle.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace pdl {
namespace {

class NcclWait final : public MpiWaitable {
 public:
  NcclWait(const MpiGroup& group, const std::function<bool()>& test, const std::string& what, std::int64_t sequence,
           const std::string& late)
      : group_(group), test_(test), what_(what), sequence_(sequence), late_(late) {}

  bool test() override { return test_(); }
  void check_peers() override {
    if (sequence_ > 0) group_.check(sequence_);
  }
  std::string describe() const override { return what_; }
  std::string describe_late(double waited_s) const override {
    if (sequence_ > 0) return group_.describe_late({}, sequence_, waited_s);
    return late_.empty() ? "another rank has not come so far" : late_;
  }

 private:
  const MpiGroup& group_;
  const std::function<bool()>& test_;
  const std::string& what_;
  std::int64_t sequence_;
  const std::string& late_;
};

}  // namespace

void wait_for_nccl(const MpiGroup& group, const std::function<bool()>& test, const std::string& what,
                   std::int64_t sequence, const std::string& late) {
  if (test()) return;
  NcclWait waitable(group, test, what, sequence, late);
  group.context().waiter.wait(waitable, group.timeout_s());
}

ncclConfig_t nccl_config(const NcclOptions& options) {
  if (const char* const blocking = std::getenv("NCCL_COMM_BLOCKING"); blocking != nullptr && std::atoi(blocking) == 1) {
    throw ConfigError("NCCL_COMM_BLOCKING=1 in the environment would let ranks wait inside NCCL for ever: unset it");
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (options.min_ctas > 0) config.minCTAs = options.min_ctas;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  return config;
}

NcclHandle::NcclHandle(MpiGroup& group, Device& device, std::string label)
    : GpuQueue(group, device),
      label_(std::move(label)),
      comm_(std::make_unique<ncclComm_t>(nullptr)),
      aborted_(std::make_shared<std::atomic<bool>>(false)) {}

NcclHandle::~NcclHandle() {
  start_end();
  if (*comm_ == nullptr && !failed_) return;
  if (ending_ && orderly() && finish_end()) return;
  group().context().gpu.abandon();
  static_cast<void>(comm_.release());  // a thread of NCCL's may still write there
}

void NcclHandle::check_library() {
  if (*comm_ != nullptr) static_cast<void>(idle());
}

void NcclHandle::start_abort() noexcept {
  failed_ = true;
  if (*comm_ == nullptr || aborting_) return;
  aborting_ = true;
  const auto abort = [comm = *comm_, aborted = aborted_] {
    ncclCommAbort(comm);
    aborted->store(true);
  };
  try {
    std::thread(abort).detach();
  } catch (const std::system_error&) {  // there is no thread to be had
    abort();
  }
}

ncclComm_t NcclHandle::get() const {
  if (aborting_) throw Error(str("NCCL (", label_, ") was aborted"), ExitCode::communication);
  return *comm_;
}

bool NcclHandle::orderly() const {
  const MpiContext& context = group().context();
  return !failed_ && context.open && std::uncaught_exceptions() == 0 && context.board.first_failure().rank < 0;
}

void NcclHandle::start_end() {
  if (ending_ || aborting_ || *comm_ == nullptr || !orderly()) return;
  try {
    if (!idle()) return;  // it never came to be connected
    check(ncclCommFinalize(get()), "ncclCommFinalize");
    ending_ = true;
  } catch (const Error& error) {
    std::fprintf(stderr, "warning: at the end of %s: %s\n", label_.c_str(), error.what());
  }
}

bool NcclHandle::finish_end() const {
  try {
    settle(ncclInProgress, "ncclCommFinalize");
  } catch (const Error& error) {
    std::fprintf(stderr, "warning: at the end of %s: %s\n", label_.c_str(), error.what());
    return false;
  }
  ncclCommDestroy(get());
  return true;
}

ncclUniqueId NcclHandle::make_id() const {
  ncclUniqueId id{};
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

void NcclHandle::connect(ncclUniqueId id, int rank, int size, const NcclOptions& options) {
  ncclConfig_t config = nccl_config(options);
  check(ncclCommInitRankConfig(comm_.get(), size, id, rank, &config), "ncclCommInitRankConfig");
}

bool NcclHandle::idle() const {
  ncclResult_t state = ncclSuccess;
  check(ncclCommGetAsyncError(get(), &state), "ncclCommGetAsyncError");
  check(state, "an operation");
  return state != ncclInProgress;
}

void NcclHandle::check(ncclResult_t result, const char* call) const {
  if (result != ncclSuccess && result != ncclInProgress) fail(result, call);
}

void NcclHandle::settle(ncclResult_t result, const char* call, std::int64_t sequence) const {
  check(result, call);
  if (result == ncclSuccess) return;
  if (sequence > 0) group().reach(sequence);  // this rank is in it already: NCCL connects for it
  wait_for_nccl(
      group(), [this] { return idle(); }, str(call, " (", label_, ")"), sequence);
}

void NcclHandle::fail(ncclResult_t result, const char* call) const {
  failed_ = true;
  const char* const details = ncclGetLastError(*comm_);
  const bool our_own = result == ncclInvalidArgument || result == ncclInvalidUsage;
  if (!our_own) group().context().waiter.await_explanation();
  throw Error(str("NCCL: ", call, " (", label_, "): ", ncclGetErrorString(result),
                  details == nullptr || *details == '\0' ? "" : ": ", details == nullptr ? "" : details),
              ExitCode::communication);
}

}  // namespace pdl
