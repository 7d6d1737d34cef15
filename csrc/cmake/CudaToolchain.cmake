# Decides whether the CUDA part is built, finds a toolkit and enables the CUDA language.
#
# In:  PIPEKERNELS_CUDA = auto | 0 | 1 (auto: if there is a toolkit, and a GPU is visible or
#      architectures are named, for these; 1: for all unless some are named, fail without a toolkit),
#      and the environment variables CUDACXX, CUDA_HOME, CUDA_PATH, CUDAARCHS and
#      TORCH_CUDA_ARCH_LIST.
# Out: PIPEKERNELS_WITH_CUDA. If it is ON, the CUDA language is enabled, and
#      CMAKE_CUDA_ARCHITECTURES is set. The file cuda.txt of the build folder has the decision in
#      words, for build_extension.py and the Makefile.

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

# Sets `out` to the architectures of this machine's GPUs, or to an empty string if there are none.
# The newest one also gets PTX, which later GPUs compile at load time.
function(pipekernels_visible_architectures out)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader TIMEOUT 60
    OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status)
  set(architectures)
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" architectures "${text}")
    list(TRANSFORM architectures REPLACE "\\." "")
    list(REMOVE_DUPLICATES architectures)
    list(SORT architectures COMPARE NATURAL)
    list(TRANSFORM architectures APPEND "-real")
    string(REGEX REPLACE "-real$" "" architectures "${architectures}")
  endif()
  set(${out} "${architectures}" PARENT_SCOPE)
endfunction()

# Says what is built, here and in cuda.txt.
function(pipekernels_decide decision)
  message(STATUS "${decision}")
  file(WRITE "${CMAKE_BINARY_DIR}/cuda.txt" "${decision}\n")
endfunction()

if(NOT PIPEKERNELS_CUDA MATCHES "^(auto|0|1)$")
  message(FATAL_ERROR "PIPEKERNELS_CUDA is '${PIPEKERNELS_CUDA}'; it must be auto, 0 or 1.")
endif()
set(PIPEKERNELS_WITH_CUDA OFF)
set(architectures)
if(NOT PIPEKERNELS_CUDA STREQUAL "0")
  if(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(architectures "$ENV{CUDAARCHS}")
  elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    pipekernels_torch_architectures("$ENV{TORCH_CUDA_ARCH_LIST}" architectures)
  elseif(PIPEKERNELS_CUDA STREQUAL "auto")
    pipekernels_visible_architectures(architectures)
  endif()
  set(nvcc "${CMAKE_CUDA_COMPILER}")
  if(NOT nvcc)
    pipekernels_find_nvcc(nvcc)
  endif()
endif()

if(PIPEKERNELS_CUDA STREQUAL "0")
  pipekernels_decide("PIPEKERNELS_CUDA=0: building for CPUs only")
elseif(PIPEKERNELS_CUDA STREQUAL "auto" AND NOT architectures)
  pipekernels_decide("no GPU is visible: building for CPUs only; \
PIPEKERNELS_CUDA=1 builds the CUDA part")
elseif(nvcc)
  get_filename_component(root "${nvcc}" DIRECTORY)
  get_filename_component(CUDAToolkit_ROOT "${root}" DIRECTORY)
  set(PIPEKERNELS_WITH_CUDA ON)
  set(CMAKE_CUDA_COMPILER "${nvcc}")
  if(architectures)
    set(CMAKE_CUDA_ARCHITECTURES "${architectures}")
    pipekernels_decide("CUDA toolkit ${CUDAToolkit_ROOT}, architectures ${architectures}")
  else()
    pipekernels_decide("CUDA toolkit ${CUDAToolkit_ROOT}, all architectures")
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  if(NOT architectures)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100")
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)  # knows no sm_100
      set(CMAKE_CUDA_ARCHITECTURES "80-real;90")
    endif()
  endif()
elseif(PIPEKERNELS_CUDA STREQUAL "1")
  message(FATAL_ERROR "PIPEKERNELS_CUDA=1, but no CUDA toolkit was found in CUDACXX, CUDA_HOME, "
    "CUDA_PATH, PATH or /usr/local/cuda*. Install one, or set CUDA_HOME to its root; "
    "PIPEKERNELS_CUDA=0 builds for CPUs only.")
else()
  pipekernels_decide("no CUDA toolkit is found: building for CPUs only; CUDA_HOME names a toolkit")
endif()
