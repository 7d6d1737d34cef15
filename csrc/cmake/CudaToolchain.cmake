# Finds a CUDA toolkit and enables the CUDA language. No device is needed.
#
# In:  PIPEKERNELS_CUDA = auto | 0 | 1 (auto: use a toolkit if there is one; 1: fail without one),
#      and the environment variables CUDACXX, CUDA_HOME, CUDA_PATH, CUDAARCHS and
#      TORCH_CUDA_ARCH_LIST.
# Out: PIPEKERNELS_WITH_CUDA. If it is ON, the CUDA language is enabled, and
#      CMAKE_CUDA_ARCHITECTURES is set.

include(CheckLanguage)

# Sets `out` to the root of the toolkit of `nvcc`, or to an empty string. An nvcc on PATH may be a
# wrapper script outside its toolkit, so this asks it for its TOP instead of using its folder.
function(pipekernels_toolkit_root nvcc out)
  set(${out} "" PARENT_SCOPE)
  execute_process(COMMAND ${nvcc} --dryrun -x cu /dev/null
    OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
  if(status EQUAL 0 AND text MATCHES "#\\$ TOP=([^\r\n]+)")
    string(STRIP "${CMAKE_MATCH_1}" top)
    get_filename_component(top "${top}" REALPATH)
    set(${out} "${top}" PARENT_SCOPE)
  endif()
endfunction()

# Sets `out` to the nvcc to use, or to an empty string. Environment variables take precedence.
function(pipekernels_find_nvcc out)
  file(GLOB versioned LIST_DIRECTORIES true "/usr/local/cuda-*")
  list(SORT versioned COMPARE NATURAL ORDER DESCENDING)
  find_program(PIPEKERNELS_NVCC_ON_PATH nvcc PATHS ENV PATH NO_DEFAULT_PATH)
  set(candidates $ENV{CUDACXX})
  foreach(root $ENV{CUDA_HOME} $ENV{CUDA_PATH})
    list(APPEND candidates "${root}/bin/nvcc")
  endforeach()
  list(APPEND candidates ${PIPEKERNELS_NVCC_ON_PATH} "/usr/local/cuda/bin/nvcc")
  foreach(root ${versioned})
    list(APPEND candidates "${root}/bin/nvcc")
  endforeach()
  foreach(candidate ${candidates})
    pipekernels_toolkit_root("${candidate}" root)
    if(root AND EXISTS "${root}/bin/nvcc")
      set(${out} "${root}/bin/nvcc" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

# Sets `out` to TORCH_CUDA_ARCH_LIST ("8.0 9.0a;10.0+PTX") in CMake's form ("80-real;90a-real;100").
function(pipekernels_torch_architectures text out)
  string(REGEX REPLACE "[ ,;]+" ";" entries "${text}")
  set(architectures)
  foreach(entry ${entries})
    if(NOT entry MATCHES "^([0-9]+)\\.([0-9]+)([af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST holds '${entry}', which is not of the form 9.0, "
        "9.0a or 9.0+PTX. Use such entries, or set CUDAARCHS (for example CUDAARCHS='80;90').")
    endif()
    set(architecture "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
    if(NOT CMAKE_MATCH_4)
      string(APPEND architecture "-real")
    endif()
    list(APPEND architectures "${architecture}")
  endforeach()
  set(${out} "${architectures}" PARENT_SCOPE)
endfunction()

set(PIPEKERNELS_WITH_CUDA OFF)
if(NOT PIPEKERNELS_CUDA MATCHES "^(auto|0|1)$")
  message(FATAL_ERROR "PIPEKERNELS_CUDA is '${PIPEKERNELS_CUDA}'; it must be auto, 0 or 1.")
endif()
if(NOT PIPEKERNELS_CUDA STREQUAL "0")
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # discard a NOTFOUND of an earlier configuration
    pipekernels_find_nvcc(nvcc)
    if(nvcc)
      set(CMAKE_CUDA_COMPILER "${nvcc}")
      check_language(CUDA)
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER)
    get_filename_component(root "${CMAKE_CUDA_COMPILER}" DIRECTORY)
    get_filename_component(CUDAToolkit_ROOT "${root}" DIRECTORY)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(PIPEKERNELS_WITH_CUDA ON)
  elseif(PIPEKERNELS_CUDA STREQUAL "1")
    message(FATAL_ERROR "PIPEKERNELS_CUDA=1, but no working CUDA toolkit was found in CUDACXX, "
      "CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda*. Install one, or set CUDA_HOME to its root; "
      "PIPEKERNELS_CUDA=0 builds for CPUs only.")
  endif()
endif()

# The newest architecture also gets PTX, which later GPUs compile at load time.
if(PIPEKERNELS_WITH_CUDA)
  if(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}")
  elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    pipekernels_torch_architectures("$ENV{TORCH_CUDA_ARCH_LIST}" CMAKE_CUDA_ARCHITECTURES)
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)  # knows no sm_100
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90")
  else()
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100")
  endif()
endif()
