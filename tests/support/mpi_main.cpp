// The main of test binaries that run under an MPI launcher. MPI starts and ends here, once; tests run on every rank.
//
// Rank 0 speaks. The others write to a file of their own, shown only if they fail. A rank whose test fails stops there, because
// its peers wait for it inside the same test: it gives them a moment to fail too, then ends the job. No call here blocks inside
// MPI, which would spin and starve the ranks that share its core.

#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>

#include "tests/support/catch_session.h"

namespace {

constexpr double kPatienceOfPassedS = 240.0;  // peers may still be at work
constexpr double kPatienceOfFailedS = 3.0;    // peers are either failing as well or waiting for us in vain

/// Sends stdout and stderr of this process to a temporary file until `show`.
class QuietOutput {
 public:
  explicit QuietOutput(int rank) : rank_(rank), file_(rank > 0 ? std::tmpfile() : nullptr) {
    if (file_ == nullptr) return;
    std::fflush(nullptr);
    saved_stdout_ = ::dup(STDOUT_FILENO);
    saved_stderr_ = ::dup(STDERR_FILENO);
    ::dup2(::fileno(file_), STDOUT_FILENO);
    ::dup2(::fileno(file_), STDERR_FILENO);
  }
  ~QuietOutput() { restore(); }
  QuietOutput(const QuietOutput&) = delete;
  QuietOutput& operator=(const QuietOutput&) = delete;

  void show() {
    if (file_ == nullptr) return;
    std::FILE* file = file_;
    restore();
    std::rewind(file);
    std::printf("---- rank %d\n", rank_);
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) std::putchar(c);
    std::fclose(file);
    std::fflush(stdout);
  }

 private:
  void restore() {
    if (file_ == nullptr) return;
    std::fflush(nullptr);
    ::dup2(saved_stdout_, STDOUT_FILENO);
    ::dup2(saved_stderr_, STDERR_FILENO);
    ::close(saved_stdout_);
    ::close(saved_stderr_);
    file_ = nullptr;
  }

  int rank_;
  std::FILE* file_;
  int saved_stdout_ = -1;
  int saved_stderr_ = -1;
};

/// Whether the request was done before the patience was.
bool wait(MPI_Request request, double patience_s) {
  const auto start = std::chrono::steady_clock::now();
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0) {
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > patience_s) return false;
    ::usleep(500);
  }
  return done != 0;
}

/// The worst of all ranks' results, or `mine` when the others do not come in time (`*agreed` is then false). The communicator is
/// none that tests use: a peer may still be inside a collective of the test that failed here.
int worst_of_all(MPI_Comm comm, int mine, bool* agreed) {
  int all = mine;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(&mine, &all, 1, MPI_INT, MPI_MAX, comm, &request);
  *agreed = wait(request, mine == 0 ? kPatienceOfPassedS : kPatienceOfFailedS);
  return *agreed ? all : mine;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm agreement = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Comm_idup(MPI_COMM_WORLD, &agreement, &request);
  if (!wait(request, kPatienceOfPassedS)) MPI_Abort(MPI_COMM_WORLD, 1);

  QuietOutput output(rank);
  int result = 1;
  try {
    result = run_catch_session(argc, argv, size > 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    output.show();
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  if (result != 0) output.show();

  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return result == 0 ? 0 : 1;

  bool agreed = false;
  const int worst = worst_of_all(agreement, result == 0 ? 0 : 1, &agreed);
  if (!agreed) {
    if (result == 0) std::fprintf(stderr, "rank %d: passed, but other ranks did not come to the end\n", rank);
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Comm_free(&agreement);
  MPI_Finalize();
  return worst;
}
