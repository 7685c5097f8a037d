# oneDNN by its header and library: its own CMake files insist on an OpenCL that the CPU engine does not need.
# Defines oneDNN_FOUND, oneDNN_VERSION and the target oneDNN::oneDNN.

find_path(oneDNN_INCLUDE_DIR dnnl.hpp HINTS ENV CPATH)
find_library(oneDNN_LIBRARY dnnl)
mark_as_advanced(oneDNN_INCLUDE_DIR oneDNN_LIBRARY)

set(oneDNN_VERSION "")
foreach(place IN ITEMS oneapi/dnnl/dnnl_version.h dnnl_version.h)
  if(oneDNN_INCLUDE_DIR AND NOT oneDNN_VERSION AND EXISTS "${oneDNN_INCLUDE_DIR}/${place}")
    file(STRINGS "${oneDNN_INCLUDE_DIR}/${place}" lines REGEX "define DNNL_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
    string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
    list(JOIN numbers "." oneDNN_VERSION)
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(oneDNN REQUIRED_VARS oneDNN_LIBRARY oneDNN_INCLUDE_DIR VERSION_VAR oneDNN_VERSION)

if(oneDNN_FOUND AND NOT TARGET oneDNN::oneDNN)
  add_library(oneDNN::oneDNN UNKNOWN IMPORTED)
  set_target_properties(oneDNN::oneDNN PROPERTIES
    IMPORTED_LOCATION "${oneDNN_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${oneDNN_INCLUDE_DIR}")
endif()
