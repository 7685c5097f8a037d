#include "parallel/comm/mpi_call.h"

#include "engine/base/error.h"

namespace pdl {
namespace detail {

void check_mpi(int status, const char* call, std::source_location where) {
  if (status == MPI_SUCCESS) return;
  const Error error(str("MPI: ", mpi_error_text(status)), ExitCode::communication, where);
  throw Error(str(error.what(), " (", error.where(), ": ", call, ")"), ExitCode::communication, where);
}

}  // namespace detail

std::string mpi_error_text(int status) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(status, text, &length) != MPI_SUCCESS) return str("error ", status);
  // Some libraries append a call stack on further lines.
  const std::string whole(text, static_cast<std::size_t>(length));
  return whole.substr(0, whole.find('\n'));
}

MPI_Datatype mpi_type(DType dtype) {
  switch (dtype) {
    case DType::fp64:
      return MPI_DOUBLE;
    case DType::fp32:
      return MPI_FLOAT;
    case DType::bf16:
    case DType::fp16:
      return MPI_UINT16_T;
    case DType::int64:
      return MPI_INT64_T;
    case DType::int32:
      return MPI_INT32_T;
    case DType::uint8:
      return MPI_UINT8_T;
  }
  return MPI_BYTE;
}

bool mpi_can_reduce(DType dtype) { return dtype != DType::bf16 && dtype != DType::fp16; }

MPI_Op mpi_op(ReduceOp op) { return op == ReduceOp::sum ? MPI_SUM : op == ReduceOp::max ? MPI_MAX : MPI_MIN; }

MPI_Request* MpiRequests::add(int expected) {
  requests_.push_back(MPI_REQUEST_NULL);
  expected_.push_back(expected);
  return &requests_.back();
}

void MpiRequests::clear() {
  requests_.clear();
  expected_.clear();
}

bool MpiRequests::test(MPI_Datatype type, std::string& problem) {
  if (requests_.empty()) return true;
  statuses_.resize(requests_.size());
  for (MPI_Status& status : statuses_) status.MPI_ERROR = MPI_SUCCESS;
  int complete = 0;
  const int status = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete, statuses_.data());
  if (status == MPI_SUCCESS && complete == 0) return false;
  problem = find_problem(status, type);
  clear();
  return true;
}

std::string MpiRequests::find_problem(int status, MPI_Datatype type) const {
  if (status != MPI_SUCCESS && status != MPI_ERR_IN_STATUS) return str("MPI: ", mpi_error_text(status));
  for (std::size_t i = 0; i < statuses_.size(); ++i) {
    // Requests that have not come to their end say MPI_ERR_PENDING beside the one that failed.
    const int error = status == MPI_SUCCESS ? MPI_SUCCESS : statuses_[i].MPI_ERROR;
    if (error != MPI_SUCCESS && error != MPI_ERR_PENDING) return str("MPI: ", mpi_error_text(error));
    int received = expected_[i];
    if (expected_[i] >= 0 && error == MPI_SUCCESS) MPI_Get_count(&statuses_[i], type, &received);
    if (received != expected_[i]) return str("got only ", received, " of ", expected_[i], " elements");
  }
  return "";
}

}  // namespace pdl
