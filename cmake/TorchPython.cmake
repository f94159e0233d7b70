# What an extension module of the Python that imports `torch` needs: the target
# `LibTorch::python` (Python's headers and libtorch_python).
if(NOT FSDP_PYTHON)
  find_program(FSDP_PYTHON NAMES python3 PATHS ${CMAKE_SOURCE_DIR}/.venv/bin
    NO_DEFAULT_PATH)
endif()
set(Python3_EXECUTABLE ${FSDP_PYTHON})
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

find_library(LibTorch_PYTHON torch_python PATHS ${Torch_ROOT}/lib
  NO_DEFAULT_PATH REQUIRED)
if(NOT TARGET LibTorch::python)
  add_library(LibTorch::python SHARED IMPORTED)
  set_target_properties(LibTorch::python PROPERTIES
    IMPORTED_LOCATION ${LibTorch_PYTHON}
    INTERFACE_LINK_LIBRARIES "LibTorch::torch;Python3::Module")
endif()
