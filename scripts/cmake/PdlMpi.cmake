# MPI, and the launcher that belongs to it. Another MPI's launcher would start N processes that each believe to be alone.
#
# Sets PDL_MPI_FAMILY (mpich, openmpi or other) and PDL_LAUNCHER, a list: the launcher with all it needs in front of "-n N".

set(MPI_CXX_SKIP_MPICXX TRUE)  # the removed C++ bindings
if(DEFINED CACHE{MPIEXEC_EXECUTABLE} AND NOT DEFINED CACHE{PDL_MPIEXEC})
  set(PDL_MPIEXEC "${MPIEXEC_EXECUTABLE}" CACHE FILEPATH "launcher that belongs to the MPI library")  # the user's word
endif()
find_package(MPI COMPONENTS CXX QUIET)
pdl_require("MPI" MPI_CXX_FOUND "MPI-${MPI_CXX_VERSION}" "libmpich-dev mpich (or libopenmpi-dev openmpi-bin)")

include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES MPI::MPI_CXX)
set(CMAKE_REQUIRED_QUIET TRUE)
check_cxx_source_compiles("#include <mpi.h>\n#ifndef MPICH_VERSION\n#error\n#endif\nint main() { return 0; }" PDL_MPI_IS_MPICH)
check_cxx_source_compiles("#include <mpi.h>\n#ifndef OMPI_MAJOR_VERSION\n#error\n#endif\nint main() { return 0; }"
  PDL_MPI_IS_OPENMPI)
unset(CMAKE_REQUIRED_LIBRARIES)
unset(CMAKE_REQUIRED_QUIET)

set(PDL_MPI_FAMILY other)
set(names mpiexec mpirun)
if(PDL_MPI_IS_OPENMPI)
  set(PDL_MPI_FAMILY openmpi)
  set(names mpirun.openmpi mpiexec.openmpi mpirun mpiexec)
elseif(PDL_MPI_IS_MPICH)
  set(PDL_MPI_FAMILY mpich)
  set(names mpiexec.mpich mpiexec.hydra mpiexec mpirun)
endif()

# The folder of the compiler wrapper comes first, then the real one behind its symbolic links, then what PATH says.
set(folders "")
if(MPI_CXX_COMPILER)
  get_filename_component(folder "${MPI_CXX_COMPILER}" DIRECTORY)
  list(APPEND folders "${folder}")
  get_filename_component(real "${MPI_CXX_COMPILER}" REALPATH)
  get_filename_component(folder "${real}" DIRECTORY)
  list(APPEND folders "${folder}")
endif()
find_program(PDL_MPIEXEC NAMES ${names} NAMES_PER_DIR HINTS ${folders}
  DOC "launcher that belongs to the MPI library")
mark_as_advanced(PDL_MPIEXEC)
if(NOT PDL_MPIEXEC)
  set(PDL_MPIEXEC "${MPIEXEC_EXECUTABLE}")
endif()

set(PDL_LAUNCHER "${PDL_MPIEXEC}")
set(mpi_note "")
if(PDL_MPIEXEC)
  execute_process(COMMAND "${PDL_MPIEXEC}" --version OUTPUT_VARIABLE launcher_version ERROR_VARIABLE launcher_version)
  set(launcher_family other)
  if(launcher_version MATCHES "Open MPI|OpenRTE|open-mpi")
    set(launcher_family openmpi)
  elseif(launcher_version MATCHES "HYDRA|Hydra|MPICH")
    set(launcher_family mpich)
  endif()
  if(NOT launcher_family STREQUAL "other" AND NOT PDL_MPI_FAMILY STREQUAL "other"
     AND NOT launcher_family STREQUAL PDL_MPI_FAMILY)
    message(WARNING "${PDL_MPIEXEC} belongs to ${launcher_family}, the MPI library is ${PDL_MPI_FAMILY}: "
      "set -DPDL_MPIEXEC to the library's own launcher, or every rank will be alone")
  endif()
else()
  set(mpi_note "no launcher found: set -DPDL_MPIEXEC")
endif()

if(PDL_MPI_FAMILY STREQUAL "openmpi")
  # Tests start more ranks than there are cores, and containers run them as root.
  execute_process(COMMAND id -u OUTPUT_VARIABLE user_id OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(user_id STREQUAL "0")
    list(APPEND PDL_LAUNCHER --allow-run-as-root)
  endif()
  list(APPEND PDL_LAUNCHER --oversubscribe --bind-to none)
endif()

list(JOIN PDL_LAUNCHER " " launcher_text)
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/launcher" CONTENT "@launcher_text@\n" @ONLY)  # for scripts
pdl_feature("mpi launcher" ON "${PDL_MPI_FAMILY}: ${launcher_text} ${mpi_note}")
