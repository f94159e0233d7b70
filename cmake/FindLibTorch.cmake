# Finds the LibTorch that pip's `torch` wheel carries and defines the imported
# target `LibTorch::torch` (libtorch_cpu and libc10; never libtorch_python).
#
# TorchConfig.cmake is not used: its CUDA probe needs a CUDA toolkit and fails
# under some CMake versions, and all that is needed here is two libraries.
#
#   Torch_ROOT   the `torch` package folder; by default that of the Python in
#                <source>/.venv, else of `python3` on the PATH.

if(NOT Torch_ROOT)
  find_program(FSDP_PYTHON NAMES python3
    PATHS ${CMAKE_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
  find_program(FSDP_PYTHON NAMES python3 REQUIRED)
  execute_process(
    COMMAND ${FSDP_PYTHON} -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE _torch_root OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET RESULT_VARIABLE _torch_rc)
  if(_torch_rc)
    message(FATAL_ERROR "no `torch` package for ${FSDP_PYTHON}: run `make setup`, "
                        "or pass -DTorch_ROOT=<site-packages>/torch")
  endif()
  set(Torch_ROOT ${_torch_root} CACHE PATH "the torch package folder")
endif()

find_library(LibTorch_CPU torch_cpu PATHS ${Torch_ROOT}/lib NO_DEFAULT_PATH)
find_library(LibTorch_C10 c10 PATHS ${Torch_ROOT}/lib NO_DEFAULT_PATH)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS LibTorch_CPU LibTorch_C10)

if(LibTorch_FOUND AND NOT TARGET LibTorch::torch)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES
    IMPORTED_LOCATION ${LibTorch_C10}
    INTERFACE_INCLUDE_DIRECTORIES
      "${Torch_ROOT}/include;${Torch_ROOT}/include/torch/csrc/api/include")
  add_library(LibTorch::torch SHARED IMPORTED)
  set_target_properties(LibTorch::torch PROPERTIES
    IMPORTED_LOCATION ${LibTorch_CPU}
    INTERFACE_LINK_LIBRARIES LibTorch::c10)
  # libtorch_cpu finds its CUDA and OpenMP companions through its own RPATH.
  target_link_options(LibTorch::torch INTERFACE -Wl,--allow-shlib-undefined)
endif()
