#include "parallel/comm/nccl_handle.h"

#include <algorithm>
#include <cstdio>
#include <exception>
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
    if (sequence_ > 0) return group_.board().late_members(sequence_, std::max(1.0, 0.5 * waited_s));
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
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (options.min_ctas > 0) config.minCTAs = options.min_ctas;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  return config;
}

NcclHandle::NcclHandle(const MpiGroup& group, std::string label)
    : group_(group), label_(std::move(label)), comm_(std::make_unique<ncclComm_t>(nullptr)) {}

NcclHandle::~NcclHandle() {
  start_end();
  if (*comm_ == nullptr && !failed_) return;
  if (ending_ && orderly() && finish_end()) return;
  if (*comm_ != nullptr) ncclCommAbort(*comm_);
  static_cast<void>(comm_.release());  // a thread of NCCL's may still write there
}

bool NcclHandle::orderly() const {
  const MpiContext& context = group_.context();
  return !failed_ && context.open && std::uncaught_exceptions() == 0 && context.board.first_failure().rank < 0;
}

void NcclHandle::start_end() {
  if (ending_ || *comm_ == nullptr || !orderly()) return;
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
  wait_for_nccl(
      group_, [this] { return idle(); }, str(call, " (", label_, ")"), sequence);
}

void NcclHandle::fail(ncclResult_t result, const char* call) const {
  failed_ = true;
  // When a rank has failed, its peers' NCCL often complains sooner than they see why.
  const HostBoard& board = group_.context().board;
  const FirstFailure first = board.first_failure();
  if (first.rank >= 0 && first.rank != board.world_rank()) {
    throw Error(str("stopped by rank ", first.rank, ": ", first.message), first.code);
  }
  const char* const details = ncclGetLastError(get());
  throw Error(str("NCCL: ", call, " (", label_, "): ", ncclGetErrorString(result),
                  details == nullptr || *details == '\0' ? "" : ": ", details == nullptr ? "" : details),
              ExitCode::communication);
}

}  // namespace pdl
