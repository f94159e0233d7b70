# What the compiler half needs: MLIR 22 and its TableGen helpers.
if(NOT MLIR_DIR AND EXISTS /usr/lib/llvm-22/lib/cmake/mlir)
  set(MLIR_DIR /usr/lib/llvm-22/lib/cmake/mlir)
endif()
find_package(MLIR 22.1 CONFIG REQUIRED)
list(APPEND CMAKE_MODULE_PATH ${MLIR_CMAKE_DIR} ${LLVM_CMAKE_DIR})
include(TableGen)
include(AddLLVM)
include(AddMLIR)
include_directories(SYSTEM ${LLVM_INCLUDE_DIRS} ${MLIR_INCLUDE_DIRS})
add_definitions(${LLVM_DEFINITIONS})

# MLIR's headers and the dialect's take longer to parse than most sources that
# include them. The dialect's library precompiles them for all.
function(fsdp_precompile_mlir name)
  if(name STREQUAL "FSDPDialect")
    target_precompile_headers(${name} PRIVATE
      <mlir/Bytecode/BytecodeOpInterface.h>
      <mlir/IR/Builders.h>
      <mlir/IR/BuiltinOps.h>
      <mlir/IR/Remarks.h>
      <mlir/IR/SymbolTable.h>
      <mlir/Interfaces/FunctionInterfaces.h>
      <mlir/Pass/Pass.h>
      <llvm/ADT/MapVector.h>
      <llvm/ADT/TypeSwitch.h>
      <llvm/Support/FormatVariadic.h>
      ${FSDP_HEADERS}/Dialect/Aten.h
      ${FSDP_HEADERS}/Dialect/FSDP.h
      ${FSDP_HEADERS}/Plan/Plan.h)
  else()
    # The header was compiled for a shared library.
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${name} PRIVATE -fPIC)
    target_precompile_headers(${name} REUSE_FROM FSDPDialect)
  endif()
endfunction()

# A library of the compiler; links the packaged libMLIR and libLLVM.
function(fsdp_add_compiler_library name type)
  cmake_parse_arguments(ARG "" "" "DEPENDS;LINK_LIBS" ${ARGN})
  add_library(${name} ${type} ${ARG_UNPARSED_ARGUMENTS})
  add_dependencies(${name} FSDPTableGen)
  if(ARG_DEPENDS)
    add_dependencies(${name} ${ARG_DEPENDS})
  endif()
  target_link_libraries(${name} PUBLIC ${ARG_LINK_LIBS} MLIR LLVM)
  fsdp_precompile_mlir(${name})
endfunction()
