#include "parallel/comm/mpi_world.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <new>
#include <thread>
#include <utility>

#include "parallel/comm/gpu_places.h"
#include "parallel/comm/launcher.h"
#if PDL_WITH_NCCL
#include "parallel/comm/nccl_communicator.h"
#endif
#include "parallel/comm/rank_order.h"
#include "parallel/comm/self_communicator.h"
#include "parallel/comm/staged_communicator.h"
#include "parallel/comm/stop_flag.h"

namespace pdl {
namespace {

constexpr std::chrono::milliseconds kPeersCloseRecords{300};
constexpr std::chrono::milliseconds kFirstFailureSpeaks{2000};
constexpr std::int64_t kLargestText = std::numeric_limits<int>::max();

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "unknown";
  std::string line(text.data(), static_cast<std::size_t>(length));
  line.resize(std::min(line.find('\n'), line.size()));
  std::replace(line.begin(), line.end(), '\t', ' ');
  return line;
}

/// World ranks of the members of a communicator; no communication.
std::vector<int> world_ranks_of(MPI_Comm comm) {
  int size = 0;
  PDL_MPI(MPI_Comm_size(comm, &size));
  std::vector<int> members(static_cast<std::size_t>(size)), ranks(members.size());
  for (int i = 0; i < size; ++i) members[static_cast<std::size_t>(i)] = i;
  MPI_Group group = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  PDL_MPI(MPI_Comm_group(comm, &group));
  PDL_MPI(MPI_Comm_group(MPI_COMM_WORLD, &world));
  PDL_MPI(MPI_Group_translate_ranks(group, size, members.data(), world, ranks.data()));
  PDL_MPI(MPI_Group_free(&group));
  PDL_MPI(MPI_Group_free(&world));
  return ranks;
}

/// For the first steps of the set-up, when there is no board to look at.
void wait_without_board(MPI_Request& request, double timeout_s) {
  const auto start = std::chrono::steady_clock::now();
  int complete = 0;
  while (true) {
    PDL_MPI(MPI_Test(&request, &complete, MPI_STATUS_IGNORE));
    if (complete) return;
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > timeout_s) {
      throw Error(str("the ranks did not find each other within ", timeout_s, " s"), ExitCode::communication);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Launcher launcher_of_environment() {
  return detect_launcher([](const char* name) { return std::getenv(name); });
}

}  // namespace

MpiWorld::MpiWorld(Mpi owner, const std::string& launcher) : owner_(owner) {
  PDL_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  PDL_MPI(MPI_Comm_rank(MPI_COMM_WORLD, &info_.rank));
  PDL_MPI(MPI_Comm_size(MPI_COMM_WORLD, &info_.size));
  info_.host = host_name();
  info_.launcher = launcher;
  info_.mpi_library = library_version();
  PDL_MPI(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host_comm_));
  PDL_MPI(MPI_Comm_set_errhandler(host_comm_, MPI_ERRORS_RETURN));
  PDL_MPI(MPI_Comm_rank(host_comm_, &info_.local_rank));
  PDL_MPI(MPI_Comm_size(host_comm_, &info_.local_size));
  context_ = std::make_shared<MpiContext>(open_board());
  MPI_Comm world = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  PDL_MPI(MPI_Comm_idup(MPI_COMM_WORLD, &world, &request));
  wait_without_board(request, timeout_s_);
  try {
    group_ = std::make_unique<MpiGroup>(context_, world, "the world's exchanges", timeout_s_);
  } catch (const Error&) {
    // A quicker rank is through already and has failed at its next step: it has spoken for all.
    if (first_failure().rank >= 0) abort(first_failure().code);
    throw;
  }
}

HostBoard MpiWorld::open_board() {
  void* memory = nullptr;
  const int status = MPI_Win_allocate_shared(sizeof(RankBoard), 1, MPI_INFO_NULL, host_comm_, &memory, &window_);
  if (status != MPI_SUCCESS) {
    throw Error(str("MPI cannot share ", sizeof(RankBoard),
                    " bytes between the ranks of this host (is /dev/shm full?): ", mpi_error_text(status)),
                ExitCode::communication);
  }
  static_assert(alignof(RankBoard) <= alignof(std::max_align_t), "MPI aligns no further");
  new (memory) RankBoard();
  // No rank may look at a board before its owner has emptied it.
  MPI_Request request = MPI_REQUEST_NULL;
  PDL_MPI(MPI_Ibarrier(host_comm_, &request));
  wait_without_board(request, timeout_s_);
  std::vector<RankBoard*> boards;
  for (int local_rank = 0; local_rank < info_.local_size; ++local_rank) {
    MPI_Aint bytes = 0;
    int unit = 0;
    PDL_MPI(MPI_Win_shared_query(window_, local_rank, &bytes, &unit, &memory));
    boards.push_back(static_cast<RankBoard*>(memory));
  }
  return HostBoard(std::move(boards), world_ranks_of(host_comm_), info_.local_rank);
}

MpiWorld::~MpiWorld() {
  const bool failed = std::uncaught_exceptions() > 0 || first_failure().rank >= 0;
  if (failed && info_.size > 1) return;
  try {
    barrier();
    group_.reset();
    context_->open = false;
    PDL_MPI(MPI_Win_free(&window_));
    PDL_MPI(MPI_Comm_free(&host_comm_));
    if (owner_ == Mpi::ours) PDL_MPI(MPI_Finalize());
  } catch (const Error& error) {
    if (claim_first_failure(error.code(), error.what()))
      std::fprintf(stderr, "error: at the end of the run: %s\n", error.what());
    abort(first_failure().code);
  }
}

std::unique_ptr<Communicator> MpiWorld::make_communicator(Device& device, const CommOptions& options) {
  if (options.kind == "auto" && info_.size == 1) return make_self_communicator(device);
  if (options.kind == "self") {
    if (info_.size == 1) return make_self_communicator(device);
    throw ConfigError(str("comm \"self\" is for one rank, there are ", info_.size, ": use \"auto\" or \"mpi\""),
                      ExitCode::unsupported);
  }
  const bool nccl = PDL_WITH_NCCL && options.kind == "nccl";
  if (options.kind != "auto" && options.kind != "mpi" && !nccl) {
    throw ConfigError(str("comm \"", options.kind, "\" is not in this build: use \"auto\", \"self\" or \"mpi\""),
                      ExitCode::unsupported);
  }
#if PDL_WITH_NCCL
  if (options.kind != "mpi" && can_use_nccl(device, options.kind)) {
    return std::make_unique<NcclCommunicator>(make_group(options.timeout_s), device, options.nccl, "world");
  }
#endif
  const MpiCommunicatorOptions mpi = {.deterministic = options.deterministic};
  if (device.info().kind == "cpu") return make_mpi_communicator(device, mpi, options.timeout_s);
  const int threads = static_cast<int>(std::thread::hardware_concurrency()) / info_.local_size;
  std::shared_ptr<Device> host = make_device({.kind = "cpu", .threads = std::max(1, threads)});
  std::unique_ptr<Communicator> inner = make_mpi_communicator(*host, mpi, options.timeout_s);
  return make_staged_communicator(std::move(inner), std::move(host), device);
}

bool MpiWorld::can_use_nccl(Device& device, const std::string& kind) {
  std::vector<RankPlace> places;
  std::vector<std::string> uuids = gather(device.info().uuid), hosts = gather(info_.host);
  for (std::size_t rank = 0; rank < uuids.size(); ++rank) places.push_back({hosts[rank], uuids[rank]});
  const std::string obstacle = obstacle_to_nccl(places);
  if (!obstacle.empty() && kind == "nccl") {
    throw ConfigError("comm \"nccl\" needs a GPU for every rank, but " + obstacle, ExitCode::unsupported);
  }
  return obstacle.empty();
}

std::unique_ptr<MpiCommunicator> MpiWorld::make_mpi_communicator(Device& device, const MpiCommunicatorOptions& options,
                                                                 double timeout_s) {
  return std::make_unique<MpiCommunicator>(make_group(timeout_s), device, options, "world");
}

std::unique_ptr<MpiGroup> MpiWorld::make_group(double timeout_s) {
  group_->set_timeout(timeout_s_);
  return std::make_unique<MpiGroup>(context_, group_->duplicate(), "axis world", timeout_s);
}

void MpiWorld::barrier() {
  group_->set_timeout(timeout_s_);
  const CallRecord record{.call = CommCall::barrier};
  MpiRequestOperation operation(*group_, record, group_->publish(record));
  PDL_MPI(MPI_Ibarrier(group_->comm(), operation.requests().add()));
  operation.wait();
}

void MpiWorld::reduce(std::vector<double>& values, ReduceOp op) {
  group_->set_timeout(timeout_s_);
  const auto count = static_cast<int>(values.size());
  const CallRecord record{.call = CommCall::numbers, .op = op, .count = count};
  MpiRequestOperation operation(*group_, record, group_->publish(record));
  // Everybody adds up everybody's numbers: the same bits on every rank and in every run.
  std::vector<double> all(values.size() * static_cast<std::size_t>(info_.size));
  PDL_MPI(MPI_Iallgather(values.data(), count, MPI_DOUBLE, all.data(), count, MPI_DOUBLE, group_->comm(),
                         operation.requests().add()));
  operation.wait();
  std::vector<const void*> contributions;
  for (int rank = 0; rank < info_.size; ++rank)
    contributions.push_back(all.data() + static_cast<std::size_t>(rank) * values.size());
  reduce_in_rank_order(values.data(), contributions, count, DType::fp64, op);
}

std::string MpiWorld::broadcast(const std::string& text, int root) {
  group_->set_timeout(timeout_s_);
  const CallRecord record{.call = CommCall::text, .root = root};
  auto bytes = static_cast<std::int64_t>(text.size());
  MpiRequestOperation size(*group_, record, group_->publish(record));
  PDL_MPI(MPI_Ibcast(&bytes, 1, MPI_INT64_T, root, group_->comm(), size.requests().add()));
  size.wait();
  PDL_CHECK(bytes <= kLargestText, "a text of ", bytes, " bytes");
  std::string result = text;
  result.resize(static_cast<std::size_t>(bytes));
  MpiRequestOperation content(*group_, record, group_->publish(record));
  PDL_MPI(MPI_Ibcast(result.data(), static_cast<int>(bytes), MPI_BYTE, root, group_->comm(), content.requests().add()));
  content.wait();
  return result;
}

std::vector<std::string> MpiWorld::gather(const std::string& text) {
  group_->set_timeout(timeout_s_);
  const CallRecord record{.call = CommCall::text};
  const auto ranks = static_cast<std::size_t>(info_.size);
  const auto own = static_cast<std::int64_t>(text.size());
  std::vector<std::int64_t> sizes(ranks);
  MpiRequestOperation size(*group_, record, group_->publish(record));
  PDL_MPI(MPI_Iallgather(&own, 1, MPI_INT64_T, sizes.data(), 1, MPI_INT64_T, group_->comm(), size.requests().add()));
  size.wait();
  std::vector<int> counts(ranks), places(ranks);
  std::int64_t total = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    PDL_CHECK(total + sizes[rank] <= kLargestText, "texts of more than ", kLargestText, " bytes");
    counts[rank] = static_cast<int>(sizes[rank]);
    places[rank] = static_cast<int>(total);
    total += sizes[rank];
  }
  std::string joined(static_cast<std::size_t>(total), '\0');
  MpiRequestOperation content(*group_, record, group_->publish(record));
  PDL_MPI(MPI_Iallgatherv(text.data(), static_cast<int>(own), MPI_BYTE, joined.data(), counts.data(), places.data(),
                          MPI_BYTE, group_->comm(), content.requests().add()));
  content.wait();
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    texts.push_back(joined.substr(static_cast<std::size_t>(places[rank]), static_cast<std::size_t>(counts[rank])));
  }
  return texts;
}

