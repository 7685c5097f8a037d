# The CUDA backend and NCCL. `cuda_backend_files` lists the backend's sources.
# Sets PDL_WITH_CUDA and PDL_WITH_NCCL; when on, the language CUDA is enabled.

set(cuda_found FALSE)
set(nccl_found FALSE)
set(cuda_why_off "no CUDA toolkit: NVIDIA's cuda-toolkit, or apt install nvidia-cuda-toolkit (non-free)")
set(nccl_why_off "needs the CUDA backend")

if(NOT cuda_backend_files)
  set(cuda_why_off "no CUDA backend in this version")
elseif(PDLBENCH_CUDA STREQUAL "AUTO" OR PDLBENCH_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80;90" CACHE STRING "GPU generations to compile for")
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit QUIET)
    find_package(CUDNN QUIET)
    if(CUDAToolkit_FOUND AND CUDNN_FOUND)
      set(cuda_found TRUE)
    else()
      set(cuda_why_off "CUDA toolkit found, cuDNN missing: NVIDIA's cudnn, or apt install nvidia-cudnn (non-free)")
    endif()
  endif()
endif()
pdl_resolve(CUDA cuda_found "CUDA ${CUDAToolkit_VERSION}, cuDNN ${CUDNN_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}"
  "${cuda_why_off}")

if(PDL_WITH_CUDA)
  enable_language(CUDA)
  # CMake 3.25.1 knows no CUDA20 for this nvcc, so the flag is ours and no CUDA_STANDARD is set.
  string(APPEND CMAKE_CUDA_FLAGS " -std=c++20 -Xcompiler=-ffp-contract=off")
  find_package(NCCL QUIET)
  set(nccl_found ${NCCL_FOUND})
  set(nccl_why_off "apt install libnccl-dev (NVIDIA's packages)")
endif()
pdl_resolve(NCCL nccl_found "NCCL ${NCCL_VERSION}" "${nccl_why_off}")
