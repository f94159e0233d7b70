# Finds the CUDA half of the `torch` wheel that FindLibTorch found, and nvcc;
# sets FSDP_CUDA (ON or OFF) by FSDP_ENABLE_CUDA and defines the imported target
# LibTorch::cuda: libtorch_cuda, libc10_cuda, the CUDA runtime and NCCL, each
# with its headers, all of the wheels that torch pins.
#
# A toolkit brings a CUDA runtime and an NCCL of its own. libtorch_cuda loads
# those of the wheels, so the headers have to be the wheels' too: the structs of
# two NCCL versions differ in size, which links and then corrupts the heap.

set(FSDP_ENABLE_CUDA AUTO CACHE STRING
  "Build the CUDA module: ON, OFF, or AUTO: where nvcc and a torch wheel with CUDA are")
set_property(CACHE FSDP_ENABLE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(FSDP_CUDA_ARCHITECTURES "90-real;80-virtual" CACHE STRING
  "GPUs that the kernels are compiled for, as CMAKE_CUDA_ARCHITECTURES takes them")

# Says in `out` why there is no CUDA module; empty if there is one.
function(_fsdp_find_cuda out)
  set(${out} "" PARENT_SCOPE)
  if(NOT FSDP_ENABLE_CUDA)
    set(${out} "FSDP_ENABLE_CUDA is OFF" PARENT_SCOPE)
    return()
  endif()
  if(FSDP_SANITIZE)
    set(${out} "not with sanitizers" PARENT_SCOPE)
    return()
  endif()
  find_library(LibTorch_CUDA torch_cuda PATHS ${Torch_ROOT}/lib NO_DEFAULT_PATH)
  find_library(LibTorch_C10_CUDA c10_cuda PATHS ${Torch_ROOT}/lib NO_DEFAULT_PATH)
  if(NOT LibTorch_CUDA OR NOT LibTorch_C10_CUDA)
    set(${out} "the torch wheel in ${Torch_ROOT} is without CUDA" PARENT_SCOPE)
    return()
  endif()
  # The wheels of CUDA 13 share one folder; each of CUDA 12 has its own.
  get_filename_component(site ${Torch_ROOT} DIRECTORY)
  set(nvidia ${site}/nvidia)
  find_path(FSDP_CUDART_INCLUDE cuda_runtime_api.h NO_DEFAULT_PATH
    PATHS ${nvidia}/cu13/include ${nvidia}/cuda_runtime/include)
  find_file(FSDP_CUDART NAMES libcudart.so.13 libcudart.so.12 NO_DEFAULT_PATH
    PATHS ${nvidia}/cu13/lib ${nvidia}/cuda_runtime/lib)
  find_path(FSDP_NCCL_INCLUDE nccl.h NO_DEFAULT_PATH PATHS ${nvidia}/nccl/include)
  find_file(FSDP_NCCL libnccl.so.2 NO_DEFAULT_PATH PATHS ${nvidia}/nccl/lib)
  foreach(part FSDP_CUDART_INCLUDE FSDP_CUDART FSDP_NCCL_INCLUDE FSDP_NCCL)
    if(NOT ${part})
      set(${out} "no ${part} in the wheels below ${nvidia}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(${out} "no nvcc" PARENT_SCOPE)
  endif()
endfunction()

_fsdp_find_cuda(_fsdp_no_cuda)
if(NOT _fsdp_no_cuda)
  set(CMAKE_CUDA_ARCHITECTURES ${FSDP_CUDA_ARCHITECTURES})
  # nvcc's own host compiler links the trial program: not with the flags of ours.
  set(_fsdp_linker_flags "${CMAKE_EXE_LINKER_FLAGS}")
  set(CMAKE_EXE_LINKER_FLAGS "")
  enable_language(CUDA)
  set(CMAKE_EXE_LINKER_FLAGS "${_fsdp_linker_flags}")
  string(REGEX MATCH "[0-9]+$" _fsdp_cudart_major ${FSDP_CUDART})
  if(NOT CMAKE_CUDA_COMPILER_VERSION MATCHES "^${_fsdp_cudart_major}\\.")
    set(_fsdp_no_cuda "expected nvcc ${_fsdp_cudart_major}, as torch's CUDA is, got ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
endif()
if(_fsdp_no_cuda)
  if(FSDP_ENABLE_CUDA AND NOT FSDP_ENABLE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "FSDP_ENABLE_CUDA is ${FSDP_ENABLE_CUDA}, but: ${_fsdp_no_cuda}")
  endif()
  message(STATUS "CUDA module: off (${_fsdp_no_cuda})")
  set(FSDP_CUDA OFF)
  return()
endif()

message(STATUS "CUDA module: on (${FSDP_CUDA_ARCHITECTURES})")
set(FSDP_CUDA ON)
if(NOT TARGET LibTorch::cuda)
  add_library(LibTorch::cuda INTERFACE IMPORTED)
  target_include_directories(LibTorch::cuda INTERFACE
    ${FSDP_NCCL_INCLUDE} ${FSDP_CUDART_INCLUDE})
  # Some wheels lack crt/ and nv/, which their own headers include: those come from
  # the toolkit, after all other folders.
  foreach(folder ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    target_compile_options(LibTorch::cuda INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter ${folder}>")
  endforeach()
  # Nothing refers to what registers the kernels, so the linker would drop it.
  # By their SONAMEs, as libtorch_cuda names them: one copy of each is loaded.
  target_link_libraries(LibTorch::cuda INTERFACE LibTorch::torch
    -Wl,--push-state,--no-as-needed
    ${LibTorch_CUDA} ${LibTorch_C10_CUDA} ${FSDP_CUDART} ${FSDP_NCCL}
    -Wl,--pop-state)
endif()