bool MpiWorld::stop_requested() const { return stop_was_requested(); }

void MpiWorld::announce(const std::string& phase) {
  context_->board.mine().phase.write(phase);
  context_->board.heartbeat();
}

bool MpiWorld::claim_first_failure(ExitCode code, const std::string& message) {
  return context_->board.claim_failure(code, message);
}

FirstFailure MpiWorld::first_failure() const { return context_->board.first_failure(); }

void MpiWorld::abort(ExitCode code) {
  std::fflush(nullptr);
  const FirstFailure failure = context_->board.first_failure();
  if (info_.size > 1 && failure.rank >= 0) {
    std::this_thread::sleep_for(failure.rank == info_.rank ? kPeersCloseRecords : kFirstFailureSpeaks);
  }
  MPI_Abort(MPI_COMM_WORLD, static_cast<int>(code));
  std::_Exit(static_cast<int>(code));
}

std::unique_ptr<World> make_world(int* argc, char*** argv) {
  int provided = 0;
  if (MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
    throw Error("MPI cannot be started", ExitCode::unsupported);
  }
  int size = 1;
  PDL_MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
  const Launcher launcher = launcher_of_environment();
  try {
    check_launch(launcher, size);
  } catch (const ConfigError&) {
    MPI_Finalize();  // nobody waits for a lone rank
    throw;
  }
  install_stop_handlers();
  return std::make_unique<MpiWorld>(MpiWorld::Mpi::ours, launcher.name);
}

std::unique_ptr<World> attach_world() {
  return std::make_unique<MpiWorld>(MpiWorld::Mpi::theirs, launcher_of_environment().name);
}

}  // namespace pdl
