#pragma once
// Checked MPI calls, and MPI's names of our types.

#include <mpi.h>

#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

#include "engine/tensor/dtype.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// Evaluates an MPI call; throws Error(communication) with MPI's own text, the expression and the source line. Needs
/// MPI_ERRORS_RETURN on the communicator.
#define PDL_MPI(call) ::pdl::detail::check_mpi((call), #call, std::source_location::current())

namespace detail {
void check_mpi(int status, const char* call, std::source_location where);
}  // namespace detail

/// MPI's text for an error code.
std::string mpi_error_text(int status);

/// The MPI type of an element. 16-bit floats travel as 16-bit integers: MPI can carry them but not add them.
MPI_Datatype mpi_type(DType dtype);
bool mpi_can_reduce(DType dtype);
MPI_Op mpi_op(ReduceOp op);

/// Some requests that are tested together.
class MpiRequests {
 public:
  /// Where the next call puts its request. For a receive, `expected` is the number of elements that must come; -1: not
  /// checked.
  MPI_Request* add(int expected = -1);
  bool empty() const { return requests_.empty(); }
  void clear();
  /// True when all are complete; never waits. `problem` becomes non-empty, with the result true, when MPI reports an
  /// error or a receive got less than it expected.
  bool test(MPI_Datatype type, std::string& problem);

 private:
  std::string find_problem(int status, MPI_Datatype type) const;
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<int> expected_;
};

}  // namespace pdl
