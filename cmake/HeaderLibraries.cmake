# nlohmann/json 3.11, CLI11, xxHash and GoogleTest: as the system's packages have them, else
# as `bench/gpu.sh pack` put them into third_party/, for hosts that lack them and
# have no network.
set(FSDP_THIRD_PARTY ${CMAKE_SOURCE_DIR}/third_party)

function(fsdp_find_headers package version target header)
  find_package(${package} ${version} QUIET)
  if(TARGET ${target})
    return()
  endif()
  # What was found earlier may be gone, as packed sources that were removed.
  if(NOT EXISTS "${FSDP_${package}_INCLUDE}/${header}")
    unset(FSDP_${package}_INCLUDE CACHE)
  endif()
  # The packed one first: the system's may be too old.
  find_path(FSDP_${package}_INCLUDE ${header} NO_DEFAULT_PATH
    PATHS ${FSDP_THIRD_PARTY}/include)
  find_path(FSDP_${package}_INCLUDE ${header})
  if(NOT FSDP_${package}_INCLUDE)
    message(FATAL_ERROR "no ${header}: install ${package} ${version} (make setup), or take a "
                        "tree that `bench/gpu.sh pack` made")
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${FSDP_${package}_INCLUDE})
endfunction()

# A macro: what find_package imports belongs to the caller's directory.
macro(fsdp_find_gtest)
  find_package(GTest QUIET)
  if(NOT TARGET GTest::gmock AND EXISTS ${FSDP_THIRD_PARTY}/googletest)
    set(INSTALL_GTEST OFF)
    add_subdirectory(${FSDP_THIRD_PARTY}/googletest
      ${CMAKE_BINARY_DIR}/third_party/googletest EXCLUDE_FROM_ALL)
  endif()
endmacro()
