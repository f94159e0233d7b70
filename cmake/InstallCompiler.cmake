# `cmake --install build`: programs, the compiler's libraries with their headers,
# and a package that find_package(fsdp-mlir) finds (examples/pass-plugin).
include(CMakePackageConfigHelpers)
set(libraries FSDPSupport FSDPPlan FSDPSimulate FSDPDialect FSDPCodegen FSDPTransforms)
set(package_dir lib/cmake/fsdp-mlir)
foreach(library ${libraries})
  target_include_directories(${library} INTERFACE $<INSTALL_INTERFACE:include>)
  target_compile_features(${library} INTERFACE cxx_std_20)
endforeach()
install(TARGETS ${libraries} EXPORT fsdp-mlir LIBRARY DESTINATION lib)
install(TARGETS fsdp-opt fsdp-run fsdp-checkpoint fsdp-lsp-server fsdp-reduce RUNTIME DESTINATION bin)
install(TARGETS FSDPCaptureReader LIBRARY DESTINATION lib) # fsdp-opt loads it
if(TARGET fsdp_cuda)
  install(TARGETS fsdp_cuda LIBRARY DESTINATION lib)
endif()
install(EXPORT fsdp-mlir NAMESPACE fsdp-mlir:: DESTINATION ${package_dir}
  FILE fsdp-mlir-targets.cmake)
foreach(part Dialect Plan Simulate Support Transforms)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fsdp/${part}
    DESTINATION include/fsdp FILES_MATCHING PATTERN "*.h" PATTERN "*.td")
endforeach()
install(DIRECTORY ${PROJECT_BINARY_DIR}/include/fsdp/Dialect
  ${PROJECT_BINARY_DIR}/include/fsdp/Transforms
  DESTINATION include/fsdp FILES_MATCHING PATTERN "*.h.inc")
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fsdp-mlir-config.cmake.in
  ${PROJECT_BINARY_DIR}/fsdp-mlir-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdp-mlir-config-version.cmake
  COMPATIBILITY ExactVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdp-mlir-config.cmake
  ${PROJECT_BINARY_DIR}/fsdp-mlir-config-version.cmake DESTINATION ${package_dir})
